"""What a layer's cache costs: exact bytes of a placement before it is carried out, and of the tensors that hold it
after.

Shapes: B rows, H KV heads, U units; unit-level tensors have one head if the table is shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qevict_bench.budget import Usage
from qevict_bench.codecs import Codec
from qevict_bench.policy import EVICTED, FULL, Placement
from qevict_bench.slots import Side
from qevict_bench.store import LayerStore
from qevict_bench.units import Rect, next_coded

POINTER = 4  # bytes of an entry's pointer to its parameter group, where groups may have gaps


def _slot_bytes(layer: LayerStore, codec: Codec) -> int:
    """Bytes of a slot as it is stored: of one head, or of all heads side by side."""
    width = layer.num_heads if codec.joined else 1
    return codec.slot_bytes(width * layer.geometry.head_dim, layer.geometry.itemsize)


def _group_bytes(layer: LayerStore, codec: Codec) -> int:
    return codec.group_bytes(layer.geometry.head_dim, layer.geometry.itemsize)


def unit_bytes(layer: LayerStore) -> tuple[float, ...]:
    """Bytes of one complete unit newly placed in one table entry, per tier, metadata included.

    Parameters that all units of a segment share (group=0) are in no unit's bytes.
    """
    sizes = []
    for tier in layer.tiers:
        slots = sum(
            layer.policy.unit * _slot_bytes(layer, codec) / (layer.num_heads if codec.joined else 1)
            for codec in (tier.key, tier.value)
        )
        params = sum(
            _group_bytes(layer, codec) / codec.group + POINTER * (codec.group > 1 and not codec.whole)
            for codec in (tier.key, tier.value)
            if codec.group
        )
        sizes.append(layer.shared_heads * (slots + params) + layer.table.unit_bytes)
    return tuple(sizes)


def fixed_bytes(layer: LayerStore, room: int) -> int:
    """Bytes of a row that no placement avoids: room until the next event, and references."""
    dim, itemsize = layer.geometry.head_dim, layer.geometry.itemsize
    references = sum(lane.codec.reference_bytes(dim, itemsize) for side in layer.sides for lane in side.lanes)
    return layer.num_heads * (room * layer.geometry.slot_bytes + references)


def bytes_of(layer: LayerStore, tier_BHU: Tensor) -> Tensor:
    """Exact bytes [B] of a placement beside `fixed_bytes`, ledger and partial groups included."""
    rect = layer.table.rect()
    live, heads = rect.pos >= 0, layer.shared_heads
    kept = live & (tier_BHU != EVICTED)
    full_slots = (layer.unit_lens(rect) * (kept & (tier_BHU == FULL))).sum((1, 2))
    total = full_slots * heads * layer.geometry.slot_bytes + kept.sum((1, 2)) * layer.table.unit_bytes
    coded = next_coded(rect, torch.where(live, tier_BHU, EVICTED))
    for side in layer.sides:
        for number, lane in enumerate(side.lanes):
            have = side.lane_map(coded) == number
            old = have & (side.lane_map(rect.coded) == number)
            if layer.policy.recompresses:
                old = old & (tier_BHU == FULL)
            entries = have.sum((1, 2)) * heads
            total = total + entries // lane.width * layer.policy.unit * _slot_bytes(layer, lane.codec)
            groups = layer.num_heads * (entries > 0) if lane.by_segment else entries // lane.span
            if lane.grouped:
                fresh = (have & ~old).sum(-1)
                groups = _old_groups(layer, side, number, rect, old)
                groups = groups + heads * ((fresh + lane.codec.group - 1) // lane.codec.group).sum(-1)
                total = total + entries * POINTER
            total = total + groups * _group_bytes(layer, lane.codec)
    return total


def _old_groups(layer: LayerStore, side: Side, number: int, rect: Rect, kept_BHU: Tensor) -> Tensor:
    """Existing parameter groups of a lane that still have a member among `kept`, per row."""
    lane, count = side.lanes[number], torch.zeros(layer.num_rows, dtype=torch.int64, device=layer.device)
    if lane.group_of is None:
        return count
    had = layer.per_head(side.lane_map(rect.coded) == number)
    held, row = layer.per_head(kept_BHU)[had], torch.nonzero(had)[:, 0]  # per entry
    owner = torch.full((len(lane.shared[0]),), -1, dtype=torch.int64, device=layer.device)
    owner[lane.group_of[held].long()] = row[held]
    return count.index_add_(0, owner[owner >= 0], torch.ones_like(owner[owner >= 0]))


def usage(layer: LayerStore, row: int) -> Usage:
    """Bytes of one row, measured on the tensors that hold it."""
    first, last = row * layer.num_heads, (row + 1) * layer.num_heads
    held, room = sum(layer.full.count[first:last]), sum(layer.full.cap[first:last])
    slot = layer.geometry.slot_bytes
    counted = {"payload.full": held * slot, "slack": (room - held) * slot}
    counted["table"] = layer.table.units_of(row) * layer.table.unit_bytes
    counted["ledger"] = counted["params"] = counted["reference"] = 0
    rect = layer.table.rect()
    for low, tier in enumerate(layer.tiers[1:]):
        coded = rect.coded[row] == low + 1
        entries = int(coded.sum()) * layer.shared_heads
        idle = int((coded & (rect.tier[row] == FULL)).sum()) * layer.shared_heads
        lanes = [side.lanes[side.lane_of[low]] for side in layer.sides] if entries else []
        counted[f"payload.{tier.name}"] = 0
        for lane in lanes:
            codes, *params = (x[0].numel() * x.element_size() for x in lane.slot)
            counted[f"payload.{tier.name}"] += codes * ((entries - idle) // lane.width)
            counted["ledger"] += codes * (idle // lane.width)
            counted["params"] += sum(params) * (entries // lane.width)
    for side in layer.sides:
        for number, lane in enumerate(side.lanes):
            held_by = side.lane_map(rect.coded) == number
            entries = int(held_by[row].sum()) * layer.shared_heads
            if not entries:
                continue
            groups = layer.num_heads // lane.width if lane.by_segment else entries // lane.span
            if lane.group_of is not None:
                before = int(held_by[:row].sum()) * layer.shared_heads
                groups = len(torch.unique(lane.group_of[before : before + entries]))
                counted["params"] += POINTER * entries
            counted["params"] += groups * sum(x[0].numel() * x.element_size() for x in lane.shared)
        for tensors in side.reference:
            counted["reference"] += sum(x[first:last].numel() * x.element_size() for x in tensors)
    coded_units = int((rect.coded[row] > FULL).sum()) * layer.shared_heads
    host = coded_units * sum(x.shape[1:].numel() * x.element_size() for x in layer.host)
    return Usage(counted, host=host, workspace=workspace(layer, row))


def workspace(layer: LayerStore, row: int) -> int:
    """Bytes of derived copies kept for a row: decoded low-bit tiers, slot-to-unit maps, rectangles of the table."""
    derived = (layer.index_bytes + layer.table.workspace) // layer.num_rows
    if layer.working is None:
        return derived
    slots = sum(layer.working.cap[row * layer.num_heads : (row + 1) * layer.num_heads])
    return derived + slots * layer.geometry.slot_bytes


class PlacementCost:
    """`policy.Allowance` of one event over the given layers; `bytes_B` None leaves them unbounded."""

    def __init__(
        self, layers: Sequence[LayerStore], room: list[int], bytes_B: list[int] | None, everything: bool
    ) -> None:
        self._layers = layers
        device = layers[0].device
        self.fixed_B = torch.tensor([sum(fixed_bytes(layer, n) for layer in layers) for n in room], device=device)
        unbounded = torch.full_like(self.fixed_B, 1 << 60)
        self.bytes_B = unbounded if bytes_B is None else torch.tensor(bytes_B, device=device)
        self.unit_bytes = unit_bytes(layers[0])
        self.fits_B = torch.ones_like(self.fixed_B, dtype=torch.bool)
        if not everything and bytes_B is not None:
            current = [Placement(layer.view().tier_BHU) for layer in layers]
            self.fits_B = self.bytes_of(current) <= self.bytes_B

    def bytes_of(self, placements: Sequence[Placement]) -> Tensor:
        """Exact bytes [B] the layers would hold: payload, parameters, partial groups, ledger, table, slack."""
        total = self.fixed_B
        for layer, placement in zip(self._layers, placements, strict=True):
            total = total + bytes_of(layer, placement.tier_BHU)
        return total
