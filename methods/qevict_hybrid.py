"""QEvict with parts of other methods: AdaKV's head budgets, DefensiveKV's worst case as the score.

Rule: as QEvict (methods/qevict.py), but
- `head_budgets=adaptive` (AdaKV, Feng et al., arXiv 2407.11550): K_f and K_q count windows of the layer, not of a head;
  the layer's best windows over all KV heads get them. The best floor(`alpha` n) windows of a head come first, n its
  full-precision windows in an equal division. Needs `head_scope=kv_head`.
- `score=worst` (DefensiveKV, Feng et al., ICLR 2026): the largest attention mass that any scored query of any query
  head put on a window, in place of the sum. DefensiveKV's floor, pooling and value norms are left out (values may be
  codes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from methods.qevict import QEvict
from qevict_bench.budget import Geometry
from qevict_bench.policy import FULL, Allowance, LayerView, Placement
from qevict_bench.selection import Split, rank


@dataclass(frozen=True)
class QEvictHybrid(QEvict):
    """`alpha`: share of its full-precision windows in an equal division that every head is sure of, in [0, 1]."""

    head_budgets: str = "equal"
    alpha: float = 0.2
    score: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"head_budgets": ("equal", "adaptive"), "score": ("sum", "worst")}, {})
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"method.alpha={self.alpha} must lie in [0, 1]")
        if self.head_budgets == "adaptive" and self.head_shared:
            raise ValueError("method.head_budgets=adaptive divides among heads: set method.head_scope=kv_head")

    def nothing_to_decide(self, geometry: Geometry) -> str:
        alone = self.head_budgets == "adaptive" and geometry.num_kv_heads == 1
        return "1 KV head: its budget is the layer's" if alone else ""

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        if self.score == "sum":
            super().observe(view, mass_BHGPU, rows_BP)
            return
        peak = mass_BHGPU.amax(dim=(2, 3))
        score = view.columns["score"]
        score.copy_(score.maximum(peak.amax(dim=1, keepdim=True) if self.head_shared else peak))

    def divide(self, split: Split, allowance: Allowance) -> Tensor:
        if self.head_budgets == "equal":
            return super().divide(split, allowance)
        shape, equal = split.score_BHU.shape, super().divide(split, allowance)
        num_BH = ((equal == FULL) & split.candidate_BHU).sum(-1) * self.alpha
        sure_BHU = rank(split.score_BHU, split.eligible_BHU) < num_BH.floor()[..., None]
        first_BHU = split.score_BHU + sure_BHU * (1 + split.score_BHU.amax())
        parts = (first_BHU, split.candidate_BHU, split.eligible_BHU, split.protected_BHU)
        first, candidate, eligible, protected = (x.flatten(1)[:, None] for x in parts)
        joined = Split(first, candidate, eligible, protected, split.q, split.fill)
        return super().divide(joined, _Joined(allowance, shape)).view(shape)


class _Joined:
    """An allowance for tier maps [B, 1, H * U] that stand for [B, H, U]."""

    def __init__(self, allowance: Allowance, shape: torch.Size) -> None:
        self.bytes_B, self.fixed_B, self.fits_B = allowance.bytes_B, allowance.fixed_B, allowance.fits_B
        self.unit_bytes, self._allowance, self._shape = allowance.unit_bytes, allowance, shape

    def bytes_of(self, placements: Sequence[Placement]) -> Tensor:
        return self._allowance.bytes_of([Placement(each.tier_BHU.view(self._shape)) for each in placements])
