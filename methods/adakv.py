"""AdaKV: SnapKV's votes, divided among a layer's heads by need (Feng et al., arXiv 2407.11550).

Rule: the layer's best-voted prefix tokens, over all KV heads, say how many (c_h) each head wants. `mode=blend` (the
authors' code): head h gets round((1 - alpha) c_h + floor(alpha b)), b the mean per head, halves to even, and keeps its
best. `mode=floor` (kvpress): every head's best floor(alpha n) tokens are safe, n counting the window of which they
consist first, and the layer's best others fill the rest. Heads are really ragged: one unit table each. Deviations: one
set per KV head (the authors' `--gqa_support`); the authors' rounding loses or adds tokens, here the layer's total is
exact to the bytes - weakest votes dropped, best others added - except with `native`. Defaults are the authors' (32, 7,
max, alpha .2); adakv_kvpress.yaml is kvpress' (64, 5, avg, floor). Once after the prompt with `enforce=prefill` or
`native`, else re-selected every `every` tokens as in SnapKV. With one KV head it is SnapKV.
https://github.com/FFY0/AdaKV
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import Voting, add_votes, observed_rows, settle_votes
from qevict_bench.selection import (
    best_across,
    blended_counts,
    clamp_protected,
    keep,
    keep_all,
    rank,
    safe_counts,
    settled,
    units_beside,
)

CHOICES = {
    "mode": ("blend", "floor"),
    "pooling": ("max", "avg"),
    "group_reduce": ("mean", "max"),
    "reselect_score": ("accumulate", "prompt"),
}


@dataclass(frozen=True)
class AdaKV(KVPolicy):
    """`window`, `kernel`, `native_tokens` (mean per head) in tokens; `alpha` is the share that is not adaptive."""

    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    group_reduce: str = "mean"
    alpha: float = 0.2
    mode: str = "blend"
    reselect_score: str = "accumulate"
    every: int = 8
    native_tokens: int = 1024
    recent: int = field(default=32, metadata=FITTED)  # newest tokens kept, at most `window`
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too
    published: bool = field(default=False, metadata=FITTED)  # budget=native
    group: int = field(default=1, metadata=FITTED)  # query heads per KV head
    single: bool = field(default=False, metadata=FITTED)  # one KV head has nothing to divide

    def __post_init__(self) -> None:
        self.check(CHOICES, {"window": 1, "kernel": 1, "every": 1, "native_tokens": self.window + 1})
        if self.kernel % 2 == 0:
            raise ValueError(f"method.kernel={self.kernel} must be odd: an even kernel shifts the votes")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"method.alpha={self.alpha} must lie in [0, 1]")

    @property
    def voting(self) -> Voting:
        return Voting(self.kernel, self.pooling, self.group_reduce)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.voting.columns(self.group)

    @property
    def accumulates(self) -> bool:
        """Whether decoded queries vote too."""
        return self.enforced and self.reselect_score == "accumulate"

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every if self.enforced else 0, replay=self.accumulates)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        enforced, single = budget.enforce == "always" and not budget.native, geometry.num_kv_heads == 1
        fitted = replace(self, enforced=enforced, published=budget.native, group=geometry.group_size, single=single)
        reserve, entry = self.every if enforced else 0, fitted.entry_bytes
        _, recent = clamp_protected(budget, geometry, prompt_len, max_new, 0, self.window, reserve, metadata=entry)
        return replace(fitted, recent=recent)

    def knobs(self) -> dict[str, Any]:
        said = {"degenerate": "1 KV head: equals SnapKV"} if self.single else {}
        return {"recent": self.recent, **said}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return observed_rows(start, stop, prompt_len_B, phase, self.window, self.accumulates)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        add_votes(list(view.columns.values()), mass_BHGPU)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        newest = view.pos_BHU >= view.seq_len_B[:, None, None] - self.recent
        first_B = view.event_len_B == 0
        if not self.enforced and not bool(first_B.any()):  # as published: the prompt is compressed once
            return [keep_all(view)]
        score = settle_votes(list(view.columns.values()), first_B, newest | ~view.alive_BHU, self.voting)
        if not self.published and bool(settled(view, allowance).all()):
            return [keep_all(view)]
        native_tokens = self.native_tokens if self.published else 0
        candidate = view.alive_BHU & ~newest
        total_B = units_beside(views, allowance, [newest], native_tokens)
        if self.mode == "blend":
            due_BH = blended_counts(score, candidate, total_B, self.alpha)
        else:
            due_BH = safe_counts(total_B, candidate.shape[1], self.alpha, view.seq_len_B.clamp(max=self.recent))
        kept = due = rank(score, candidate) < due_BH[..., None]
        if self.mode == "floor" or not self.published:
            [kept] = best_across([score], [candidate], [due], total_B)
        return [keep(view, allowance, newest | kept, native_tokens)]
