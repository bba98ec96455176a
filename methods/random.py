"""Random eviction: the floor that every scoring method has to beat.

Rule: after the prompt, and every `every` decoded tokens with `enforce=always`, each KV head keeps a uniformly drawn
subset of the tokens it still holds, as many as the bytes pay for. Nothing is scored and nothing is protected. Draws
come from the row's generator, so they depend on seed and example only. There is no published size, so no `native`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.selection import clamp_protected, keep_all, keep_best


@dataclass(frozen=True)
class Random(KVPolicy):
    """`every` decoded tokens between evictions."""

    publishes_size: ClassVar[bool] = False
    every: int = 8
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too

    def __post_init__(self) -> None:
        self.check({}, {"every": 1})

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every if self.enforced else 0)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        enforced = budget.enforce == "always"
        reserve = self.every if enforced else 0
        clamp_protected(budget, geometry, prompt_len, max_new, 0, 0, reserve, metadata=self.entry_bytes)
        return replace(self, enforced=enforced)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        if not self.enforced and not bool((view.event_len_B == 0).any()):
            return [keep_all(view)]
        score = torch.zeros(view.pos_BHU.shape, device=view.pos_BHU.device)
        for row, alive in enumerate(view.alive_BHU):
            drawn = torch.rand(int(alive.sum()), generator=view.rng(row))
            score[row][alive] = drawn.to(score.device)
        coming = view.pos_BHU >= view.seq_len_B[:, None, None]
        return [keep_best(view, allowance, score, coming)]
