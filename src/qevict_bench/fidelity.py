"""How far a method's next-token distribution is from FullKV's on the same text, one token per decode step.

The prompt is read as in generation; then the tokens of a stream are fed one at a time, whatever the method predicts, so
that both sides are asked about the same text. Two streams:

- `gold`, the text that should follow the prompt: the headline. Where a small model ends in a loop of its own, every
  cache predicts the next token of the loop, and KL is near 0 without meaning anything.
- `full_kv`, FullKV's own greedy tokens, its end of text included; `looping` flags those loops.

FullKV's side is stored and shared by all methods. What is compared with it is cut into the same steps (protocol) and
batched in the same company: in 16 bits another cut or company changes logits by rounding. So FullKV against itself
gives exactly 0, and so does any method that moves nothing. Methods that fit differently to the examples of a batch run
them in smaller batches, and their KL holds that rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from qevict_bench.budget import Budget
from qevict_bench.engine import QUERY_AWARE, Readings, check_length
from qevict_bench.environment import code_hash, cpu_name
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy
from qevict_bench.protocol import Protocol, Steps, lengths
from qevict_bench.selection import KeepEverything
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.settings import STREAMS, Stream
from qevict_bench.streams import Predictions, joined, kl_divergence, load, looping, most_probable, predict, save
from qevict_bench.task import Prompt

MAX_TOKENS = 48
_UNKEPT = Readings(kept=False)

Teacher = Callable[[int, int, Tensor], tuple[int, Tensor, bool]]
"""(row, index, logits [V]) -> the stream's token there, the ids [K] to keep apart, whether the stream ends with it."""


@dataclass(frozen=True)
class Fidelity:
    """One method on one stream of `tokens` tokens. Nats per token; shares in [0, 1].

    The first token, which hangs on `first_token` and on the whole prompt, is apart: `kl_first`, `agreement_first`. `kl`
    and `agreement` (both predict the same token) are means over the others, None if there are none. `divergence` counts
    from 1: the first token that the two predict differently, or `tokens` if there is none (`diverged` says which).
    `nll` is the method's mean -log p of all the stream's tokens, `nll_change` that minus FullKV's.
    """

    tokens: int
    kl_first: float
    agreement_first: float
    kl: float | None
    agreement: float | None
    divergence: int
    diverged: bool
    nll: float
    nll_change: float
    looping: bool

    def metrics(self) -> dict[str, float]:
        """As numbers by name; what is None is left out."""
        return {name: float(value) for name, value in asdict(self).items() if value is not None}


def compare(full: Predictions, method: Predictions) -> Fidelity:
    """The fidelity of a method's predictions to FullKV's along one stream."""
    kl_N = kl_divergence(full, method)
    same_N = full.argmax_N == method.argmax_N
    num, differing = len(same_N), (~same_N).nonzero().flatten().tolist()
    nll, full_nll = (-float(each.token_log_prob_N.double().mean()) for each in (method, full))
    return Fidelity(
        tokens=num,
        kl_first=float(kl_N[0]),
        agreement_first=float(same_N[0]),
        kl=float(kl_N[1:].mean()) if num > 1 else None,
        agreement=float(same_N[1:].double().mean()) if num > 1 else None,
        divergence=differing[0] + 1 if differing else num,
        diverged=bool(differing),
        nll=nll,
        nll_change=nll - full_nll,
        looping=looping(full.token_N.tolist()),
    )


@dataclass(frozen=True)
class _Batch:
    """Examples that FullKV reads together: steps and gold tokens of each, and the most tokens a stream may have."""

    loaded: LoadedModel
    steps: tuple[Steps, ...]
    golds: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    first_token: str
    chunk: int

    def key(self, row: int, stream: str) -> str:
        """Everything that can change FullKV's predictions for one example, as a text."""
        loaded = self.loaded
        is_cuda = loaded.device == "cuda"
        company = json.dumps([self.steps, self.golds, self.limits]).encode()
        return json.dumps(
            {
                **_code(),
                "device": torch.cuda.get_device_name(loaded.model.device) if is_cuda else cpu_name(),
                "threads": torch.get_num_threads(),
                "model": [loaded.fingerprint, loaded.dtype, loaded.eos_ids],
                "first_token": self.first_token,
                "chunk": self.chunk,
                "batch": hashlib.sha256(company).hexdigest(),
                "row": row,
                "stream": stream,
            }
        )

    def session(
        self,
        policy: KVPolicy,
        budget: Budget,
        rows: Sequence[int],
        room: Sequence[int],
        seeds: Sequence[str],
        readings: Readings,
    ) -> tuple[KVSession, Tensor]:
        """A session that has read the prompts of `rows`, with room for so many tokens each, and its logits [B, V]."""
        return readings.open(
            self.loaded,
            policy,
            budget,
            [self.steps[row] for row in rows],
            [room[row] for row in rows],
            [seeds[row] for row in rows],
            self.first_token,
            self.chunk,
            keep=False,
        )


