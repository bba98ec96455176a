"""What a layer's cache costs: exact bytes of a placement before it is carried out, and of the tensors that hold it
after.

Shapes: B rows, H KV heads, U units; unit-level tensors have one head if the table is shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qevict_bench.budget import Usage
from qevict_bench.policy import EVICTED, FULL, Placement
from qevict_bench.slots import Lane
from qevict_bench.store import LayerStore
from qevict_bench.units import Rect


def _slot_bytes(layer: LayerStore, tier: int) -> int:
    dim, itemsize = layer.geometry.head_dim, layer.geometry.itemsize
    return sum(c.slot_bytes(dim, itemsize) for c in (layer.policy.tiers[tier].key, layer.policy.tiers[tier].value))


def unit_bytes(layer: LayerStore) -> tuple[float, ...]:
    """Bytes of one complete unit newly placed in one table entry, per tier, metadata included."""
    dim, itemsize, sizes = layer.geometry.head_dim, layer.geometry.itemsize, []
    for tier, spec in enumerate(layer.policy.tiers):
        params = sum(c.group_bytes(dim, itemsize) / c.group + 4 * (c.group > 1) for c in (spec.key, spec.value))
        sizes.append(
            layer.shared_heads * (layer.policy.unit * _slot_bytes(layer, tier) + params) + layer.table.unit_bytes
        )
    return tuple(sizes)


def fixed_bytes(layer: LayerStore, room: int) -> int:
    """Bytes of a row that no placement avoids: room until the next event, and references."""
    dim, itemsize = layer.geometry.head_dim, layer.geometry.itemsize
    references = sum(c.reference_bytes(dim, itemsize) for tier in layer.policy.tiers for c in (tier.key, tier.value))
    return layer.num_heads * (room * layer.geometry.slot_bytes + references)


def bytes_of(layer: LayerStore, tier_BHU: Tensor) -> Tensor:
    """Exact bytes [B] of a placement beside `fixed_bytes`, ledger and partial groups included."""
    rect = layer.table.rect()
    live, heads = rect.pos >= 0, layer.shared_heads
    kept = live & (tier_BHU != EVICTED)
    full_slots = (layer.unit_lens(rect) * (kept & (tier_BHU == FULL))).sum((1, 2))
    total = full_slots * heads * layer.geometry.slot_bytes + kept.sum((1, 2)) * layer.table.unit_bytes
    dim, itemsize = layer.geometry.head_dim, layer.geometry.itemsize
    for low, lanes in enumerate(layer.lanes):
        old = kept & (rect.coded == low + 1) & ((tier_BHU == FULL) | (tier_BHU == low + 1))
        fresh = kept & (rect.coded != low + 1) & (tier_BHU == low + 1)
        entries = (old | fresh).sum((1, 2))
        total = total + entries * heads * layer.policy.unit * _slot_bytes(layer, low + 1)
        for lane in lanes:
            groups = entries * heads
            if lane.grouped:
                groups = _old_groups(layer, lane, low, rect, old) + heads * (
                    (fresh.sum(-1) + lane.codec.group - 1) // lane.codec.group
                ).sum(-1)
                total = total + entries * heads * 4
            total = total + groups * lane.codec.group_bytes(dim, itemsize)
    return total


def _old_groups(layer: LayerStore, lane: Lane, low: int, rect: Rect, kept_BHU: Tensor) -> Tensor:
    """Existing parameter groups that still have a member among `kept`, per row."""
    count = torch.zeros(layer.num_rows, dtype=torch.int64, device=layer.device)
    if lane.group_of is None:
        return count
    held = layer.per_head(kept_BHU)[layer.per_head(rect.coded == low + 1)]  # per entry
    row = torch.nonzero(layer.per_head(rect.coded == low + 1))[:, 0]
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
    host = 0
    rect = layer.table.rect()
    for low, lanes in enumerate(layer.lanes):
        name = f"payload.{layer.policy.tiers[low + 1].name}"
        counted[name] = 0
        coded = rect.coded[row] == low + 1
        entries = int(coded.sum()) * layer.shared_heads
        idle = int((coded & (rect.tier[row] == FULL)).sum()) * layer.shared_heads
        if not entries:
            continue
        before = int((rect.coded[:row] == low + 1).sum()) * layer.shared_heads
        for lane in lanes:
            codes, *per_slot = (x[0].numel() * x.element_size() for x in lane.slot)
            counted[name] += codes * (entries - idle)
            counted["ledger"] += codes * idle
            counted["params"] += sum(per_slot) * entries
            groups = entries
            if lane.group_of is not None:
                groups = len(torch.unique(lane.group_of[before : before + entries]))
                counted["params"] += 4 * entries
            counted["params"] += groups * sum(x[0].numel() * x.element_size() for x in lane.shared)
        host += entries * sum(x[0].numel() * x.element_size() for x in layer.host)
    for tensors in (t for pair in layer.reference for t in pair):
        counted["reference"] += sum(x[first:last].numel() * x.element_size() for x in tensors)
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
