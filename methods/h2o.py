"""H2O: heavy hitters and the newest tokens (Zhang et al., arXiv 2306.14048).

Rule: acc_j = sum over every query i that has seen token j of A[i, j], over the query heads of a KV head; keep the
newest `recent_share` of the slots that the bytes pay for, and in the others the tokens with the largest acc. Evicts
after the prompt and at every decoded token (`every`), after that step's attention; the sums of kept tokens carry on.
This is the authors' `real_drop` variant (their lm-eval numbers simulate with future queries; other ports sum a window,
or divide by the number of queries). Deviations: their code cannot group query heads, here the group's sum decides; all
prompt queries count, in fp32, which is O(n^2) beside attention itself. A token's recency counts tokens seen.
`enforce=prefill` changes nothing: it evicts while decoding, as published, though the authors' number of slots is fixed
(basis=prompt) where basis=sequence lets it grow with the text. `native` keeps `native_tokens` per head, half
of them recent (1024 + 1024 in the authors' summarization script). https://github.com/FMInference/H2O
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import all_rows
from qevict_bench.selection import clamp_protected, keep_best, share_of, units_beside


@dataclass(frozen=True)
class H2O(KVPolicy):
    """`recent_share` of the slots are the newest tokens; `every` decoded tokens between evictions."""

    recent_share: float = 0.5
    every: int = 1
    native_tokens: int = 2048
    published: bool = field(default=False, metadata=FITTED)  # budget=native, `native_tokens` per head

    def __post_init__(self) -> None:
        self.check({}, {"every": 1, "native_tokens": 1})
        if not 0 <= self.recent_share <= 1:
            raise ValueError(f"method.recent_share={self.recent_share} must lie in [0, 1]")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("heavy",)

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        clamp_protected(budget, geometry, prompt_len, max_new, 0, 0, self.every, metadata=self.entry_bytes)
        return replace(self, published=budget.native)

    def knobs(self) -> dict[str, Any]:
        return {"recent_share": self.recent_share}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return all_rows(start, stop, prompt_len_B)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        view.columns["heavy"] += mass_BHGPU.sum(dim=(2, 3))

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        native_tokens = self.native_tokens if self.published else 0
        seq_len_B11 = view.seq_len_B[:, None, None]
        coming = view.pos_BHU >= seq_len_B11  # room for the next tokens
        heads = coming.shape[1]
        slots_B = units_beside(views, allowance, [coming], native_tokens) // heads
        recent = view.pos_BHU >= seq_len_B11 - share_of(slots_B, self.recent_share)[:, None, None]
        return [keep_best(view, allowance, view.columns["heavy"], recent, native_tokens)]
