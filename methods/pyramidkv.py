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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qevict_bench.budget import Geometry
from qevict_bench.observing import VotingPolicy
from qevict_bench.policy import Allowance, LayerView, Placement
from qevict_bench.scoring import Voting
from qevict_bench.selection import keep_ranked, level, pyramid, pyramid_inside, units_beside


@dataclass(frozen=True)
class PyramidKV(VotingPolicy):
    """`window`, `kernel`, `native_tokens` (mean per layer and head) in tokens; a larger `beta` is steeper."""

    window: int = 8
    native_tokens: int = 2048
    group_reduce: str = "mean"
    beta: int = 20
    shape: str = "official"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"shape": ("official", "kvpress"), "group_reduce": ("mean", "max")}, {"beta": 1})

    @property
    def scope(self) -> str:
        return "model"

    @property
    def voting(self) -> Voting:
        return Voting(self.kernel, self.pooling, self.group_reduce)

    def nothing_to_decide(self, geometry: Geometry) -> str:
        return "1 layer: no pyramid, equals SnapKV" if geometry.num_layers < 2 else ""

    def choose(
        self, views: Sequence[LayerView], allowance: Allowance, newest: Sequence[Tensor], found: Sequence[Tensor]
    ) -> list[Placement]:
        heads = newest[0].shape[1]
        total_B = units_beside(views, allowance, newest, self.native_in_force) // heads
        free = [(view.alive_BHU & ~new).sum(-1)[:, 0] for view, new in zip(views, newest, strict=True)]
        num_BL = [
            self._counts(total, seen, available)
            for total, seen, available in zip(
                total_B.tolist(), views[0].seq_len_B.tolist(), torch.stack(free, dim=1).tolist(), strict=True
            )
        ]
        num_LBH = total_B.new_tensor(num_BL).T[..., None].expand(-1, -1, heads)
        return [
            keep_ranked(view, allowance, score, new, num, self.native_in_force)
            for view, score, new, num in zip(views, found, newest, num_LBH, strict=True)
        ]

    def _counts(self, total: int, seen: int, available: list[int]) -> list[int]:
        """Prefix tokens per layer of one row whose layers may hold `total` together, per head."""
        layers, recent = len(available), min(self.recent, seen)
        if self.shape == "kvpress":
            counts = [n - recent for n in pyramid_inside(total // layers + recent, layers, seen, recent, self.beta)]
        else:
            counts = pyramid(total // layers, layers, seen, recent, self.beta)
        return counts if self.published else level(counts, available, total)
