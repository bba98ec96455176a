"""Greedy generation under a policy and a budget: the one call the runner makes.

Prompts whose fitted policies agree share a batch; every row is what it would be alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qevict_bench.budget import Budget
from qevict_bench.models import LoadedModel
from qevict_bench.policy import EVICTED, KVPolicy
from qevict_bench.session import KVSession, RowTrace, geometry_of
from qevict_bench.task import Prompt

FIRST_TOKEN = ("compressed", "full")


@dataclass(frozen=True)
class Generation:
    """What one prompt gave. `fractions` are bytes / FullKV bytes at the same step (after_prefill, peak, mean and final
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
    max_new_tokens: int,
    stop: tuple[str, ...],
    first_token: str = "compressed",
    seed: int,
    example_ids: Sequence[str],
    prefill_chunk: int = 1024,
    working_copy: bool = True,
) -> list[Generation]:
    """Greedy continuation of every prompt, at most `max_new_tokens` tokens, ended by the model's EOS or a stop string.

    first_token `compressed` runs all but the last prompt token, routes, then runs that token, so that no answer token
    ever saw the full cache; `full` runs the whole prompt first, as most official code does.
    Raises BudgetExceeded, Infeasible, or ValueError for prompts longer than the model's context.
    """
    if first_token not in FIRST_TOKEN:
        raise ValueError(f"first_token={first_token!r} is unknown; choose {' or '.join(FIRST_TOKEN)}")
    geometry, policy = geometry_of(loaded), policy.prepare(loaded.name, loaded.fingerprint)
    batches: dict[KVPolicy, list[int]] = {}
    for i, prompt in enumerate(prompts):
        if len(prompt.ids) < 2 or len(prompt.ids) + max_new_tokens > loaded.max_context:
            raise ValueError(
                f"prompt {example_ids[i]} has {len(prompt.ids)} tokens; with {max_new_tokens} new ones it must fit "
                f"2..{loaded.max_context}: use a shorter context_length or another model"
            )
        before = len(prompt.ids) - (first_token == "compressed")
        batches.setdefault(policy.fit(budget, geometry, before, max_new_tokens), []).append(i)
    done: dict[int, Generation] = {}
    for fitted, members in batches.items():
        session = KVSession(
            loaded,
            fitted,
            budget,
            len(members),
            max_new=max_new_tokens,
            seeds=[f"{seed}/{example_ids[i]}" for i in members],
            working_copy=working_copy,
        )
        batch = _run(session, [prompts[i] for i in members], max_new_tokens, stop, first_token, prefill_chunk)
        done.update(zip(members, batch, strict=True))
    return [done[i] for i in range(len(prompts))]


def _run(
    session: KVSession, prompts: list[Prompt], max_new: int, stop: tuple[str, ...], first_token: str, chunk: int
) -> list[Generation]:
    loaded, begin = session.loaded, time.perf_counter()
    if first_token == "compressed":
        session.prefill([prompt.ids[:-1] for prompt in prompts], chunk)
        logits = session.decode([prompt.ids[-1] for prompt in prompts])
    else:
        logits = session.prefill([prompt.ids for prompt in prompts], chunk)
    tokens = logits.argmax(dim=-1).tolist()
    ttft = time.perf_counter() - begin
    fates = [_needle_fate(session, row, prompt.answer_positions) for row, prompt in enumerate(prompts)]
    new_ids: list[list[int]] = [[] for _ in prompts]
    texts, stops = [""] * len(prompts), ["length"] * len(prompts)
    for step in range(max_new):
        for row in list(session.active):
            if tokens[row] in loaded.eos_ids:
                stops[row] = "eos"
            else:
                new_ids[row].append(tokens[row])
                texts[row], cut = _text(loaded, new_ids[row], stop)
                stops[row] = "stop_string" if cut else "length"
            if stops[row] != "length":
                session.freeze(row)
        if not session.active or step == max_new - 1:
            break
        tokens = session.decode(tokens).argmax(dim=-1).tolist()
    decode_s = time.perf_counter() - begin - ttft
    ttft, decode_s = ttft / len(prompts), decode_s / len(prompts)
    return [
        _generation(session, row, tuple(new_ids[row]), texts[row], stops[row], fates[row], ttft, decode_s)
        for row in range(len(prompts))
    ]


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
