"""CriticalKV: half of the budget by votes, half by votes times what a value does to the output (arXiv 2502.03805).

Rule (Feng et al.): stage 1 keeps a head's best floor(first_stage_ratio * n) tokens by SnapKV's score s, n the head's
budget and the window counted first; stage 2 fills it by (s + eps) * || V_j W_O ||_1, the L1 norm taken per query head
and averaged over a group. s is the mean attention of the `window` last queries, average-pooled: eps is a prior of its
size, so it is a mean and no sum. `over=snapkv`: equal head budgets; `over=adakv`: budgets by AdaKV's floor rule on s,
every head's floor(alpha n) best safe. Deviations: the window is kept whatever its norms; norms are a ledger column (4
bytes per slot), computed once per token; decoded queries add to s, which is then more than a mean (eps weighs less).
There is no code beside kvpress' and its fork's: window 32 there (default), 64 in kvpress. Once after the prompt with
`enforce=prefill` or `native` (1024 tokens as in AdaKV), else re-selected as in SnapKV.
https://github.com/NVIDIA/kvpress/pull/46
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qevict_bench.budget import Geometry
from qevict_bench.observing import VotingPolicy
from qevict_bench.policy import Allowance, LayerView, Placement
from qevict_bench.scoring import fill_norms
from qevict_bench.selection import best_across, keep, rank, rank_preferred, safe_counts, share_of, units_beside


@dataclass(frozen=True)
class CriticalKV(VotingPolicy):
    """`window`, `kernel`, `native_tokens` (mean per head) in tokens; `alpha` with over=adakv only."""

    kernel: int = 5
    pooling: str = "avg"
    over: str = "snapkv"
    alpha: float = 0.2
    first_stage_ratio: float = 0.5
    eps: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"over": ("snapkv", "adakv")}, {})
        if not 0 <= self.alpha <= 1 or not 0 <= self.first_stage_ratio <= 1 or not 0 <= self.eps < 1e3:
            wrong = f"method.alpha={self.alpha}, first_stage_ratio={self.first_stage_ratio}, eps={self.eps}"
            raise ValueError(f"{wrong}: the first two must lie in [0, 1], eps in [0, 1000)")

    @property
    def columns(self) -> tuple[str, ...]:
        return (*super().columns, "norm")

    def nothing_to_decide(self, geometry: Geometry) -> str:
        alone = self.over == "adakv" and geometry.num_kv_heads == 1
        return "1 KV head: over=adakv equals over=snapkv" if alone else ""

    def choose(
        self, views: Sequence[LayerView], allowance: Allowance, newest: Sequence[Tensor], found: Sequence[Tensor]
    ) -> list[Placement]:
        [view], [new], [votes] = views, newest, found
        score, norm = votes / self.window, view.columns["norm"]
        seen = view.alive_BHU & (view.pos_BHU < view.seq_len_B[:, None, None])
        fill_norms(norm, seen, view.values, view.w_o(), head_share=False)
        candidate = view.alive_BHU & ~new
        ranks = rank(score, candidate)
        total_B, heads = units_beside(views, allowance, newest, self.native_in_force), norm.shape[1]
        window_B = view.seq_len_B.clamp(max=self.recent)
        budget_BH, safe_BH = (total_B // heads)[:, None].expand(-1, heads), torch.zeros_like(ranks[..., 0])
        if self.over == "adakv":
            safe_BH = safe_counts(total_B, heads, self.alpha, window_B)
            [kept] = best_across([score], [candidate], [ranks < safe_BH[..., None]], total_B)
            budget_BH = kept.sum(-1)
        first_BH = share_of(budget_BH + window_B[:, None], self.first_stage_ratio) - window_B[:, None]
        first = ranks < first_BH.maximum(safe_BH)[..., None]
        kept = rank_preferred((score + self.eps) * norm, candidate, first) < budget_BH[..., None]
        return [keep(view, allowance, new | kept, self.native_in_force)]
