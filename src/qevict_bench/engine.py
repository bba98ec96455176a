"""Greedy generation under a policy and a budget: the one call the runner makes.

Prompts whose fitted policies and numbers of steps agree share a batch; every row is what it would be alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qevict_bench.budget import Budget
from qevict_bench.models import LoadedModel
from qevict_bench.policy import EVICTED, KVPolicy
from qevict_bench.protocol import Protocol, Steps, lengths
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.task import Prompt
from qevict_bench.trace import RowTrace

QUERY_AWARE = Protocol()


@dataclass(frozen=True)
class Generation:
    """What one prompt gave. `stop`: eos, stop_string, length (the limit), or fixed (all answers are so long).
    `fractions` are bytes / FullKV bytes at the same step (after_prefill, peak, mean and final
    over decode steps, whole_cache with sliding layers); `memory` bytes: allowed at the last step, after_prefill, peak,
    mean, final, prefill_peak, workspace, host, and the components of `Usage.counted` at the end. promotions, demotions,
    evictions are unit moves summed over layers; tier_units mean units per layer and table head at the end; needle_fate
    shares of the answer tokens per tier over layers and KV heads before the first answer token. Times in seconds, the
    batch's divided by its rows.
    """

    new_ids: tuple[int, ...]
    text: str
    stop: str
    fractions: dict[str, float]
    memory: dict[str, float]
    matched: bool
    events: int
    promotions: int
    demotions: int
    evictions: int
    tier_units: dict[str, float]
    needle_fate: dict[str, float]
    knobs: dict[str, Any]
    ttft_s: float
    decode_s: float


def generate(
    loaded: LoadedModel,
    policy: KVPolicy,
    budget: Budget,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: Sequence[int],
    stop: tuple[str, ...],
    min_new_tokens: int = 0,
    protocol: Protocol = QUERY_AWARE,
    seed: int,
    example_ids: Sequence[str],
    prefill_chunk: int = 1024,
    working_copy: bool = True,
    readings: Readings | None = None,
) -> list[Generation]:
    """Greedy continuation of every prompt alone, at most its `max_new_tokens`, ended by the model's EOS or a stop
    string; the EOS has probability 0 before `min_new_tokens`. The protocol says where prompts are cut and compressed.
    `readings` keeps what was read for fidelity.measure.

    Raises BudgetExceeded, Infeasible, or ValueError for prompts that are longer than the model's context or cannot be
    cut.
    """
    policy.admit(budget)
    policy = policy.prepare(loaded.name, loaded.fingerprint)
    steps = [protocol.steps(prompt) for prompt in prompts]
    batches: dict[tuple[KVPolicy, int], list[int]] = {}
    for i, (prompt, new) in enumerate(zip(prompts, max_new_tokens, strict=True)):
        check_length(loaded, example_ids[i], len(prompt.ids), new)
        fitted = policy.fit(budget, geometry_of(loaded), *lengths(steps[i], new))
        batches.setdefault((fitted, len(steps[i])), []).append(i)
    done: dict[int, Generation] = {}
    for (fitted, _), members in batches.items():
        begin = time.perf_counter()
        session, logits = (readings or Readings(kept=False)).open(
            loaded,
            fitted,
            budget,
            [steps[i] for i in members],
            [max_new_tokens[i] for i in members],
            [f"{seed}/{example_ids[i]}" for i in members],
            protocol.first_token,
            prefill_chunk,
            working_copy,
        )
        asked = {row: Asked(prompts[i], max_new_tokens[i]) for row, i in enumerate(members)}
        done.update(zip(members, answer(session, logits, asked, stop, min_new_tokens, begin), strict=True))
    return [done[i] for i in range(len(prompts))]


class Readings:
    """Prompts that were read, `kept` for one more use: answers and fidelity need not both read them."""

    def __init__(self, kept: bool = True) -> None:
        self._kept: dict[Any, tuple[KVSession, Tensor]] | None = {} if kept else None

    def open(
        self,
        loaded: LoadedModel,
        policy: KVPolicy,
        budget: Budget,
        steps: Sequence[Steps],
        new_tokens: Sequence[int],
        seeds: Sequence[str],
        first_token: str,
        chunk: int,
        working_copy: bool = True,
        keep: bool = True,
    ) -> tuple[KVSession, Tensor]:
        """A session whose rows have read their `steps`, with room for so many new tokens, and its logits [B, V]."""
        key = (
            loaded.fingerprint,
            policy,
            budget,
            *map(tuple, (steps, new_tokens, seeds)),
            first_token,
            chunk,
            working_copy,
        )
        if self._kept is not None and key in self._kept:
            return self._kept.pop(key)
        max_new = [lengths(each, new)[1] for each, new in zip(steps, new_tokens, strict=True)]
        how: dict[str, Any] = {"max_new": max_new, "seeds": seeds, "working_copy": working_copy}
        session = KVSession(loaded, policy, budget, len(steps), **how)
        logits = read(session, steps, first_token, chunk)
        if self._kept is not None and keep:
            self._kept[key] = session.fork(), logits
        return session, logits


class Asked(NamedTuple):
    """What one row of a session was asked, and how many tokens its answer may have."""

    prompt: Prompt
    max_new: int


def check_length(loaded: LoadedModel, name: str, num_tokens: int, max_new: int) -> None:
    """Raise ValueError unless a prompt and its answer fit the model's context."""
    if num_tokens < 2 or num_tokens + max_new > loaded.max_context:
        raise ValueError(
            f"prompt {name} has {num_tokens} tokens; with {max_new} new ones it must fit 2..{loaded.max_context}: use "
            "a shorter context_length or another model"
        )


