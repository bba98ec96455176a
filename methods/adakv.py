"""AdaKV: SnapKV's votes, divided among a layer's heads by need (Feng et al., arXiv 2407.11550).

Rule: the layer's best-voted prefix tokens, over all KV heads, say how many (c_h) each head wants. `mode=blend` (the
authors' code): head h gets round((1 - alpha) c_h + floor(alpha b)), b the mean per head, halves to even, and keeps its
best. `mode=floor` (kvpress): every head's best floor(alpha n) tokens are safe, n counting the window of which they
consist first, and the layer's best others fill the rest. Heads are really ragged: one unit table each. Deviations: one
set per KV head (the authors' `--gqa_support`); the authors' rounding loses or adds tokens, here the layer's total is
exact to the bytes - weakest votes dropped, best others added - except with `native`. Defaults are the authors' (32, 7,
max, alpha .2); adakv_kvpress.yaml is kvpress' (64, 5, avg, floor). Once after the prompt with `enforce=prefill` or
`native`, else re-selected every `every` tokens as in SnapKV. With one KV head it is SnapKV.
https://github.com/FFY0/AdaKV
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qevict_bench.budget import Geometry
from qevict_bench.observing import VotingPolicy
from qevict_bench.policy import Allowance, LayerView, Placement
from qevict_bench.scoring import Voting
from qevict_bench.selection import best_across, blended_counts, keep, rank, safe_counts, units_beside


@dataclass(frozen=True)
class AdaKV(VotingPolicy):
    """`window`, `kernel`, `native_tokens` (mean per head) in tokens; `alpha` is the share that is not adaptive."""

    group_reduce: str = "mean"
    alpha: float = 0.2
    mode: str = "blend"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"mode": ("blend", "floor"), "group_reduce": ("mean", "max")}, {})
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"method.alpha={self.alpha} must lie in [0, 1]")

    @property
    def voting(self) -> Voting:
        return Voting(self.kernel, self.pooling, self.group_reduce)

    def nothing_to_decide(self, geometry: Geometry) -> str:
        return "1 KV head: equals SnapKV" if geometry.num_kv_heads == 1 else ""

    def choose(
        self, views: Sequence[LayerView], allowance: Allowance, newest: Sequence[Tensor], found: Sequence[Tensor]
    ) -> list[Placement]:
        [view], [new], [score] = views, newest, found
        candidate = view.alive_BHU & ~new
        total_B = units_beside(views, allowance, newest, self.native_in_force)
        if self.mode == "blend":
            due_BH = blended_counts(score, candidate, total_B, self.alpha)
        else:
            due_BH = safe_counts(total_B, candidate.shape[1], self.alpha, view.seq_len_B.clamp(max=self.recent))
        kept = due = rank(score, candidate) < due_BH[..., None]
        if self.mode == "floor" or not self.published:
            [kept] = best_across([score], [candidate], [due], total_B)
        return [keep(view, allowance, new | kept, self.native_in_force)]
