"""SnapKV: keep what the last prompt queries attend to (Li et al., arXiv 2404.14469).

Rule: vote_j = sum over the last `window` queries of A[i, j], mean (or max) over the query heads of a KV head, pooled
along j with an odd `kernel`; keep the best-voted prefix tokens and the window. Defaults are the authors' LongBench
setting (32, 7, max). Deviations: one set per KV head, reduced before pooling - the authors' code repeats keys to query
heads and stores G times as much; the budget counts bytes, not tokens. As published it evicts once, after the prompt
(`enforce=prefill`); with `enforce=always` it re-selects every `every` decoded tokens: votes plus the attention of each
decoded query (`reselect_score=accumulate`) or the prompt's votes alone (`prompt`), the newest `window` tokens kept.
https://github.com/FasterDecoding/SnapKV
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import EVICTED, FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import last_rows, pool, reduce_group
from qevict_bench.selection import clamp_protected, keep_all, keep_best, rank

CHOICES = {"pooling": ("max", "avg"), "group_reduce": ("mean", "max"), "reselect_score": ("accumulate", "prompt")}


@dataclass(frozen=True)
class SnapKV(KVPolicy):
    """`window`, `kernel`, `native_tokens` in tokens; `every` decoded tokens between re-selections."""

    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    group_reduce: str = "mean"
    reselect_score: str = "accumulate"
    every: int = 8
    native_tokens: int = 2048
    recent: int = field(default=32, metadata=FITTED)  # newest tokens kept, at most `window`
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too
    published: bool = field(default=False, metadata=FITTED)  # budget=native, `native_tokens` per head
    group: int = field(default=1, metadata=FITTED)  # query heads per KV head

    def __post_init__(self) -> None:
        self.check(CHOICES, {"window": 1, "every": 1, "native_tokens": 1})
        if self.kernel % 2 == 0 or self.kernel < 1:
            raise ValueError(f"method.kernel={self.kernel} must be odd: an even kernel shifts the votes")

    @property
    def columns(self) -> tuple[str, ...]:
        """One vote per slot; a maximum over query heads can only be taken of their final sums, so it needs one each."""
        return tuple(f"vote{g}" for g in range(self.group)) if self.group_reduce == "max" else ("vote",)

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every if self.enforced else 0)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        enforced = budget.enforce == "always" and not budget.native
        fitted = replace(self, enforced=enforced, published=budget.native, group=geometry.group_size)
        every = self.every if enforced else 0
        _, recent = clamp_protected(
            budget, geometry, prompt_len, max_new, 0, self.window, every, metadata=fitted.entry_bytes
        )
        return replace(fitted, recent=recent)

    def knobs(self) -> dict[str, Any]:
        return {"recent": self.recent}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        if phase == "prefill":
            return last_rows(start, stop, prompt_len_B, self.window)
        if self.reselect_score == "prompt" or not self.enforced:
            return None
        return torch.ones((len(prompt_len_B), stop - start), dtype=torch.bool, device=prompt_len_B.device)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        votes = [reduce_group(mass_BHGPU, "mean")]
        if self.group_reduce == "max":
            votes = list(mass_BHGPU.sum(dim=3).unbind(dim=2))
        for column, vote in zip(view.columns.values(), votes, strict=True):
            column += vote

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        vote = torch.stack(list(view.columns.values())).amax(dim=0)
        newest = view.pos_BHU >= view.seq_len_B[:, None, None] - self.recent
        first_event = (view.event_len_B == 0)[:, None, None]
        if not self.enforced and not bool(first_event.any()):  # as published: the prompt is compressed once
            return [keep_all(view)]
        beside = newest | ~view.alive_BHU
        pooled = pool(vote.masked_fill(beside, 0.0), self.kernel, self.pooling).masked_fill(beside, 0.0)
        vote = torch.where(first_event, pooled, vote)
        for column in view.columns.values():
            column.copy_(torch.where(first_event, vote, column))
        if not self.published:
            return [keep_best(view, allowance, vote, newest)]
        ranks = rank(vote.masked_fill(newest, torch.inf), view.alive_BHU)
        return [Placement(torch.where(ranks < self.native_tokens, view.tier_BHU, EVICTED))]
