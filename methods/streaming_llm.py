"""StreamingLLM: attention sinks and a window of recent tokens (Xiao et al., arXiv 2309.17453).

Rule: keep the first `sink` tokens and as many of the newest as the budget pays for; everything between is evicted.
`position=compact` re-indexes the kept tokens 0 .. n - 1 as the authors' code does (it caches pre-RoPE keys and evicts
at every step; here keys are rotated back at each event, every `every` decoded tokens); `absolute` keeps original
positions, as most re-implementations do. `native` runs the published sizes, `sink` and `native_recent`.
https://github.com/mit-han-lab/streaming-llm
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import EVICTED, FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.selection import clamp_protected, keep_best


@dataclass(frozen=True)
class StreamingLLM(KVPolicy):
    """`sink` and `native_recent` in tokens; `position` absolute | compact; `every` decoded tokens between events."""

    sink: int = 4
    position: str = "compact"
    every: int = 8
    native_recent: int = 2000
    bounded: bool = field(default=True, metadata=FITTED)  # budget bytes, or the published window with budget=native

    def __post_init__(self) -> None:
        self.check({"position": ("absolute", "compact")}, {"sink": 0, "every": 1, "native_recent": 1})

    @property
    def head_shared(self) -> bool:
        return True

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every)

    @property
    def rope(self) -> str:
        return self.position

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        sink, _ = clamp_protected(budget, geometry, prompt_len, max_new, self.sink, 0, self.every)
        return replace(self, sink=sink, bounded=not budget.native)

    def knobs(self) -> dict[str, Any]:
        return {"sink": self.sink}

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        protected = view.alive_BHU & ((view.pos_BHU < self.sink) | (view.pos_BHU >= view.seq_len_B[:, None, None]))
        if not self.bounded:
            recent = view.pos_BHU >= view.seq_len_B[:, None, None] - self.native_recent
            return [Placement(torch.where(protected | recent, view.tier_BHU, EVICTED))]
        return [keep_best(view, allowance, view.pos_BHU.float(), protected)]
