"""CriticalKV: half of the budget by votes, half by votes times what a value does to the output (arXiv 2502.03805).

Rule (Feng et al.): stage 1 keeps a head's best floor(first_stage_ratio * n) tokens by SnapKV's score s, n the head's
budget and the window counted first; stage 2 fills it by (s + eps) * || V_j W_O ||_1, the L1 norm taken per query head
and averaged over a group. s is the mean attention of the `window` last queries, average-pooled: eps is a prior of its
size, so it is a mean and no sum. `over=snapkv`: equal head budgets; `over=adakv`: budgets by AdaKV's floor rule on s,
every head's floor(alpha n) best safe. Deviations: the window is kept whatever its norms; norms are a ledger column (4
bytes per slot), computed once per token. There is no code beside kvpress' and its fork's: window 32 there (default), 64
in kvpress. Once after the prompt with `enforce=prefill` or `native` (1024 tokens as in AdaKV), else re-selected as in
SnapKV. https://github.com/NVIDIA/kvpress/pull/46
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import Voting, add_votes, fill_norms, observed_rows, settle_votes
from qevict_bench.selection import (
    best_across,
    clamp_protected,
    keep,
    keep_all,
    rank,
    rank_preferred,
    safe_counts,
    settled,
    share_of,
    units_beside,
)

CHOICES = {"over": ("snapkv", "adakv"), "pooling": ("max", "avg"), "reselect_score": ("accumulate", "prompt")}


@dataclass(frozen=True)
class CriticalKV(KVPolicy):
    """`window`, `kernel`, `native_tokens` (mean per head) in tokens; `alpha` with over=adakv only."""

    window: int = 32
    kernel: int = 5
    pooling: str = "avg"
    over: str = "snapkv"
    alpha: float = 0.2
    first_stage_ratio: float = 0.5
    eps: float = 1e-4
    reselect_score: str = "accumulate"
    every: int = 8
    native_tokens: int = 1024
    recent: int = field(default=32, metadata=FITTED)  # newest tokens kept, at most `window`
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too
    published: bool = field(default=False, metadata=FITTED)  # budget=native
    single: bool = field(default=False, metadata=FITTED)  # one KV head has nothing to divide

    def __post_init__(self) -> None:
        self.check(CHOICES, {"window": 1, "kernel": 1, "every": 1, "native_tokens": self.window + 1})
        if self.kernel % 2 == 0:
            raise ValueError(f"method.kernel={self.kernel} must be odd: an even kernel shifts the votes")
        if not 0 <= self.alpha <= 1 or not 0 <= self.first_stage_ratio <= 1 or self.eps < 0:
            wrong = f"method.alpha={self.alpha}, first_stage_ratio={self.first_stage_ratio}, eps={self.eps}"
            raise ValueError(f"{wrong}: the first two must lie in [0, 1], eps must not be negative")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("vote", "norm")

    @property
    def accumulates(self) -> bool:
        """Whether decoded queries vote too."""
        return self.enforced and self.reselect_score == "accumulate"

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every if self.enforced else 0, replay=self.accumulates)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        enforced = budget.enforce == "always" and not budget.native
        reserve, entry = self.every if enforced else 0, self.entry_bytes
        _, recent = clamp_protected(budget, geometry, prompt_len, max_new, 0, self.window, reserve, metadata=entry)
        single = self.over == "adakv" and geometry.num_kv_heads == 1
        return replace(self, recent=recent, enforced=enforced, published=budget.native, single=single)

    def knobs(self) -> dict[str, Any]:
        said = {"degenerate": "1 KV head: over=adakv equals over=snapkv"} if self.single else {}
        return {"recent": self.recent, **said}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return observed_rows(start, stop, prompt_len_B, phase, self.window, self.accumulates)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        add_votes([view.columns["vote"]], mass_BHGPU)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        newest = view.pos_BHU >= view.seq_len_B[:, None, None] - self.recent
        first_B = view.event_len_B == 0
        if not self.enforced and not bool(first_B.any()):  # as published: the prompt is compressed once
            return [keep_all(view)]
        voting = Voting(self.kernel, self.pooling)
        score = settle_votes([view.columns["vote"]], first_B, newest | ~view.alive_BHU, voting) / self.window
        if not self.published and bool(settled(view, allowance).all()):
            return [keep_all(view)]
        norm, native_tokens = view.columns["norm"], self.native_tokens if self.published else 0
        seen = view.alive_BHU & (view.pos_BHU < view.seq_len_B[:, None, None])
        fill_norms(norm, seen, view.values, view.w_o(), head_share=False)
        candidate, ranks = view.alive_BHU & ~newest, rank(score, view.alive_BHU & ~newest)
        total_B, heads = units_beside(views, allowance, [newest], native_tokens), norm.shape[1]
        window_B = view.seq_len_B.clamp(max=self.recent)
        budget_BH, safe_BH = (total_B // heads)[:, None].expand(-1, heads), torch.zeros_like(ranks[..., 0])
        if self.over == "adakv":
            safe_BH = safe_counts(total_B, heads, self.alpha, window_B)
            [kept] = best_across([score], [candidate], [ranks < safe_BH[..., None]], total_B)
            budget_BH = kept.sum(-1)
        first_BH = share_of(budget_BH + window_B[:, None], self.first_stage_ratio) - window_B[:, None]
        first = ranks < first_BH.maximum(safe_BH)[..., None]
        kept = rank_preferred((score + self.eps) * norm, candidate, first) < budget_BH[..., None]
        return [keep(view, allowance, newest | kept, native_tokens)]
