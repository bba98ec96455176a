"""DefensiveKV and Layer-DefensiveKV: worst case instead of mean attention (Feng et al., ICLR 2026).

Rule, per KV head, over the last `window` queries and the prefix: average-pool every attention row and rescale it to its
mass; m_j = max over group and queries; s_j = max(m_j, mean m), times || V_j W_O ||_1 normalised over the KV heads. The
tokens that hold `threshold` - bias of the mean attention (the one that reaches it excluded, at most a head's equal
share) get the layer's largest s. The best prefix tokens of a layer over all its heads stay; `scope=model`
(Layer-DefensiveKV) ranks all layers together. bias: mean attention on the window (`as_intended`), or on the `window`
keys before it (`as_coded`, the default: the authors cut the window off first). Deviations: the window always stays (in
the authors' layer variant a layer with small scores can lose it); a negative equal share is 0; decoded queries enter
with the tokens at least `window` before them, not pooled. Three ledger columns, 12 bytes per slot. Published: once
after the prompt at 20 %, so no `native`. https://github.com/FFY0/DefensiveKV
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import covering, defensive_peak, fill_norms, mean_floor, observed_rows
from qevict_bench.selection import best_across, clamp_protected, keep, keep_all, rank, settled, units_beside

CHOICES = {
    "bias": ("as_coded", "as_intended"),
    "scope": ("layer", "model"),
    "reselect_score": ("accumulate", "prompt"),
}


@dataclass(frozen=True)
class DefensiveKV(KVPolicy):
    """`window`, `kernel` in tokens; `every` decoded tokens between re-selections."""

    window: int = 32
    kernel: int = 5
    threshold: float = 0.9
    bias: str = "as_coded"
    scope: str = "layer"
    reselect_score: str = "accumulate"
    every: int = 8
    recent: int = field(default=32, metadata=FITTED)  # newest tokens kept, at most `window`
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too
    degenerate: str = field(default="", metadata=FITTED)  # what a small model leaves nothing to decide

    def __post_init__(self) -> None:
        self.check(CHOICES, {"window": 1, "kernel": 1, "every": 1})
        if self.kernel % 2 == 0 or not 0 <= self.threshold <= 1:
            raise ValueError(f"method.kernel={self.kernel} must be odd, threshold={self.threshold} in [0, 1]")

    @property
    def columns(self) -> tuple[str, ...]:
        return ("peak", "mass", "norm")

    @property
    def accumulates(self) -> bool:
        """Whether decoded queries count too."""
        return self.enforced and self.reselect_score == "accumulate"

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every if self.enforced else 0, replay=self.accumulates)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        if budget.native:
            raise ValueError("budget=native: the authors publish a fraction, not a size; give budget=0.2")
        enforced = budget.enforce == "always"
        reserve, entry = self.every if enforced else 0, self.entry_bytes
        _, recent = clamp_protected(budget, geometry, prompt_len, max_new, 0, self.window, reserve, metadata=entry)
        said = ["1 KV head: values do not weigh"] if geometry.num_kv_heads == 1 else []
        if self.scope == "model" and geometry.num_layers == 1:
            said.append("1 layer: equals DefensiveKV")
        return replace(self, recent=recent, enforced=enforced, degenerate="; ".join(said))

    def knobs(self) -> dict[str, Any]:
        said = {"degenerate": self.degenerate} if self.degenerate else {}
        return {"recent": self.recent, **said}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return observed_rows(start, stop, prompt_len_B, phase, self.window, self.accumulates)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        prompt_BP = rows_BP < view.prompt_len_B[:, None]
        edge_BP = torch.where(prompt_BP, view.prompt_len_B[:, None], rows_BP + 1) - self.window
        inside_BHPU = view.alive_BHU[:, :, None] & (view.pos_BHU[:, :, None] < edge_BP[:, None, :, None])
        kernel = self.kernel if bool(prompt_BP.all()) else 1
        peak, mass = view.columns["peak"], view.columns["mass"]
        peak.copy_(peak.maximum(defensive_peak(mass_BHGPU, inside_BHPU, kernel)))
        counted = inside_BHPU | prompt_BP[:, None, :, None]  # of prompt queries the window too, for the bias
        mass.add_((mass_BHGPU.mean(dim=2) * counted).sum(dim=2))

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        if not self.enforced and not bool((views[0].event_len_B == 0).any()):  # as published: once, after the prompt
            return [keep_all(view) for view in views]
        newest = [view.pos_BHU >= view.seq_len_B[:, None, None] - self.recent for view in views]
        bias_B = [self._bias(view) for view in views]
        for view, new in zip(views, newest, strict=True):
            view.columns["mass"].masked_fill_(new, 0.0)
        if all(bool(settled(view, allowance).all()) for view in views):
            return [keep_all(view) for view in views]
        total_B = units_beside(views, allowance, newest, 0)
        share_B = total_B // (newest[0].shape[1] * len(views))
        candidates = [view.alive_BHU & ~new for view, new in zip(views, newest, strict=True)]
        scores = [
            self._score(view, candidate, bias, share_B)
            for view, candidate, bias in zip(views, candidates, bias_B, strict=True)
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
