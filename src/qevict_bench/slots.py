"""Flat containers of the store: full-precision slots and packed units, without pads between rows or heads.

Shapes: B rows, H KV heads, N slots of all segments together, E packed units (entries), W slots per unit, D head dim.
Segment s = row * H + head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from qevict_bench.codecs import Codec

CPU_BLOCK = 512


class Block(NamedTuple):
    """Segments that read as one rectangle: rows and heads it spans, keys and values [R, Hb, S, D]."""

    rows: slice
    heads: slice
    keys: Tensor
    values: Tensor


class Slots:
    """Keys and values of all segments in two flat buffers; segment s has `count[s]` slots and room for `cap[s]`."""

    def __init__(self, count: list[int], room: Sequence[int], num_heads: int, like: Tensor) -> None:
        self.num_heads = num_heads
        self.count = list(count)
        self.cap = [c + r for c, r in zip(count, room, strict=True)]
        self.start = [0, *accumulate(self.cap)][:-1]
        self.k = like.new_empty((sum(self.cap), like.shape[-1]))
        self.v = torch.empty_like(self.k)
        ends = [s + c for s, c in zip(self.start, self.count, strict=True)]
        self.end = torch.tensor(ends, device=like.device)  # flat index of each segment's next slot
        self.first = torch.tensor(self.start, device=like.device).view(-1, num_heads)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def _same(self, first: int, last: int) -> bool:
        return len(set(self.count[first:last])) <= 1 and len(set(self.cap[first:last])) <= 1

    def _rect(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        count, begin, stop = self.count[first], self.start[first], self.start[last - 1] + self.cap[last - 1]
        shape = (last - first, self.cap[first], self.k.shape[-1])
        return self.k[begin:stop].view(shape)[:, :count], self.v[begin:stop].view(shape)[:, :count]

    def ensure(self, room: Sequence[int]) -> None:
        """Make room for `room[s]` more slots in every segment; moves the buffers if it lacks."""
        if any(c + r > cap for c, r, cap in zip(self.count, room, self.cap, strict=True)):
            self._resize(room)

    def release(self) -> None:
        """Give all room back."""
        self._resize([0] * len(self.count))

    def _resize(self, room: Sequence[int]) -> None:
        grown = Slots(self.count, room, self.num_heads, self.k)
        for s, count in enumerate(self.count):
            if count:
                grown.k[grown.start[s] : grown.start[s] + count] = self.k[self.start[s] : self.start[s] + count]
                grown.v[grown.start[s] : grown.start[s] + count] = self.v[self.start[s] : self.start[s] + count]
        self.k, self.v, self.end, self.first = grown.k, grown.v, grown.end, grown.first
        self.cap, self.start = grown.cap, grown.start

    def append(self, rows: list[int], new_B: list[int], k_BHQD: Tensor, v_BHQD: Tensor) -> None:
        """Append `new_B[row]` tokens to every head of the given rows; room must have been ensured."""
        heads, dim = self.num_heads, self.k.shape[-1]
        ends = self.end.view(-1, heads)
        if all(new_B[row] == 1 for row in rows):
            every = len(rows) == len(new_B)
            at = self.end if every else ends[rows].flatten()
            self.k.index_copy_(0, at, (k_BHQD if every else k_BHQD[rows])[:, :, 0].reshape(-1, dim))
            self.v.index_copy_(0, at, (v_BHQD if every else v_BHQD[rows])[:, :, 0].reshape(-1, dim))
        else:
            for row in rows:
                for head in range(heads):
                    begin, new = self.start[row * heads + head] + self.count[row * heads + head], new_B[row]
                    self.k[begin : begin + new] = k_BHQD[row, head, :new]
                    self.v[begin : begin + new] = v_BHQD[row, head, :new]
        for row in rows:
            ends[row] += new_B[row]
            for s in range(row * heads, (row + 1) * heads):
                self.count[s] += new_B[row]

    def blocks(self, rows: list[int]) -> Iterator[Block]:
        """The given rows (ascending) in the largest rectangles that need no copy."""
        heads = self.num_heads
        contiguous = rows == list(range(rows[0], rows[-1] + 1))
        if contiguous and self._same(rows[0] * heads, (rows[-1] + 1) * heads):
            k, v = self._rect(rows[0] * heads, (rows[-1] + 1) * heads)
            shape = (len(rows), heads, *k.shape[1:])
            yield Block(
                slice(rows[0], rows[-1] + 1), slice(0, heads), k.unflatten(0, shape[:2]), v.unflatten(0, shape[:2])
            )
            return
        for row in rows:
            whole = self._same(row * heads, (row + 1) * heads)
            for head in [0] if whole else range(heads):
                stop = heads if whole else head + 1
                k, v = self._rect(row * heads + head, row * heads + stop)
                yield Block(slice(row, row + 1), slice(head, stop), k[None], v[None])


class Lane:
    """Packed keys or packed values of one tier: E entries in (row, head, position) order and their shared parameters.

    `slot` tensors [E, W, ...]; `shared` parameter tensors [groups, ...]. Entry i owns group i; where groups span units,
    `group_of` (int32 [E]) says which, unless the codec has whole groups only: then it is i // group. Where a group is a
    whole segment (group=0), `shared` has one row per segment, zeros if it holds nothing. A `joined` codec stores the
    i-th units of all heads of a row as one, H * D channels wide; `joined_counts` says how many, per row.
    """

    def __init__(self, codec: Codec, num_rows: int, num_heads: int) -> None:
        self.codec, self.num_rows, self.num_heads = codec, num_rows, num_heads
        self.joined_counts: list[int] = []
        self.slot: tuple[Tensor, ...] = ()
        self.shared: tuple[Tensor, ...] = ()
        self.group_of: Tensor | None = None

    @property
    def grouped(self) -> bool:
        """Whether entries point to their groups."""
        return self.codec.group > 1 and not self.codec.whole

    @property
    def span(self) -> int:
        """Entries per group where groups are whole."""
        return self.codec.group if self.codec.whole else 1

    @property
    def by_segment(self) -> bool:
        """Whether all entries of a segment share parameters; they are then encoded together, and only so."""
        return self.codec.shared and self.codec.group == 0

    @property
    def width(self) -> int:
        """Entries that are stored as one."""
        return self.num_heads if self.codec.joined else 1

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.slot, *self.shared, *(() if self.group_of is None else (self.group_of,)))

    def encode(self, x_EWD: Tensor, segment_E: Tensor, reference: tuple[Tensor, ...]) -> Lane:
        """A new lane of the given units (in segment order); units of one segment share groups of `codec.group`."""
        fresh = Lane(self.codec, self.num_rows, self.num_heads)
        if self.by_segment:
            return self._encode_segments(fresh, x_EWD, segment_E, reference)
        if not self.grouped:
            unit, segment_N = x_EWD.shape[1], segment_E[:: self.span]
            if len(x_EWD) % self.span or bool((segment_E.view(-1, self.span) != segment_N[:, None]).any()):
                raise ValueError(f"units are quantized {self.span} at a time: move whole groups only")
            x_NTD = x_EWD.reshape(len(segment_N), self.span * unit, x_EWD.shape[2])
            codes = [
                self.codec.encode(x_NTD[part], tuple(r[segment_N[part]] for r in reference))
                for part in blocks_of(len(x_NTD), x_NTD.device)
            ]
            whole = (torch.cat(parts) for parts in zip(*(code.slot for code in codes), strict=True))
            fresh.slot = tuple(part.reshape(len(x_EWD), unit, *part.shape[2:]) for part in whole)
            fresh.shared = tuple(torch.cat(parts) for parts in zip(*(code.group for code in codes), strict=True))
            return fresh
        size, unit = self.codec.group, x_EWD.shape[1]
        _, inverse, per_segment = torch.unique_consecutive(segment_E, return_inverse=True, return_counts=True)
        begin = per_segment.cumsum(0) - per_segment
        rank = torch.arange(len(segment_E), device=segment_E.device) - begin[inverse]
        members = torch.minimum(per_segment[inverse] - rank // size * size, torch.full_like(rank, size))
        fresh.group_of = torch.empty_like(segment_E, dtype=torch.int32)
        slot: list[Tensor] = []
        shared: list[tuple[Tensor, ...]] = []
        num_groups = 0
        for count in torch.unique(members).tolist():
            at = torch.nonzero(members == count)[:, 0]
            code = self.codec.encode(
                x_EWD[at].reshape(-1, count * unit, x_EWD.shape[2]), tuple(r[segment_E[at[::count]]] for r in reference)
            )
            if not slot:
                slot = [part.new_empty((len(segment_E), unit, *part.shape[2:])) for part in code.slot]
            for place, part in zip(slot, code.slot, strict=True):
                place[at] = part.reshape(len(at), unit, *part.shape[2:])
            shared.append(code.group)
            groups = len(at) // count
            ids = torch.arange(num_groups, num_groups + groups, device=at.device, dtype=torch.int32)
            fresh.group_of[at] = ids.repeat_interleave(count)
            num_groups += groups
        fresh.slot = tuple(slot)
        fresh.shared = tuple(torch.cat(parts) for parts in zip(*shared, strict=True))
        return fresh

    def _encode_segments(self, fresh: Lane, x_EWD: Tensor, segment_E: Tensor, reference: tuple[Tensor, ...]) -> Lane:
        """All units of every segment (of every row, if they are joined) as one group."""
        unit = x_EWD.shape[1]
        owners = self.num_rows * self.num_heads // self.width
        held = torch.bincount(segment_E, minlength=owners * self.width).view(owners, self.width)
        if bool((held != held[:, :1]).any()):
            raise ValueError("units are stored across KV heads: every head must have as many in this tier")
        fresh.joined_counts = held[:, 0].tolist()
        codes = [
            (owner, self.codec.encode(_side_by_side(part, self.width), tuple(r[owner : owner + 1] for r in reference)))
            for owner, part in enumerate(x_EWD.split(held.sum(1).tolist()))
            if len(part)
        ]
        parts = zip(*(code.slot for _, code in codes), strict=True)
        fresh.slot = tuple(torch.cat([p[0] for p in part]).unflatten(0, (-1, unit)) for part in parts)
        fresh.shared = tuple(p.new_zeros((owners, *p.shape[1:])) for p in codes[0][1].group)
        for owner, code in codes:
            for rows, param in zip(fresh.shared, code.group, strict=True):
                rows[owner] = param[0]
        return fresh

    def merge(self, fresh: Lane | None, keep: Tensor, keep_at: Tensor, fresh_at: Tensor) -> None:
        """Keep old entries `keep` at new places `keep_at`, put fresh ones at `fresh_at`;

        free groups without members.
        """
        total = len(keep_at) + len(fresh_at)
        if total == 0:
            self.slot, self.shared, self.group_of = (), (), None
            return
        if self.by_segment:
            if fresh is None or len(keep_at):
                raise ValueError("units that share parameters with all others are encoded together: set recompresses")
            self.slot, self.shared, self.joined_counts = fresh.slot, fresh.shared, fresh.joined_counts
            return
        self.slot = _merge(self.slot, fresh.slot if fresh else (), keep, keep_at, fresh_at)
        if not self.grouped:
            keep, keep_at, fresh_at = (self._group_index(entries) for entries in (keep, keep_at, fresh_at))
            self.shared = _merge(self.shared, fresh.shared if fresh else (), keep, keep_at, fresh_at)
            return
        device = keep_at.device
        group_of = torch.empty(total, dtype=torch.int32, device=device)
        parts: list[tuple[Tensor, ...]] = []
        num_groups = 0
        for lane, entries, at in ((self, keep, keep_at), (fresh, None, fresh_at)):
            if lane is None or lane.group_of is None or not len(at):
                continue
            used, ids = torch.unique(lane.group_of if entries is None else lane.group_of[entries], return_inverse=True)
            group_of[at] = ids.to(torch.int32) + num_groups
            parts.append(tuple(param[used.long()] for param in lane.shared))
            num_groups += len(used)
        self.group_of = group_of
        self.shared = tuple(torch.cat(params) for params in zip(*parts, strict=True))

    def _group_index(self, entries_E: Tensor) -> Tensor:
        """Groups of entries that make up whole groups."""
        if self.span == 1:
            return entries_E
        whole = entries_E.view(-1, self.span) if len(entries_E) % self.span == 0 else entries_E[:0, None]
        first = whole[:, 0]
        steps = torch.arange(self.span, device=first.device)
        if len(whole) * self.span != len(entries_E) or bool(
            (whole != first[:, None] + steps).any() | (first % self.span).any()
        ):
            raise ValueError(f"units are quantized {self.span} at a time: move and evict whole groups only")
        return first // self.span

    def decode(self, entries_E: Tensor, segment_E: Tensor, reference: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Values [E, W, D] of the given entries; `segment_E` is theirs."""
        if self.codec.joined:
            return self._decode_joined(entries_E, segment_E, dtype)
        group = segment_E if self.by_segment else entries_E // self.span
        if self.group_of is not None:
            group = self.group_of[entries_E]
        slot = tuple(part.index_select(0, entries_E) for part in self.slot)
        shared = tuple(part.index_select(0, group) for part in self.shared)
        return self.codec.decode(slot, shared, tuple(r[segment_E] for r in reference), dtype)

    def _decode_joined(self, entries_E: Tensor, segment_E: Tensor, dtype: torch.dtype) -> Tensor:
        row, head, heads = segment_E // self.num_heads, segment_E % self.num_heads, self.num_heads
        count = torch.tensor(self.joined_counts, device=entries_E.device)
        before = count.cumsum(0) - count
        at, where = torch.unique(entries_E - (heads - 1) * before[row] - head * count[row], return_inverse=True)
        owner = torch.repeat_interleave(torch.arange(len(count), device=at.device), count)[at]
        slot = tuple(part.index_select(0, at) for part in self.slot)
        wide = self.codec.decode(slot, tuple(part.index_select(0, owner) for part in self.shared), (), dtype)
        by_head: Tensor = wide.unflatten(2, (heads, -1))
        return by_head[where, :, head]


