"""PyramidKV: SnapKV's votes, more tokens in lower layers (Cai et al., arXiv 2406.02069).

Rule: with a base of b prefix tokens per layer and head, layer l keeps max - l * step of the best voted and the window;
min = b // beta, max = 2 b - min (cut at the prefix, min rising instead), step = (max - min) // (layers - 1). `shape`
`official` is that (integers, the window beside; uniform if the prompt is shorter than 2 b); `kvpress` uses real steps
with the window inside, and is uniform unless min >= window (at 20 % with a window of 64 it IS SnapKV below 6400
tokens). Votes as in SnapKV, one set per KV head, all heads of a layer alike. Deviations: counts are brought to the
bytes of all layers together, evenly (whole steps overshoot by up to 4.6 %), lowest votes first; the slope follows the
tokens seen. Defaults are the authors' (window 8, 7, max); pyramidkv_kvpress.yaml is kvpress' (64, 5, avg). Once after
the prompt with `enforce=prefill` or `native` (`native_tokens` includes the window, untrimmed); else re-selected every
`every` tokens. https://github.com/Zefan-Cai/KVCache-Factory
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
    clamp_protected,
    keep_all,
    keep_ranked,
    level,
    pyramid,
    pyramid_inside,
    settled,
    units_beside,
)

CHOICES = {
    "pooling": ("max", "avg"),
    "group_reduce": ("mean", "max"),
    "shape": ("official", "kvpress"),
    "reselect_score": ("accumulate", "prompt"),
}


@dataclass(frozen=True)
class PyramidKV(KVPolicy):
    """`window`, `kernel`, `native_tokens` (mean per layer and head) in tokens; a larger `beta` is steeper."""

    window: int = 8
    kernel: int = 7
    pooling: str = "max"
    group_reduce: str = "mean"
    beta: int = 20
    shape: str = "official"
    reselect_score: str = "accumulate"
    every: int = 8
    native_tokens: int = 2048
    recent: int = field(default=8, metadata=FITTED)  # newest tokens kept, at most `window`
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too
    published: bool = field(default=False, metadata=FITTED)  # budget=native
    group: int = field(default=1, metadata=FITTED)  # query heads per KV head
    flat: bool = field(default=False, metadata=FITTED)  # a single layer has no slope

    def __post_init__(self) -> None:
        self.check(CHOICES, {"window": 1, "kernel": 1, "beta": 1, "every": 1, "native_tokens": self.window + 1})
        if self.kernel % 2 == 0:
            raise ValueError(f"method.kernel={self.kernel} must be odd: an even kernel shifts the votes")

    @property
    def scope(self) -> str:
        return "model"

    @property
    def voting(self) -> Voting:
        return Voting(self.kernel, self.pooling, self.group_reduce)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.voting.columns(self.group)

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every if self.enforced else 0, replay=self.accumulates)

    @property
    def accumulates(self) -> bool:
        """Whether decoded queries vote too."""
        return self.enforced and self.reselect_score == "accumulate"

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        enforced, flat = budget.enforce == "always" and not budget.native, geometry.num_layers < 2
        fitted = replace(self, enforced=enforced, published=budget.native, group=geometry.group_size, flat=flat)
        reserve, entry = self.every if enforced else 0, fitted.entry_bytes
        _, recent = clamp_protected(budget, geometry, prompt_len, max_new, 0, self.window, reserve, metadata=entry)
        return replace(fitted, recent=recent)

    def knobs(self) -> dict[str, Any]:
        said = {"degenerate": "1 layer: no pyramid, equals SnapKV"} if self.flat else {}
        return {"recent": self.recent, **said}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return observed_rows(start, stop, prompt_len_B, phase, self.window, self.accumulates)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        add_votes(list(view.columns.values()), mass_BHGPU)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        first_B = views[0].event_len_B == 0
        if not self.enforced and not bool(first_B.any()):  # as published: the prompt is compressed once
            return [keep_all(view) for view in views]
        newest = [view.pos_BHU >= view.seq_len_B[:, None, None] - self.recent for view in views]
        scores = [
            settle_votes(list(view.columns.values()), first_B, new | ~view.alive_BHU, self.voting)
            for view, new in zip(views, newest, strict=True)
        ]
        if not self.published and all(bool(settled(view, allowance).all()) for view in views):
            return [keep_all(view) for view in views]
        native_tokens, heads = self.native_tokens if self.published else 0, newest[0].shape[1]
        total_B = units_beside(views, allowance, newest, native_tokens) // heads
        free = [(view.alive_BHU & ~new).sum(-1)[:, 0] for view, new in zip(views, newest, strict=True)]
        num_BL = [
            self._counts(total, seen, available)
            for total, seen, available in zip(
                total_B.tolist(), views[0].seq_len_B.tolist(), torch.stack(free, dim=1).tolist(), strict=True
            )
        ]
        num_LBH = total_B.new_tensor(num_BL).T[..., None].expand(-1, -1, heads)
        return [
            keep_ranked(view, allowance, score, new, num, native_tokens)
            for view, score, new, num in zip(views, scores, newest, num_LBH, strict=True)
        ]

    def _counts(self, total: int, seen: int, available: list[int]) -> list[int]:
        """Prefix tokens per layer of one row whose layers may hold `total` together, per head."""
        layers, recent = len(available), min(self.recent, seen)
        if self.shape == "kvpress":
            counts = [n - recent for n in pyramid_inside(total // layers + recent, layers, seen, recent, self.beta)]
        else:
            counts = pyramid(total // layers, layers, seen, recent, self.beta)
        return counts if self.published else level(counts, available, total)
