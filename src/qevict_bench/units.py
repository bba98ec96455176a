"""The unit table of one layer: position, tier and ledger columns of every live unit, stored flat.

Shapes: B rows, T table heads (1 if shared by all KV heads, else H), U units of the longest segment, N live units of all
segments together, C ledger columns. Segments are (row, table head) in order; units are in position order within one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EVICTED, FULL, NOT_CODED = -1, 0, -1


class Rect(NamedTuple):
    """The table as rectangles [B, T, U]; dead entries have pos -1 and tier EVICTED. columns [C, B, T, U]."""

    pos: Tensor
    end: Tensor
    tier: Tensor
    coded: Tensor
    columns: Tensor


def next_coded(rect: Rect, tier_BHU: Tensor) -> Tensor:
    """Low-bit tier that holds each unit's codes once the units are in `tier_BHU`: a promoted unit keeps them."""
    return torch.where(tier_BHU > FULL, tier_BHU, torch.where(tier_BHU == EVICTED, NOT_CODED, rect.coded))


class UnitTable:
    """Live units only.

    `rect()` is a view while all segments are equally long, else a padded copy written back later.
    """

    def __init__(
        self, num_rows: int, num_heads: int, num_columns: int, unit: int, offset: int, device: torch.device
    ) -> None:
        self.num_rows, self.num_heads, self.unit, self.offset = num_rows, num_heads, unit, offset
        self.count = [0] * (num_rows * num_heads)
        self.covered = [0] * num_rows  # positions the table has ever had units for
        self.pos = torch.zeros(0, dtype=torch.int32, device=device)
        self.tier = torch.zeros(0, dtype=torch.int8, device=device)
        self.coded = torch.zeros(0, dtype=torch.int8, device=device)  # low-bit tier that holds a unit's codes
        self.columns = torch.zeros((num_columns, 0), device=device)
        self._rect: Rect | None = None

    @property
    def unit_bytes(self) -> int:
        return 4 + 1 + 1 + 4 * len(self.columns)

    def units_of(self, row: int) -> int:
        return sum(self.count[row * self.num_heads : (row + 1) * self.num_heads])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.pos, self.tier, self.coded, self.columns

    @property
    def workspace(self) -> int:
        """Bytes of the rectangles that are out, as far as they are copies."""
        if self._rect is None:
            return 0
        *maps, columns = self._rect
        return sum(x.nbytes for x in maps) + (0 if self._uniform else columns.nbytes)

    @property
    def _uniform(self) -> bool:
        return len(set(self.count)) <= 1

    def rect(self) -> Rect:
        if self._rect is None:
            shape = (self.num_rows, self.num_heads, max(self.count, default=0))
            if self._uniform:
                pos, tier, coded = (x.view(shape).long() for x in (self.pos, self.tier, self.coded))
                columns = self.columns.view(len(self.columns), *shape)
            else:
                live = self._live(shape)
                pos, tier, coded = (
                    torch.full(shape, fill, dtype=torch.int64, device=x.device).masked_scatter_(live, x.long())
                    for x, fill in ((self.pos, -1), (self.tier, EVICTED), (self.coded, NOT_CODED))
                )
                columns = self.columns.new_zeros((len(self.columns), *shape))
                columns[:, live] = self.columns
            end = torch.where(pos >= 0, pos + self.unit, 0)
            if self.offset:
                end = torch.where(pos == 0, self.offset, end)
            self._rect = Rect(pos, end, tier, coded, columns)
        return self._rect

    def _live(self, shape: tuple[int, int, int]) -> Tensor:
        count = torch.tensor(self.count, device=self.pos.device).view(shape[:2])
        return torch.arange(shape[2], device=self.pos.device) < count[..., None]

    def close(self) -> None:
        """Write columns back from a padded copy and forget the rectangles."""
        if self._rect is not None and not self._uniform:
            self.columns = self._rect.columns[:, self._rect.pos >= 0]
        self._rect = None

    def cover(self, upto: list[int]) -> bool:
        """Add full-precision units so that every row's positions below `upto` have one; True if any was added."""
        fresh = []
        for row, stop in enumerate(upto):
            begin = self.covered[row]
            starts = [0] if self.offset and begin == 0 < stop else []
            after = max(begin, self.offset)
            starts += range(after, max(stop, after), self.unit)
            if starts:
                self.covered[row] = self.offset if self.offset and starts[-1] == 0 else starts[-1] + self.unit
            fresh.append(torch.tensor(starts, dtype=torch.int32, device=self.pos.device))
        if not any(len(starts) for starts in fresh):
            return False
        self.close()
        sizes = self.count
        added = [len(fresh[s // self.num_heads]) for s in range(len(sizes))]
        pieces = [part for s, old in enumerate(self.pos.split(sizes)) for part in (old, fresh[s // self.num_heads])]
        self.pos = torch.cat(pieces)
        self.tier = _grown(self.tier, sizes, added, 0)
        self.coded = _grown(self.coded, sizes, added, NOT_CODED)
        self.columns = _grown(self.columns, sizes, added, 0)
        self.count = [c + a for c, a in zip(sizes, added, strict=True)]
        return True

    def update(self, tier: Tensor, coded: Tensor) -> None:
        """Set tier and coded of every unit [B, T, U] and drop the evicted ones."""
        rect = self.rect()
        live = rect.pos >= 0
        keep = live & (tier != EVICTED)
        self.columns = rect.columns[:, keep]
        self.pos, self.tier, self.coded = rect.pos[keep].int(), tier[keep].to(torch.int8), coded[keep].to(torch.int8)
        self.count = keep.sum(-1).flatten().tolist()
        self._rect = None


def _grown(x: Tensor, sizes: list[int], added: list[int], fill: int) -> Tensor:
    parts = []
    for old, extra in zip(x.split(sizes, dim=-1), added, strict=True):
        parts += [old, x.new_full((*x.shape[:-1], extra), fill)]
    return torch.cat(parts, dim=-1)
