"""DefensiveKV and Layer-DefensiveKV: worst case instead of mean attention (Feng et al., ICLR 2026).

Rule, per KV head, over the last `window` queries and the prefix: average-pool every attention row and rescale it to its
mass; m_j = max over group and queries; s_j = max(m_j, mean m), times || V_j W_O ||_1 normalised over the KV heads. The
tokens that hold `threshold` - bias of the mean attention (the one that reaches it excluded, at most a head's equal
share) get the layer's largest s. The best prefix tokens of a layer over all its heads stay; `scope=model`
(Layer-DefensiveKV) ranks all layers together. bias: mean attention on the window (`as_intended`), or on the `window`
keys before it (`as_coded`, the default: the authors cut the window off first). Deviations: the window always stays (in
the authors' layer variant a layer with small scores can lose it); the equal share is what lies beside the window
(theirs: the kept part of the prefix less the window, so fewer tokens), at least 0; where `recent` had to shrink, the
window ends there; decoded queries enter with the tokens at least `recent` before them, not pooled; after a
re-selection the bias is a share of what the kept tokens gathered (`as_intended`: then 0). Three ledger columns, 12
bytes per slot. Published: once after the prompt at 20 %, so no `native`. https://github.com/FFY0/DefensiveKV
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qevict_bench.budget import Geometry
from qevict_bench.observing import Observing
from qevict_bench.policy import Allowance, LayerView, Placement
from qevict_bench.scoring import covering, defensive_peak, fill_norms, mean_floor
from qevict_bench.selection import best_across, keep, rank, units_beside


@dataclass(frozen=True)
class DefensiveKV(Observing):
    """`window`, `kernel` in tokens; `every` decoded tokens between re-selections."""

    publishes_size: ClassVar[bool] = False
    kernel: int = 5
    threshold: float = 0.9
    bias: str = "as_coded"
    scope: str = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"bias": ("as_coded", "as_intended"), "scope": ("layer", "model")}, {})
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"method.threshold={self.threshold} must lie in [0, 1]")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("peak", "mass", "norm")

    def nothing_to_decide(self, geometry: Geometry) -> str:
        said = ["1 KV head: values do not weigh"] if geometry.num_kv_heads == 1 else []
        if self.scope == "model" and geometry.num_layers == 1:
            said.append("1 layer: equals DefensiveKV")
        return "; ".join(said)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        prompt_BP = rows_BP < view.prompt_len_B[:, None]
        edge_BP = torch.where(prompt_BP, view.prompt_len_B[:, None], rows_BP + 1) - self.recent
        inside_BHPU = view.alive_BHU[:, :, None] & (view.pos_BHU[:, :, None] < edge_BP[:, None, :, None])
        kernel = self.kernel if bool(prompt_BP.all()) else 1
        peak, mass = view.columns["peak"], view.columns["mass"]
        peak.copy_(peak.maximum(defensive_peak(mass_BHGPU, inside_BHPU, kernel)))
        counted = inside_BHPU | prompt_BP[:, None, :, None]  # of prompt queries the window too, for the bias
        mass.add_((mass_BHGPU.mean(dim=2) * counted).sum(dim=2))

    def settle(self, view: LayerView, newest_BHU: Tensor) -> Tensor:
        """The bias [B]; what the window's tokens gathered is then forgotten."""
        bias_B = self._bias(view)
        view.columns["mass"].masked_fill_(newest_BHU, 0.0)
        return bias_B

    def choose(
        self, views: Sequence[LayerView], allowance: Allowance, newest: Sequence[Tensor], found: Sequence[Tensor]
    ) -> list[Placement]:
        total_B = units_beside(views, allowance, newest, 0)
        share_B = total_B // (newest[0].shape[1] * len(views))
        candidates = [view.alive_BHU & ~new for view, new in zip(views, newest, strict=True)]
        scores = [
            self._score(view, candidate, bias_B, share_B)
            for view, candidate, bias_B in zip(views, candidates, found, strict=True)
        ]
        kept = best_across(scores, candidates, [torch.zeros_like(c) for c in candidates], total_B)
        return [keep(view, allowance, new | k) for view, new, k in zip(views, newest, kept, strict=True)]

    def _bias(self, view: LayerView) -> Tensor:
        """Share [B] of the layer's attention that lies on the window, or on the `window` keys before it."""
        last = view.seq_len_B[:, None, None] - (0 if self.bias == "as_intended" else self.window)
        mass = view.columns["mass"]
        region = (view.pos_BHU >= last - self.window) & (view.pos_BHU < last)
        tiny = torch.finfo(torch.float32).tiny
        return (mass * region).sum((1, 2)) / mass.sum((1, 2)).clamp(min=tiny)

    def _score(self, view: LayerView, candidate: Tensor, bias_B: Tensor, share_B: Tensor) -> Tensor:
        norm, mass = view.columns["norm"], view.columns["mass"]
        seen = view.alive_BHU & (view.pos_BHU < view.seq_len_B[:, None, None])
        fill_norms(norm, seen, view.values, view.w_o(), head_share=True)
        score = (mean_floor(view.columns["peak"], candidate) * norm).masked_fill(~candidate, 0.0)
        num_BH = covering(mass, candidate, self.threshold - bias_B).minimum(share_B[:, None])
        most_B = score.amax(dim=(1, 2), keepdim=True)
        return torch.where(rank(mass, candidate) < num_BH[..., None], most_B, score)