class Side:
    """Keys, or values, of all low-bit tiers of a layer. Tiers whose codecs are equal share a lane: a unit that moves
    between them keeps its codes on that side.
    """

    def __init__(self, codecs: Sequence[Codec], num_rows: int, num_heads: int, device: torch.device) -> None:
        self.lanes: list[Lane] = []
        self.lane_of: list[int] = []  # per low-bit tier
        for codec in codecs:
            known = [i for i, lane in enumerate(self.lanes) if lane.codec == codec]
            if not known:
                self.lanes.append(Lane(codec, num_rows, num_heads))
            self.lane_of.append(known[0] if known else len(self.lanes) - 1)
        self.reference: list[tuple[Tensor, ...]] = []  # per lane, each [B * H, ...]
        self._lanes_by_tier = torch.tensor([-1, -1, *self.lane_of], device=device)  # NOT_CODED, FULL, low-bit tiers

    @property
    def holds_codes(self) -> bool:
        """Whether anything was ever coded here."""
        return any(lane.slot for lane in self.lanes)

    def lane_map(self, coded: Tensor) -> Tensor:
        """Lane that holds each unit's codes, -1 for none; `coded` as in UnitTable."""
        return self._lanes_by_tier[coded + 1]


def _side_by_side(x_EWD: Tensor, width: int) -> Tensor:
    """Units of `width` heads, head by head, as one group [1, T, width * D] of their i-th units side by side."""
    by_head: Tensor = x_EWD.unflatten(0, (width, -1))
    return by_head.permute(1, 2, 0, 3).reshape(1, -1, width * x_EWD.shape[2])


def _merge(
    old: tuple[Tensor, ...], fresh: tuple[Tensor, ...], keep: Tensor, keep_at: Tensor, fresh_at: Tensor
) -> tuple[Tensor, ...]:
    if not len(fresh_at) and old and len(keep) == len(old[0]):
        return old
    total = len(keep_at) + len(fresh_at)
    source = torch.zeros(total, dtype=torch.int64, device=keep_at.device)
    source[keep_at] = keep
    merged = []
    for i in range(max(len(old), len(fresh))):
        like = fresh[i] if fresh else old[i]
        out = old[i].index_select(0, source) if len(keep_at) else like.new_empty((total, *like.shape[1:]))
        merged.append(out.index_copy_(0, fresh_at, fresh[i]) if len(fresh_at) else out)
    return tuple(merged)


def blocks_of(num_units: int, device: torch.device) -> list[slice]:
    """Slices to code units in: on a CPU a few hundred at once, so that temporaries stay in its caches."""
    size = CPU_BLOCK if device.type == "cpu" else max(1, num_units)
    return [slice(begin, begin + size) for begin in range(0, num_units, size)]
