"""A method and FullKV read the same tokens side by side: what the method's cache lost, measured on FullKV's attention.

The method is teacher-forced, one token per step, in one batch. FullKV keeps everything and reads behind it, several
tokens per forward pass; what it attends to is summed per unit into the interval that the method was in, so nothing of
the size steps x positions is ever held. Whoever does not call this pays nothing for it.

Shapes: B rows, L compressible layers, H KV heads, G query heads per KV head, T table heads (1 if all KV heads share
their tiers), Q new tokens, N predictions, U units of a stream, V vocabulary, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qevict_bench.budget import Budget
from qevict_bench.diagnostics import NOT_YET, Layout
from qevict_bench.engine import check_length
from qevict_bench.models import LoadedModel
from qevict_bench.policy import EVICTED, KVPolicy
from qevict_bench.record import Gathering, Record, Sizes
from qevict_bench.reference import Reference
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.store import LayerStore

BLOCK = 8  # tokens that FullKV reads at once while nothing forces fewer; also the interval of methods without events


@dataclass(frozen=True)
class Part:
    """Tokens that follow each other: decoded one by one, or appended as one step that ends with a routing event."""

    ids: tuple[int, ...]
    decoded: bool


@dataclass(frozen=True)
class Stream:
    """What is read: parts[0] is prefilled, the others follow."""

    name: str
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or self.parts[0].decoded or not all(part.ids for part in self.parts):
            raise ValueError(
                f"stream {self.name}: give a part that is not decoded and at least one that follows, none of them empty"
            )

    @property
    def prompt_len(self) -> int:
        return len(self.parts[0].ids)

    @property
    def later(self) -> int:
        """Steps: tokens after the prefill."""
        return sum(len(part.ids) for part in self.parts[1:])


class Protected(NamedTuple):
    """Tokens that do not compete, for candidates and shares: the first `sink` and the `recent` newest."""

    sink: int
    recent: int


def protected_by(policy: KVPolicy) -> Protected:
    """What a fitted method itself protects: its fields `sink` (else its offset) and `recent` (else none), in tokens."""
    sink, recent = getattr(policy, "sink", policy.offset), getattr(policy, "recent", 0)
    return Protected(sink, recent if isinstance(recent, int) else 0)


def observe_streams(
    loaded: LoadedModel,
    policy: KVPolicy,
    budget: Budget,
    streams: Sequence[Stream],
    *,
    seed: int,
    protected: Callable[[KVPolicy], Protected] = protected_by,
    coded_scores: bool = False,
    low_hidden: bool = False,
    prefill_chunk: int = 1024,
) -> list[Record]:
    """One record per stream, in their order. Streams that share a fitted policy and the form of their parts run as one
    batch, and FullKV holds every stream whole: pass fewer at a time where memory is short.

    `coded_scores` also scores coded keys, which costs about as much as FullKV's side again. With `low_hidden` the
    method does not attend to its low-bit tiers: what is quantized collects no scores, and comes back only by promotion.
    Raises ValueError for streams longer than the model's context, and what `generate` raises.
    """
    policy.admit(budget)
    policy, geometry = policy.prepare(loaded.name, loaded.fingerprint), geometry_of(loaded)
    batches: dict[tuple[KVPolicy, tuple[int, ...]], list[int]] = {}
    for i, stream in enumerate(streams):
        check_length(loaded, stream.name, stream.prompt_len, stream.later)
        fitted = policy.fit(budget, geometry, stream.prompt_len, stream.later)
        form = tuple(len(part.ids) if part.decoded else 0 for part in stream.parts)
        batches.setdefault((fitted, form), []).append(i)
    done: dict[int, Record] = {}
    for (fitted, _), members in batches.items():
        layout = Layout(fitted.unit, fitted.offset, *protected(fitted))
        mine = [streams[i] for i in members]
        batch = _Batch(loaded, fitted, budget, mine, seed, layout, coded_scores, low_hidden, prefill_chunk)
        done.update(zip(members, batch.records(), strict=True))
    return [done[i] for i in range(len(streams))]


class _Method(KVSession):
    """The method's session. It notes attention outputs of what follows the prefill, and scores before every event."""

    def __init__(self, batch: _Batch) -> None:
        later = [stream.later for stream in batch.streams]
        names = [batch.seed_of(stream) for stream in batch.streams]
        super().__init__(batch.loaded, batch.policy, batch.budget, len(later), max_new=later, seeds=names)
        self.batch = batch
        for layer in self.layers.values():
            layer.low_hidden = batch.low_hidden
        self.routed = False
        self.outputs: dict[int, list[tuple[tuple[int, ...], Tensor]]] = {index: [] for index in self.layers}
        self.before: list[Tensor] = []  # score [L, T, U] of every row before the last event

    def attend(
        self, module: nn.Module, q_BHQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        out = super().attend(module, q_BHQD, k_BHQD, v_BHQD, scale, window)
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if index in self.layers and self._step.phase != "prefill":
            self.outputs[index].append((self._step.new, out))
        return out

    def _route(self) -> None:
        self.before = [self.scores(row) for row in range(len(self.seq_len))]
        super()._route()
        self.routed = True

    def sizes(self, row: int) -> Sizes:
        usage = self.trace[row].usage
        return Sizes(usage.total, usage.counted["ledger"], 0, self._allowed(row) or usage.total)

    def fraction(self, row: int) -> float:
        """Bytes held / FullKV bytes, mean over decode steps."""
        used = [held / whole for held, whole, _ in self.trace[row].decode] or [self.trace[row].after_prefill]
        return sum(used) / len(used)

    def outputs_of(self, row: int) -> dict[int, list[Tensor]]:
        """Noted outputs [H * G, Q, D] of a row per layer."""
        return {index: [out[row, :, : new[row]] for new, out in noted] for index, noted in self.outputs.items()}

    def tiers(self, row: int) -> Tensor:
        """Tier [L, T, U] of every unit of the row's stream, int8."""
        num = self.batch.num_units(row)
        gone_U = torch.full((num,), EVICTED, dtype=torch.int8)
        tier_LTU = self._spread(row, gone_U, lambda layer: layer.table.rect().tier[row])
        return tier_LTU.masked_fill(self.batch.layout.end_U(num) > self.seq_len[row], NOT_YET)

    def scores(self, row: int) -> Tensor:
        """The column `score` [L, T, U], nan where there is no unit, or no such column."""
        names, unknown = self.policy.columns, torch.full((self.batch.num_units(row),), nan)
        if "score" not in names:
            return unknown
        return self._spread(row, unknown, lambda layer: layer.table.rect().columns[names.index("score"), row])

    def _spread(self, row: int, empty_U: Tensor, of: Callable[[LayerStore], Tensor]) -> Tensor:
        """Values of the live units of all layers, each at the number of its unit; `empty` at the others."""
        parts = []
        for layer in self.layers.values():
            pos_TU, num = layer.table.rect().pos[row].cpu(), len(empty_U)
            at_TU = self.batch.layout.unit_of(pos_TU)
            at_TU = torch.where((pos_TU >= 0) & (at_TU < num), at_TU, num)  # dead, or room beyond the stream's end
            wide = torch.cat((empty_U, empty_U[:1])).expand(len(pos_TU), -1).clone()
            parts.append(wide.scatter_(1, at_TU, of(layer).cpu().to(wide.dtype))[:, :num])
        return torch.stack(parts)


@dataclass(frozen=True)
class _Batch:
    """Streams of one form under one fitted policy."""

    loaded: LoadedModel
    policy: KVPolicy
    budget: Budget
    streams: Sequence[Stream]
    seed: int
    layout: Layout
    coded_scores: bool
    low_hidden: bool
    chunk: int

    def seed_of(self, stream: Stream) -> str:
        return f"{self.seed}/{stream.name}"

    def num_units(self, row: int) -> int:
        return self.layout.num_units(self.streams[row].prompt_len + self.streams[row].later)

    def records(self) -> list[Record]:
        where = (self.layout, geometry_of(self.loaded), self.loaded.compressible_layers)
        rows = [Gathering(*where, each.prompt_len, each.later, self.coded_scores) for each in self.streams]
        session = _Method(self)
        references = [
            Reference(self.loaded, self.policy, each.prompt_len + each.later, self.seed_of(each), row.take, self.chunk)
            for row, each in zip(rows, self.streams, strict=True)
        ]
        session.prefill([stream.parts[0].ids for stream in self.streams], self.chunk)
        for reference, stream in zip(references, self.streams, strict=True):
            reference.start(stream.parts[0].ids)
        walk = _Walk(session, rows, references, self.coded_scores)
        walk.mark()
        for index, part in enumerate(self.streams[0].parts[1:], 1):
            ids = [stream.parts[index].ids for stream in self.streams]
            if part.decoded:
                walk.decode(ids)
            else:
                walk.append(ids, self.chunk)
        return [
            row.record(stream.name, self.policy, session.fraction(i))
            for i, (row, stream) in enumerate(zip(rows, self.streams, strict=True))
        ]


class _Walk:
    """Both sides on their way through the streams: the method ahead, FullKV behind."""

    def __init__(
        self, session: _Method, rows: Sequence[Gathering], references: Sequence[Reference], every_event: bool
    ) -> None:
        self.session, self.rows, self.references = session, rows, references
        self.every_event = every_event  # FullKV must not read beyond an event
        self.ahead: list[list[int]] = [[] for _ in rows]  # tokens that FullKV has not read
        self.logits: list[Tensor] = []  # the method's, after the last of these tokens
        self.since = 0  # tokens since the last mark

    def mark(self) -> None:
        for index, row in enumerate(self.rows):
            session, score_LTU = self.session, self.session.scores(index)
            before_LTU = session.before[index] if session.routed else score_LTU
            row.mark(session.seq_len[index], session.tiers(index), before_LTU, score_LTU, session.sizes(index))
        self.session.routed, self.since = False, 0

    def decode(self, ids: Sequence[Sequence[int]]) -> None:
        for tokens in zip(*ids, strict=True):
            self.logits.append(self.session.decode(tokens))
            self._read([[token] for token in tokens], decoded=True)
            events = self.session.policy.cadence.decode_every > 0
            due = self.session.routed if events else self.since == BLOCK
            if len(self.logits) == BLOCK or (due and self.every_event):
                self._follow()
            if due:
                self.mark()
        self._follow()

    def append(self, ids: Sequence[Sequence[int]], chunk: int) -> None:
        self.logits.append(self.session.append(ids, chunk))
        self._read(ids, decoded=False)
        self._follow()
        self.mark()

    def _read(self, ids: Sequence[Sequence[int]], decoded: bool) -> None:
        for row, tokens, ahead in zip(self.rows, ids, self.ahead, strict=True):
            row.expect(len(tokens), decoded)
            ahead += tokens
        self.since += 1

    def _follow(self) -> None:
        """FullKV reads what the method has read."""
        if not self.logits:
            return
        method_BNV = torch.stack(self.logits, dim=1)
        for index, (row, reference, tokens) in enumerate(zip(self.rows, self.references, self.ahead, strict=True)):
            coded = dict(zip(self.session.layers, row.tier[-1], strict=True)) if self.every_event else {}
            full_NV = reference.feed(tokens, method_BNV.shape[1], coded)
            row.compare(method_BNV[index], full_NV, self.session.outputs_of(index), reference.outputs)
            tokens.clear()
        self.logits.clear()
        for noted in self.session.outputs.values():
            noted.clear()