@cache
def _code() -> dict[str, str]:
    """What runs, as this process found it: files may be edited meanwhile."""
    return {"code": code_hash(), **{name: version(name) for name in ("torch", "transformers")}}


def measure(
    loaded: LoadedModel,
    policy: KVPolicy,
    budget: Budget,
    prompts: Sequence[Prompt],
    golds: Sequence[Sequence[int]],
    *,
    folder: Path,
    max_new_tokens: Sequence[int],
    protocol: Protocol = QUERY_AWARE,
    seed: int,
    example_ids: Sequence[str],
    streams: Sequence[Stream] = STREAMS,
    max_tokens: int = MAX_TOKENS,
    prefill_chunk: int = 1024,
    readings: Readings = _UNKEPT,
) -> list[dict[str, float]]:
    """Fidelity of every example, its names headed by the stream's: {"gold.kl": 0.02, "full_kv.tokens": 48.0, ...}, and
    `memory`: the method's bytes / FullKV bytes, mean over the stream's decode steps (after the prompt without any).

    `golds` are the ids of the gold texts (Prompter.continuation). A stream has at most `max_tokens` tokens, and as many
    as the model's context has room for; of an empty gold text there is nothing but gold.tokens = 0. The method is
    fitted for `max_new_tokens`, as in generation, or for the longest stream where that is longer. `folder` keeps
    FullKV's predictions; a file that is missing, damaged or of another origin is made (again).

    `readings` may hold the prompts as generation read them.
    With multi_query every question is read alone, with its own context. Raises ValueError for mode=continue, for
    prompts longer than the model's context, and what `generate` raises.
    """
    if protocol.mode == "continue":
        raise ValueError(
            "mode=continue has no fidelity: a question would follow different answers for FullKV and for the method; "
            "use mode=reset"
        )
    if unknown := set(streams) - set(STREAMS):
        raise ValueError(f"streams={sorted(unknown)} are unknown; choose from {', '.join(STREAMS)}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} is not positive; give an integer of at least 1")
    for prompt, name in zip(prompts, example_ids, strict=True):
        check_length(loaded, name, len(prompt.ids), 1)
    limits = tuple(min(max_tokens, loaded.max_context - len(prompt.ids)) for prompt in prompts)
    cut = tuple(tuple(gold[:limit]) for gold, limit in zip(golds, limits, strict=True))
    steps = tuple(protocol.steps(prompt) for prompt in prompts)
    metrics: list[dict[str, float]] = [{f"{stream}.tokens": 0.0 for stream in streams} for _ in prompts]
    for num_steps in sorted({len(each) for each in steps}):
        part = [i for i, each in enumerate(steps) if len(each) == num_steps]  # a session feeds all rows the same steps
        batch = _Batch(
            loaded,
            tuple(steps[i] for i in part),
            tuple(cut[i] for i in part),
            tuple(limits[i] for i in part),
            protocol.first_token,
            prefill_chunk,
        )
        names = [f"{seed}/{example_ids[i]}" for i in part]
        new = [max_new_tokens[i] for i in part]
        measured = _measured(batch, policy, budget, new, names, streams, folder, readings)
        for i, found in zip(part, measured, strict=True):
            metrics[i] |= found
    return metrics


