"""TOVA: keep what the last query attends to (Oren et al., arXiv 2401.06104).

Rule: after every step's attention, score_j = mean over all query heads of A[last, j]; keep the best tokens that the
bytes pay for, one set for all heads of a layer, at original positions. Evicts after the prompt and at every decoded
token (`every`); the step itself still sees the unpruned keys. `keep_last` also keeps the last token whatever its score,
as kvpress does (tova_kvpress.yaml); the authors do not force it. kvpress compresses once, after the prompt; here both
evict while decoding, also with `enforce=prefill` (the authors' number is fixed, as with basis=prompt). `native` keeps
`native_tokens`: the authors give no single size, 512 is the eighth of a 4K cache that their abstract names.
https://github.com/schwartz-lab-NLP/TOVA
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import all_rows, last_rows
from qevict_bench.selection import clamp_protected, keep_best


@dataclass(frozen=True)
class TOVA(KVPolicy):
    """`native_tokens` per layer; `every` decoded tokens between evictions."""

    keep_last: bool = False
    every: int = 1
    native_tokens: int = 512
    published: bool = field(default=False, metadata=FITTED)  # budget=native, `native_tokens` per layer

    def __post_init__(self) -> None:
        self.check({}, {"every": 1, "native_tokens": 1})

    @property
    def columns(self) -> tuple[str, ...]:
        return ("last",)

    @property
    def head_shared(self) -> bool:
        return True

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        metadata = -(-self.entry_bytes // geometry.num_kv_heads)
        clamp_protected(budget, geometry, prompt_len, max_new, 0, int(self.keep_last), self.every, metadata=metadata)
        return replace(self, published=budget.native)

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        """The last row of a prompt, every decoded row; a question's rows all, for questions may end anywhere."""
        if phase == "prefill":
            return last_rows(start, stop, prompt_len_B, 1)
        return all_rows(start, stop, prompt_len_B)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        view.columns["last"].copy_(mass_BHGPU[:, :, :, -1].mean(dim=(1, 2))[:, None])

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        newest = view.pos_BHU >= (view.seq_len_B - int(self.keep_last))[:, None, None]
        native_tokens = self.native_tokens if self.published else 0
        return [keep_best(view, allowance, view.columns["last"], newest, native_tokens)]
