"""KVQuant: non-uniform codes with exact outliers, keys before RoPE (Hooper et al., arXiv 2401.18079).

Rule: a layer's keys share one codebook of 2^b centroids and its values another, fitted beforehand by k-means weighted
with the Fisher information, the squared gradient of the loss; a value's code is the nearest centroid of
(x - offset) / range. Offset and range are static per channel for keys (calibrated 0.5 and 99.5 % quantiles) and per
token for values. The 1 % furthest outliers are kept exactly, beside the first `sinks` tokens. Nothing is evicted, and
codes never change. Without a calibration of the model the method is refused, with the command that makes one.
Deviations from the authors' code: outliers are exactly `outliers` of every `block` tokens of a KV head, by rank
(theirs: a threshold with an unbounded count for keys, a share of every token for values), a 16-bit value and a 16-bit
index each; values are scaled per KV head, theirs over a token's whole hidden row; tokens are coded in blocks, so the
unfinished block stays exact (theirs: one by one); Q-Norm is left out (its public code fails). Prompt attention is exact
and the cache is coded afterwards, as in their kernels, not before, as in the simulation behind their perplexities.
Under a budget `fill` leaves the newest blocks exact for as long as the bytes pay for them; the authors code all, as
native does. The codebooks belong to the model like weights and are not billed; offsets and ranges of keys are, per row.
https://github.com/SqueezeAILab/KVQuant
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch

from qevict_bench.budget import Budget, Geometry
from qevict_bench.codecs import Tier
from qevict_bench.fitting import infeasible, lift_best, needed_fraction, pays
from qevict_bench.nuq import Codebooks, NuqKeys, NuqValues, Sparse, longest_unit
from qevict_bench.policy import FITTED, FULL, FULL_TIER, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.selection import keep_all, settled, unless_fits

LOW = 1


@dataclass(frozen=True)
class KVQuant(KVPolicy):
    """`bits` 2, 3 or 4; `sinks`, `block` and `every` in tokens; `outliers` a share of all values."""

    bits: int = 3
    outliers: float = 0.01
    sinks: int = 5
    block: int = 16
    fill: bool = True
    every: int = 8
    codebooks: Codebooks = field(default=Codebooks(), metadata=FITTED)
    published: bool = field(default=False, metadata=FITTED)  # budget=native

    def __post_init__(self) -> None:
        self.check({}, {"sinks": 0, "block": 1, "every": 1})
        assert self.tiers  # bad bits or outliers are said here, not in the middle of a run

    @property
    def tiers(self) -> tuple[Tier, ...]:
        sparse = Sparse(self.outliers, self.block)
        return FULL_TIER, Tier(f"nuq{self.bits}", NuqKeys(self.bits, sparse), NuqValues(self.bits, sparse))

    def layer_tiers(self, layer_idx: int) -> tuple[Tier, ...]:
        sparse = Sparse(self.outliers, self.block)
        keys, values = (self.codebooks.centroids(layer_idx, side, self.bits) for side in ("key", "value"))
        key = NuqKeys(self.bits, sparse, keys, self.codebooks.bounds(layer_idx))
        return FULL_TIER, Tier(f"nuq{self.bits}", key, NuqValues(self.bits, sparse, values))

    @property
    def unit(self) -> int:
        return self.block

    @property
    def offset(self) -> int:
        return self.sinks

    @property
    def head_shared(self) -> bool:
        return True

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every)

    @property
    def restore(self) -> str:
        return "none"

    def prepare(self, model: str, fingerprint: str) -> Self:
        made = self if self.codebooks.digest else replace(self, codebooks=Codebooks.load(model, fingerprint))
        if self.block > (longest := longest_unit(made.codebooks.head_dim)):
            raise ValueError(
                f"method.block={self.block} is more than int16 indices reach in {model}: at most {longest}"
            )
        return made

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        where = (budget, geometry, prompt_len, max_new, self.every, partial(self.layer_bytes, geometry))
        if not pays(*where):
            raise infeasible(budget, f"all blocks at {self.bits} bits", prompt_len, needed_fraction(*where))
        return replace(self, published=budget.native)

    def knobs(self) -> dict[str, Any]:
        return {"codebooks": self.codebooks.digest}

    def layer_bytes(self, geometry: Geometry, seq_len: int) -> int:
        """Bytes of one layer after an event at about `seq_len` tokens: all blocks coded, the last as long as can be.

        An appended question moves the ends of blocks, so what fits must not hang on where they are.
        """
        dim, size, low = geometry.head_dim, geometry.itemsize, self.tiers[LOW]
        coded = max(0, seq_len - self.sinks - (self.block - 1))
        block = sum(self.block * x.slot_bytes(dim, size) + x.group_bytes(dim, size) for x in (low.key, low.value))
        exact = (seq_len - coded + self.every) * geometry.slot_bytes + low.key.reference_bytes(dim, size)
        units = (self.sinks > 0) + -(-max(0, seq_len + self.every - self.sinks) // self.block)
        return geometry.num_kv_heads * (-(-coded * block // self.block) + exact) + units * self.entry_bytes

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        if not self.published and bool(settled(view, allowance).all()):
            return [keep_all(view)]
        whole = view.end_BHU - view.pos_BHU == self.block
        whole &= view.pos_BHU >= self.sinks  # the sinks are a unit too
        finished = view.alive_BHU & whole & (view.end_BHU <= view.seq_len_B[:, None, None])
        tier_BHU = torch.where(finished, LOW, view.tier_BHU)
        if self.published:
            return [Placement(tier_BHU)]
        if self.fill:
            newest_first, exact = view.pos_BHU.float(), finished & (view.tier_BHU == FULL)
            gain = allowance.unit_bytes[FULL] - allowance.unit_bytes[LOW]
            tier_BHU = lift_best(view, allowance, newest_first, tier_BHU, exact, FULL, gain)
        return [unless_fits(view, allowance, tier_BHU)]
