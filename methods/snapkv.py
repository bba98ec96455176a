"""SnapKV: keep what the last prompt queries attend to (Li et al., arXiv 2404.14469).

Rule: vote_j = sum over the last `window` queries of A[i, j], mean (or max) over the query heads of a KV head, pooled
along j with an odd `kernel`; keep the best-voted prefix tokens and the window. Defaults are the authors' LongBench
setting (32, 7, max); snapkv_kvpress.yaml is kvpress' (64, 5, avg, query heads merged after pooling). Deviations: one
set per KV head - the authors' code repeats keys to query heads and stores G times as much; the budget counts bytes, not
tokens. As published it evicts once, after the prompt (`enforce=prefill`); with `enforce=always` it re-selects every
`every` decoded tokens: votes plus the attention of each decoded query (`reselect_score=accumulate`) or the prompt's
votes alone (`prompt`), the newest `window` tokens kept. https://github.com/FasterDecoding/SnapKV
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
from qevict_bench.selection import clamp_protected, keep_all, keep_best

CHOICES = {
    "pooling": ("max", "avg"),
    "group_reduce": ("mean", "max"),
    "order": ("reduce_first", "pool_first"),
    "reselect_score": ("accumulate", "prompt"),
}


@dataclass(frozen=True)
class SnapKV(KVPolicy):
    """`window`, `kernel`, `native_tokens` in tokens; `every` decoded tokens between re-selections.

    group_reduce merges the query heads of a KV head, before the pooling (order reduce_first) or after (pool_first).
    """

    window: int = 32
    kernel: int = 7
    pooling: str = "max"
    group_reduce: str = "mean"
    order: str = "reduce_first"
    reselect_score: str = "accumulate"
    every: int = 8
    native_tokens: int = 2048
    recent: int = field(default=32, metadata=FITTED)  # newest tokens kept, at most `window`
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too
    published: bool = field(default=False, metadata=FITTED)  # budget=native, `native_tokens` per head
    group: int = field(default=1, metadata=FITTED)  # query heads per KV head

    def __post_init__(self) -> None:
        self.check(CHOICES, {"window": 1, "kernel": 1, "every": 1, "native_tokens": 1})
        if self.kernel % 2 == 0:
            raise ValueError(f"method.kernel={self.kernel} must be odd: an even kernel shifts the votes")

    @property
    def voting(self) -> Voting:
        return Voting(self.kernel, self.pooling, self.group_reduce, self.order)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.voting.columns(self.group)

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every if self.enforced else 0)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        enforced = budget.enforce == "always" and not budget.native
        fitted = replace(self, enforced=enforced, published=budget.native, group=geometry.group_size)
        reserve, entry = self.every if enforced else 0, fitted.entry_bytes
        _, recent = clamp_protected(budget, geometry, prompt_len, max_new, 0, self.window, reserve, metadata=entry)
        return replace(fitted, recent=recent)

    def knobs(self) -> dict[str, Any]:
        return {"recent": self.recent}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        later = self.enforced and self.reselect_score == "accumulate"
        return observed_rows(start, stop, prompt_len_B, phase, self.window, later)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        add_votes(list(view.columns.values()), mass_BHGPU)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        newest = view.pos_BHU >= view.seq_len_B[:, None, None] - self.recent
        first_B = view.event_len_B == 0
        if not self.enforced and not bool(first_B.any()):  # as published: the prompt is compressed once
            return [keep_all(view)]
        score = settle_votes(list(view.columns.values()), first_B, newest | ~view.alive_BHU, self.voting)
        return [keep_best(view, allowance, score, newest, self.native_tokens if self.published else 0)]