def read(session: KVSession, steps: Sequence[Steps], first_token: str, chunk: int, later: bool = False) -> Tensor:
    """Feed the active rows their steps (token ids), as many for each; logits [B, V] of the last token of each.

    The first step is the prefill unless these are `later` turns. With first_token=compressed the last step is one token
    and is decoded, unless it is all that a later turn has; any other step ends with a routing event.
    """
    num, logits = len(steps[session.active[0]]), torch.empty(0)
    for index in range(num):
        parts = [row[index] if row else () for row in steps]
        if index == 0 and not later:
            logits = session.prefill(parts, chunk)
        elif index == num - 1 and first_token == "compressed" and (index or not later):
            logits = session.decode([part[0] if part else 0 for part in parts])
        else:
            logits = session.append(parts, chunk)
    return logits


def answer(
    session: KVSession, logits: Tensor, asked: Mapping[int, Asked], stop: tuple[str, ...], min_new: int, begin: float
) -> list[Generation]:
    """Greedy answers of the active rows after `logits` [B, V], which a turn begun at `begin` (perf_counter) gave.

    Rows end frozen, at the model's EOS (not before `min_new` tokens), a stop string, or their limit.
    """
    loaded, rows = session.loaded, list(session.active)
    eos_ids = list(loaded.eos_ids)
    tokens = _greedy(logits, eos_ids if min_new else [])
    ttft = time.perf_counter() - begin
    fates = {row: _needle_fate(session, row, asked[row].prompt.answer_positions) for row in rows}
    new_ids: dict[int, list[int]] = {row: [] for row in rows}
    texts, stops, num_new = dict.fromkeys(rows, ""), dict.fromkeys(rows, "length"), 0
    while True:
        for row in list(session.active):
            if tokens[row] in loaded.eos_ids:
                stops[row] = "eos"
            else:
                new_ids[row].append(tokens[row])
                texts[row], cut = _text(loaded, new_ids[row], stop)
                stops[row] = "stop_string" if cut else "length"
            if stops[row] != "length" or len(new_ids[row]) >= asked[row].max_new:
                session.freeze(row)
        if not session.active:
            break
        num_new += 1
        tokens = _greedy(session.decode(tokens), eos_ids if num_new < min_new else [])
    decode_s = (time.perf_counter() - begin - ttft) / len(rows)
    stops |= {row: "fixed" for row in rows if stops[row] == "length" and min_new >= asked[row].max_new}
    return [
        _generation(session, row, tuple(new_ids[row]), texts[row], stops[row], fates[row], ttft / len(rows), decode_s)
        for row in rows
    ]


