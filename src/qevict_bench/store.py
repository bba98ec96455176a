"""LayerStore: one layer's keys and values, really packed. The only thing that moves slots.

A layer holds full-precision slots (the model's own post-RoPE keys) and, per low-bit tier, packed entries; the unit
table keeps position, tier and ledger columns of the live units. Reads come in position order within a tier, low-bit
tiers first, then full precision.

Shapes: B rows, H KV heads, U units, E packed entries of W slots, S slots, D head dim; unit-level tensors have one head
if `policy.head_shared`. Segment s = row * H + head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qevict_bench.budget import Geometry
from qevict_bench.policy import EVICTED, FULL, KVPolicy, LayerView, Placement
from qevict_bench.rope import Rope
from qevict_bench.slots import Lane, Side, Slots, blocks_of
from qevict_bench.units import NOT_CODED, Rect, UnitTable, next_coded


class Moves(NamedTuple):
    """Units moved by one `apply`, per row [B]."""

    promotions: Tensor
    demotions: Tensor
    evictions: Tensor


class Change(NamedTuple):
    """What one `apply` does to a lane: entries `keep` move to `keep_at`, `fresh` ones come in at `fresh_at`."""

    lane: Lane
    fresh: Lane | None
    keep: Tensor
    keep_at: Tensor
    fresh_at: Tensor
    exact: tuple[Tensor, ...]
    """Exact keys and values of the fresh units, in host memory, with promotion from there."""


class LayerStore:
    """Tokens enter by `append`, tiers change by `apply`; bytes are counted in accounting.py."""

    def __init__(
        self,
        policy: KVPolicy,
        geometry: Geometry,
        layer_idx: int,
        rope: Rope,
        like: Tensor,
        num_rows: int,
        rng: Callable[[int], torch.Generator],
        w_o: Callable[[], Tensor],
    ) -> None:
        self.policy, self.geometry, self.layer_idx, self.rope = policy, geometry, layer_idx, rope
        self.num_rows, self.num_heads = num_rows, geometry.num_kv_heads
        self.device, self.dtype = like.device, like.dtype
        self.shared_heads = self.num_heads if policy.head_shared else 1  # KV heads behind one table entry
        table_heads = self.num_heads // self.shared_heads
        self.table = UnitTable(num_rows, table_heads, len(policy.columns), policy.unit, policy.offset, like.device)
        none = [0] * (num_rows * self.num_heads)
        self.full = Slots(none, none, self.num_heads, like.new_empty((0, geometry.head_dim)))
        self.working: Slots | None = None
        self.tiers = policy.layer_tiers(layer_idx)
        self.keys = Side([tier.key for tier in self.tiers[1:]], num_rows, self.num_heads, like.device)
        self.values = Side([tier.value for tier in self.tiers[1:]], num_rows, self.num_heads, like.device)
        self.host: tuple[Tensor, ...] = ()  # exact keys and values of low-bit entries, in host memory
        self.seq_len, self.prompt_len, self.event_len = [0] * num_rows, [0] * num_rows, [0] * num_rows
        self.dense = True  # nothing was moved yet: slots and positions agree
        self.low_hidden = False  # low-bit tiers are held and routed, but nobody attends to them: a diagnostic
        self._index: dict[int, Tensor] = {}
        self.rng, self._w_o = rng, w_o
        if policy.rope == "compact" and len(self.tiers) > 1:
            raise ValueError(f"{policy.name}: rope=compact needs a method without low-bit tiers")
        if policy.restore == "host" and len(self.tiers) > 2:
            raise ValueError(f"{policy.name}: promotion=host needs exactly one low-bit tier")

    # ---- tokens in, tokens out ----

    def reserve(self, rows: list[int], new: list[int], room: int) -> None:
        """Make room, in slots and table, for `new[row]` tokens and `room` more in the given rows."""
        extra = [0] * self.num_rows
        for row in rows:
            extra[row] = new[row] + room
        per_segment = [n for n in extra for _ in range(self.num_heads)]
        for slots in filter(None, (self.full, self.working)):
            slots.ensure(per_segment)
        self.table.cover([seq + n if n else 0 for seq, n in zip(self.seq_len, extra, strict=True)])
        self._index.clear()

    def release(self) -> None:
        """Give back what was reserved and not used."""
        for slots in filter(None, (self.full, self.working)):
            slots.release()

    def append(self, rows: list[int], new: list[int], k_BHQD: Tensor, v_BHQD: Tensor) -> None:
        """Add `new[row]` tokens (post-RoPE keys) to the full tier of the given rows."""
        for slots in filter(None, (self.full, self.working)):
            slots.append(rows, new, k_BHQD, v_BHQD)
        for row in rows:
            self.seq_len[row] += new[row]

    def read(self, keep_working_copy: bool) -> Slots:
        """Everything attended to: the full tier alone, or a copy with the low-bit tiers decoded in front of it."""
        if self.working is not None:
            return self.working
        if self.low_hidden or not (self.keys.holds_codes and bool((self.table.tier > FULL).any())):
            return self.full
        working = self._decoded()
        if keep_working_copy:
            self.working = working
        return working

    def view(self) -> LayerView:
        """What the policy sees of all rows; `columns` are writable in place."""
        rect = self.table.rect()
        exact = (rect.tier == FULL) & ((rect.coded == NOT_CODED) | (self.policy.restore == "host"))
        prompt_len, seq_len, event_len = (
            torch.tensor(x, device=self.device) for x in (self.prompt_len, self.seq_len, self.event_len)
        )
        columns = dict(zip(self.policy.columns, rect.columns.unbind(0), strict=True))
        return LayerView(
            self.layer_idx,
            self.geometry.num_layers,
            prompt_len,
            seq_len,
            event_len,
            rect.pos,
            rect.end,
            rect.tier,
            exact,
            columns,
            self.rng,
            self._w_o,
            self._values,
        )

    def _values(self, row: int) -> Tensor:
        """Values [H, U, D] of a row's full-precision units of one token, zero elsewhere."""
        assert self.policy.unit == 1, "values are handed out for units of one token"
        rect = self.table.rect()
        held = self.per_head((rect.tier == FULL) & (self.unit_lens(rect) == 1))[row]
        first, last = row * self.num_heads, (row + 1) * self.num_heads
        stored = [self.full.v[self.full.start[s] : self.full.start[s] + self.full.count[s]] for s in range(first, last)]
        out = self.full.v.new_zeros((*held.shape, self.geometry.head_dim))
        out[held] = torch.cat(stored)
        return out

    # ---- layout helpers ----

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.keys, self.values

    def per_head(self, x_BHU: Tensor) -> Tensor:
        """Unit-level tensor expanded to all KV heads."""
        return x_BHU.expand(self.num_rows, self.num_heads, x_BHU.shape[-1])

    def unit_lens(self, rect: Rect) -> Tensor:
        """Tokens every unit holds now."""
        seq_len = torch.tensor(self.seq_len, device=self.device)[:, None, None]
        return (torch.minimum(rect.end, seq_len) - rect.pos.clamp(min=0)).clamp(min=0)

    def _first_slots(self, full_BHU: Tensor, lens_BHU: Tensor, slots: Slots) -> Tensor:
        """Flat index of each full unit's first slot [B, H, U]."""
        lens = self.per_head(lens_BHU * full_BHU)
        return slots.first[..., None] + lens.cumsum(-1) - lens

    def _runs(self, first_N: Tensor, len_N: Tensor) -> Tensor:
        """The ranges first .. first + len - 1, concatenated."""
        total = int(len_N.sum())
        begin = (first_N - (len_N.cumsum(0) - len_N)).repeat_interleave(len_N, output_size=total)
        return begin + torch.arange(total, device=self.device)

    def _unit_slots(self, first_E: Tensor) -> Tensor:
        return first_E[:, None] + torch.arange(self.policy.unit, device=self.device)

    def _entries(self, side: Side, lane: int, rect: Rect, mask_BHU: Tensor) -> tuple[Tensor, Tensor]:
        """Entries of a lane that hold the units marked by mask [B, H, U], and their segments."""
        held = self.per_head(side.lane_map(rect.coded) == lane)
        at = torch.nonzero(mask_BHU)
        return (held.flatten().cumsum(0) - 1)[mask_BHU.flatten()], at[:, 0] * self.num_heads + at[:, 1]

    def _decode(self, side: Side, low: int, rect: Rect, mask_BHU: Tensor) -> Tensor:
        """Post-RoPE keys, or values, [E, W, D] of units in low tier `low` (0 = first) marked by mask [B, H, U]."""
        number = side.lane_of[low]
        lane, reference = side.lanes[number], side.reference[number]
        entries, segment = self._entries(side, number, rect, mask_BHU)
        out = self.full.k.new_empty((len(entries), self.policy.unit, self.geometry.head_dim))
        rotated = lane.codec.pre_rope and side is self.keys
        positions = self._unit_slots(self.per_head(rect.pos)[mask_BHU]) if rotated else None
        for part in blocks_of(len(entries), self.device):
            if positions is None:
                out[part] = lane.decode(entries[part], segment[part], reference, self.dtype)
            else:
                exact = lane.decode(entries[part], segment[part], reference, torch.float32)
                out[part] = self.rope.rotate(exact, positions[part], self.layer_idx, max(self.table.covered))
        return out

    def _decoded(self) -> Slots:
        """Low-bit tiers decoded, then the full tier, in one buffer with the full tier's free room."""
        rect, unit, full = self.table.rect(), self.policy.unit, self.full
        low_count = (self.per_head(rect.tier > FULL).sum(-1) * unit).flatten().tolist()
        room = [cap - count for cap, count in zip(full.cap, full.count, strict=True)]
        out = Slots([n + count for n, count in zip(low_count, full.count, strict=True)], room, self.num_heads, full.k)
        begin = out.first.clone()
        for low in range(len(self.tiers) - 1):
            mask = self.per_head(rect.tier == low + 1)
            if bool(mask.any()):
                at = self._unit_slots((begin[..., None] + (mask.cumsum(-1) - 1) * unit)[mask]).flatten()
                out.k.index_copy_(0, at, self._decode(self.keys, low, rect, mask).flatten(0, 1))
                out.v.index_copy_(0, at, self._decode(self.values, low, rect, mask).flatten(0, 1))
                begin += mask.sum(-1) * unit
        for s, held in enumerate(full.count):
            source, target = full.start[s], out.start[s] + low_count[s]
            out.k[target : target + held] = full.k[source : source + held]
            out.v[target : target + held] = full.v[source : source + held]
        return out

    def unit_index(self, row: int) -> Tensor:
        """Unit of every slot of a row in reading order, free room included: [H or 1, S]."""
        if row not in self._index:
            rect = self.table.rect()
            lens = (rect.end[row].clamp(max=self.table.covered[row]) - rect.pos[row]).clamp(min=0)
            tier, units = rect.tier[row], torch.arange(rect.pos.shape[-1], device=self.device)
            lows, heads = range(1, 1 if self.low_hidden else len(self.tiers)), []
            for head in range(len(tier)):
                low = [units[tier[head] == t].repeat_interleave(self.policy.unit) for t in lows]
                full = (tier[head] == FULL) & (rect.pos[row, head] >= 0)
                heads.append(torch.cat((*low, units[full].repeat_interleave(lens[head][full]))))
            self._index[row] = torch.nn.utils.rnn.pad_sequence(heads, batch_first=True)
        return self._index[row]

    def tiers_of(self, row: int, positions_N: Tensor) -> Tensor:
        """Tier of each position, EVICTED if gone: [H or 1, N]."""
        rect = self.table.rect()
        pos, end, tier = rect.pos[row, ..., None], rect.end[row, ..., None], rect.tier[row, ..., None]
        inside = (pos >= 0) & (pos <= positions_N) & (positions_N < end)
        return torch.where(inside, tier, EVICTED).amax(dim=1)

    @property
    def index_bytes(self) -> int:
        """Bytes of the cached slot-to-unit maps (derived, workspace)."""
        return sum(x.nbytes for x in self._index.values())

    def stored_tensors(self) -> list[Tensor]:
        """Every tensor the budget counts, for walking their storages."""
        lanes = [x for side in self.sides for lane in side.lanes for x in lane.tensors()]
        references = [x for side in self.sides for tensors in side.reference for x in tensors]
        return [self.full.k, self.full.v, *self.table.tensors(), *lanes, *references]

    # ---- the one operation that moves slots ----

    def apply(self, placement: Placement, room: list[int]) -> Moves:
        """Carry out a placement and leave `room[row]` free slots: quantize, promote, evict.

        Raises ValueError if a unit is revived, or an incomplete one sent to a low-bit tier.
        """
        rect, new = self.table.rect(), placement.tier_BHU.long()
        live, old = rect.pos >= 0, rect.tier
        new = torch.where(live, new, EVICTED)
        moves = Moves(
            ((old > FULL) & (new == FULL)).sum((1, 2)),
            ((old == FULL) & (new > FULL)).sum((1, 2)),
            (live & (new == EVICTED)).sum((1, 2)),
        )
        per_segment = [n for n in room for _ in range(self.num_heads)]
        self._index.clear()
        if torch.equal(new, old):
            self.full.ensure(per_segment)
            if self.working is not None:
                self.working.ensure(per_segment)
            return moves
        lens = self.unit_lens(rect)
        whole = (rect.end - rect.pos == self.policy.unit) & (lens == self.policy.unit)
        if bool(((new > FULL) & ~whole).any()):
            raise ValueError(f"{self.policy.name} sent an incomplete unit to a low-bit tier; keep it full or evict it")
        self.working = None
        self.dense = False
        if len(self.tiers) > 1 and not self.keys.reference:
            self._build_reference()
        old_first = self._first_slots(old == FULL, lens, self.full)
        coded = next_coded(rect, new)
        changes = [
            self._change(side, number, rect, coded, new, old_first)
            for side in self.sides
            for number in range(len(side.lanes))
        ]
        full = self._rebuild_full(rect, new, lens, old_first, per_segment)
        for change in changes:
            change.lane.merge(change.fresh, change.keep, change.keep_at, change.fresh_at)
        if self.policy.restore == "host":
            self._merge_host(changes[0])
        self.full = full
        self.table.update(new, coded)
        return moves

    def _change(self, side: Side, number: int, rect: Rect, coded: Tensor, new: Tensor, old_first: Tensor) -> Change:
        """What becomes of one lane: entries whose codes stay (in use or in the ledger), and newly encoded units."""
        lane = side.lanes[number]
        had, have = (side.lane_map(x) == number for x in (rect.coded, coded))
        fresh = have & ~had | have & (new > FULL) if self.policy.recompresses else have & ~had
        kept, fresh, have, had = (self.per_head(x) for x in (had & have & ~fresh, fresh, have, had))
        place = have.flatten().cumsum(0) - 1
        keep = (had.flatten().cumsum(0) - 1)[kept.flatten()]
        made: Lane | None = None
        exact: tuple[Tensor, ...] = ()
        if bool(fresh.any()):
            x_EWD = self._source(side, rect, fresh, old_first)
            if self.policy.restore == "host":
                exact = (x_EWD.cpu().clone(), self._source(self.values, rect, fresh, old_first).cpu())
            at = torch.nonzero(fresh)
            if lane.codec.pre_rope and side is self.keys:
                positions = self._unit_slots(self.per_head(rect.pos)[fresh])
                for part in blocks_of(len(at), self.device):  # in place: it is a gathered copy
                    length = max(self.table.covered)
                    x_EWD[part] = self.rope.unrotate(x_EWD[part], positions[part], self.layer_idx, length)
            made = lane.encode(x_EWD, at[:, 0] * self.num_heads + at[:, 1], side.reference[number])
        return Change(lane, made, keep, place[kept.flatten()], place[fresh.flatten()], exact)

    def _source(self, side: Side, rect: Rect, mask_BHU: Tensor, old_first: Tensor) -> Tensor:
        """Post-RoPE keys, or values, [E, W, D] of the marked units, from whichever tier they are in."""
        flat = self.full.k if side is self.keys else self.full.v
        tier = self.per_head(rect.tier)[mask_BHU]
        if bool((tier == FULL).all()):
            return flat[self._unit_slots(old_first[mask_BHU])]
        out = flat.new_empty((len(tier), self.policy.unit, flat.shape[-1]))
        out[tier == FULL] = flat[self._unit_slots(old_first[mask_BHU & (self.per_head(rect.tier) == FULL)])]
        for low in range(len(self.tiers) - 1):
            if bool((tier == low + 1).any()):
                out[tier == low + 1] = self._decode(side, low, rect, mask_BHU & (self.per_head(rect.tier) == low + 1))
        return out

    def _rebuild_full(self, rect: Rect, new: Tensor, lens: Tensor, old_first: Tensor, room: list[int]) -> Slots:
        old = rect.tier
        count = self.per_head(lens * (new == FULL)).sum(-1).flatten().tolist()
        full = Slots(count, room, self.num_heads, self.full.k)
        first = self._first_slots(new == FULL, lens, full)
        stay = self.per_head((old == FULL) & (new == FULL))
        lens_N = self.per_head(lens)[stay]
        source, target = self._runs(old_first[stay], lens_N), self._runs(first[stay], lens_N)
        keys = self.full.k.index_select(0, source)
        if self.policy.rope == "compact":
            shift = (source - self.full.first[stay.nonzero()[:, 0], stay.nonzero()[:, 1]].repeat_interleave(lens_N)) - (
                target - full.first[stay.nonzero()[:, 0], stay.nonzero()[:, 1]].repeat_interleave(lens_N)
            )
            moved = shift > 0
            length = max(self.table.covered)
            keys[moved] = self.rope.shift(keys[moved], shift[moved], self.layer_idx, length).to(self.dtype)
        full.k.index_copy_(0, target, keys)
        full.v.index_copy_(0, target, self.full.v.index_select(0, source))
        for low in range(len(self.tiers) - 1):
            promoted = self.per_head((old == low + 1) & (new == FULL))
            if not bool(promoted.any()):
                continue
            at = self._unit_slots(first[promoted]).flatten()
            if self.policy.restore == "none":
                raise ValueError(f"{self.policy.name} promotes a unit although promotion=none")
            if self.host:
                entry = self._entries(self.keys, 0, rect, promoted)[0].cpu()
                k_EWD, v_EWD = (x[entry].to(self.device) for x in self.host)
            else:
                k_EWD, v_EWD = (self._decode(side, low, rect, promoted) for side in self.sides)
            full.k[at], full.v[at] = k_EWD.flatten(0, 1), v_EWD.flatten(0, 1)
        return full

    def _merge_host(self, change: Change) -> None:
        parts = change.exact or tuple(x[:0] for x in self.host)
        merged = []
        for i, part in enumerate(parts):
            out = part.new_empty((len(change.keep_at) + len(change.fresh_at), *part.shape[1:]))
            if len(change.keep_at):
                out[change.keep_at.cpu()] = self.host[i][change.keep.cpu()]
            out[change.fresh_at.cpu()] = part
            merged.append(out)
        self.host = tuple(merged)

    def _build_reference(self) -> None:
        """Per-prompt parameters of every codec that has some, from the un-rotated prompt, before anything moves."""
        dim, itemsize = self.geometry.head_dim, self.geometry.itemsize
        for side, flat in ((self.keys, self.full.k), (self.values, self.full.v)):
            for lane in side.lanes:
                rows: list[tuple[Tensor, ...]] = []
                if lane.codec.reference_bytes(dim, itemsize):
                    pre_rope = lane.codec.pre_rope and side is self.keys
                    rows = [lane.codec.reference(self._prompt(flat, row, pre_rope)) for row in range(self.num_rows)]
                side.reference.append(tuple(torch.cat(parts) for parts in zip(*rows, strict=True)))

    def _prompt(self, flat: Tensor, row: int, pre_rope: bool) -> Tensor:
        segments = range(row * self.num_heads, (row + 1) * self.num_heads)
        x_HSD = torch.stack([flat[self.full.start[s] : self.full.start[s] + self.prompt_len[row]] for s in segments])
        if not pre_rope:
            return x_HSD
        positions = torch.arange(self.prompt_len[row], device=self.device).expand(self.num_heads, -1)
        return self.rope.unrotate(x_HSD, positions, self.layer_idx, max(self.table.covered)).to(self.dtype)