def _measured(
    batch: _Batch,
    policy: KVPolicy,
    budget: Budget,
    max_new_tokens: Sequence[int],
    seeds: Sequence[str],
    streams: Sequence[Stream],
    folder: Path,
    readings: Readings,
) -> list[dict[str, float]]:
    loaded, steps = batch.loaded, batch.steps
    full = _full_kv(batch, streams, folder)
    room = [
        max(new, *(len(each.token_N) for each in found.values())) if found else new
        for found, new in zip(full, max_new_tokens, strict=True)
    ]
    policy.admit(budget)
    policy = policy.prepare(loaded.name, loaded.fingerprint)
    groups: dict[KVPolicy, list[int]] = {}
    for i, num in enumerate(room):
        groups.setdefault(policy.fit(budget, geometry_of(loaded), *lengths(steps[i], num)), []).append(i)
    metrics: list[dict[str, float]] = [{} for _ in steps]
    for fitted, members in groups.items():
        session, logits_BV = batch.session(fitted, budget, members, room, seeds, readings)
        for stream, branch in _branches(session, streams):
            taught = {row: full[i][stream] for row, i in enumerate(members) if stream in full[i]}
            for row, found in _follow(branch, logits_BV, list(taught), _same_as(taught)).items():
                shares = [used / whole for used, whole, _ in branch.trace[row].decode] or [
                    branch.trace[row].after_prefill
                ]
                measured = {**compare(taught[row], found).metrics(), "memory": sum(shares) / len(shares)}
                metrics[members[row]] |= {f"{stream}.{name}": value for name, value in measured.items()}
    return metrics


def _full_kv(batch: _Batch, streams: Sequence[Stream], folder: Path) -> list[dict[str, Predictions]]:
    """FullKV's predictions per example and stream, but for empty gold texts: from `folder`, or computed and stored."""
    full: list[dict[str, Predictions]] = [{} for _ in batch.steps]
    missing: dict[Stream, list[int]] = {}
    for row, gold in enumerate(batch.golds):
        for stream in streams:
            if stream == "gold" and not gold:
                continue
            found = load(folder, batch.key(row, stream))
            if found is None:
                missing.setdefault(stream, []).append(row)
            else:
                full[row][stream] = found
    if not missing:
        return full
    rows = range(len(batch.steps))
    names = [str(row) for row in rows]
    session, logits_BV = batch.session(KeepEverything(), Budget("1.0"), rows, batch.limits, names, _UNKEPT)
    for stream, branch in _branches(session, list(missing)):
        follow = _gold(batch.golds) if stream == "gold" else _greedy(batch.limits, batch.loaded.eos_ids)
        present = [row for row in rows if stream == "full_kv" or batch.golds[row]]
        made = _follow(branch, logits_BV, present, follow)
        for row in missing[stream]:
            save(folder, batch.key(row, stream), made[row])
            full[row][stream] = made[row]
    return full


def _branches(session: KVSession, streams: Sequence[Stream]) -> Iterator[tuple[Stream, KVSession]]:
    """A copy of the session for each stream; the last one takes the session itself."""
    for stream in streams[:-1]:
        yield stream, session.fork()
    for stream in streams[-1:]:
        yield stream, session


def _follow(session: KVSession, logits_BV: Tensor, rows: Sequence[int], teacher: Teacher) -> dict[int, Predictions]:
    """Feed the streams of `rows`, one token per step, after `logits_BV`; every row freezes where its stream ends."""
    seen: dict[int, list[Predictions]] = {row: [] for row in rows}
    session.active = list(rows)
    index = 0
    while session.active:
        tokens = [0] * len(logits_BV)
        for row in list(session.active):
            tokens[row], top_K, is_last = teacher(row, index, logits_BV[row])
            seen[row].append(predict(logits_BV[row][None], torch.tensor([tokens[row]]), top_K[None]))
            if is_last:
                session.freeze(row)
        if session.active:
            logits_BV = session.decode(tokens)
        index += 1
    return {row: joined(parts) for row, parts in seen.items()}


def _gold(golds: Sequence[Sequence[int]]) -> Teacher:
    def teacher(row: int, index: int, logits_V: Tensor) -> tuple[int, Tensor, bool]:
        return golds[row][index], most_probable(logits_V[None])[0], index + 1 == len(golds[row])

    return teacher


def _greedy(limits: Sequence[int], eos_ids: Sequence[int]) -> Teacher:
    def teacher(row: int, index: int, logits_V: Tensor) -> tuple[int, Tensor, bool]:
        token = int(logits_V.argmax())
        return token, most_probable(logits_V[None])[0], token in eos_ids or index + 1 == limits[row]

    return teacher


def _same_as(taught: Mapping[int, Predictions]) -> Teacher:
    def teacher(row: int, index: int, logits_V: Tensor) -> tuple[int, Tensor, bool]:
        full = taught[row]
        return int(full.token_N[index]), full.top_NK[index], index + 1 == len(full.token_N)

    return teacher