def _greedy(logits_BV: Tensor, never: Sequence[int]) -> list[int]:
    """The most probable token of every row, but for the ids `never`."""
    ids = torch.tensor(never, dtype=torch.int64, device=logits_BV.device)
    tokens: list[int] = logits_BV.index_fill(1, ids, -torch.inf).argmax(dim=-1).tolist()
    return tokens


def _text(loaded: LoadedModel, ids: list[int], stop: tuple[str, ...]) -> tuple[str, bool]:
    """Decoded text, cut before the first stop string, and whether one was found."""
    text: str = loaded.tokenizer.decode(ids, skip_special_tokens=True)
    found = [at for at in (text.find(mark) for mark in stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def _needle_fate(session: KVSession, row: int, positions: tuple[int, ...]) -> dict[str, float]:
    if not positions:
        return {}
    names = {i: tier.name for i, tier in enumerate(session.policy.tiers)} | {EVICTED: "evicted"}
    shares = dict.fromkeys(names.values(), 0.0)
    for layer in session.layers.values():
        tiers = layer.tiers_of(row, torch.tensor(positions, device=layer.device))
        for tier, name in names.items():
            shares[name] += float((tiers == tier).float().mean()) / len(session.layers)
    return shares


def _matched(session: KVSession, trace: RowTrace) -> bool:
    """Mean decode bytes fall short by at most 3 %, or by one event's growth plus one unit per head (DESIGN:

    matched).
    """
    if session.budget.native or session.budget.everything:
        return session.budget.everything
    steps = [(used, allowed) for used, _, allowed in trace.decode]
    steps = steps or [(trace.after_prefill_bytes, trace.after_prefill_allowed)]
    allowed = sum(allowed for _, allowed in steps) / len(steps)
    short = allowed - sum(used for used, _ in steps) / len(steps)
    growth = session.policy.cadence.decode_every + session.policy.unit
    return 0 <= short <= max(0.03 * allowed, session.geometry.full_bytes(growth))


def _generation(
    session: KVSession,
    row: int,
    new_ids: tuple[int, ...],
    text: str,
    stop: str,
    fate: dict[str, float],
    ttft_s: float,
    decode_s: float,
) -> Generation:
    trace = session.trace[row]
    used = [n for n, _, _ in trace.decode] or [trace.after_prefill_bytes]
    shares = [n / whole for n, whole, _ in trace.decode] or [trace.after_prefill]
    usage = trace.usage
    memory: dict[str, float] = {
        "allowed": trace.decode[-1][2] if trace.decode else trace.after_prefill_allowed,
        "after_prefill": trace.after_prefill_bytes,
        "peak": max(used),
        "mean": sum(used) / len(used),
        "final": used[-1],
        "prefill_peak": trace.prefill_peak_bytes,
        "workspace": trace.workspace,
        "host": usage.host,
        **usage.counted,
    }
    fractions = {
        "after_prefill": trace.after_prefill,
        "peak": max(shares),
        "mean": sum(shares) / len(shares),
        "final": shares[-1],
        "whole_cache": trace.whole_cache,
    }
    tier_units: dict[str, float] = {}
    for index, tier in enumerate(session.policy.tiers):
        counts = [float((x.table.rect().tier[row] == index).sum(-1).float().mean()) for x in session.layers.values()]
        tier_units[tier.name] = sum(counts) / len(counts)
    return Generation(
        new_ids=new_ids,
        text=text,
        stop=stop,
        fractions=fractions,
        memory=memory,
        matched=_matched(session, trace),
        events=trace.events,
        promotions=trace.promotions,
        demotions=trace.demotions,
        evictions=trace.evictions,
        tier_units=tier_units,
        needle_fate=fate,
        knobs=session.policy.knobs(),
        ttft_s=ttft_s,
        decode_s=decode_s,
    )
