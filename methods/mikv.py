"""MiKV: what others would evict stays at low precision (Yang et al., arXiv 2402.18096).

Rule: importance is the attention a token has gathered from all queries, as in H2O: I_j = sum over queries i and over
the query heads of a KV head of A[i, j]. Important tokens keep full precision, `recent` of them being the newest; all
others are coded per token, code = round((x - min) / s), s = (max - min) / (2^b - 1). Nothing is evicted. The important
share is what the bytes pay for, the same number for every KV head; a coded token never becomes important again.
Deviations: no official code is public. The channel balancer sqrt(max|q| / max|k|) of the paper needs the queries and is
left out. Important tokens are at 16 bit (the paper also has 8). Selection is repeated every `every` decoded tokens.
`native` keeps `important` of the tokens; the paper varies this share, the default is ours. `head_scope=layer` ranks by
the mean over KV heads: the table then takes 10 bytes per token, not 10 per token and KV head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.codecs import PerToken, Tier
from qevict_bench.fitting import infeasible, lift_best, needed_fraction, pays
from qevict_bench.policy import FITTED, FULL, FULL_TIER, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.selection import keep_all, rank, settled, unless_fits

LOW = 1


@dataclass(frozen=True)
class MiKV(KVPolicy):
    """`bits` of unimportant keys and values; `recent` and `important` are shares; `every` in decoded tokens."""

    bits: int = 2
    recent: float = 0.5
    head_scope: str = "kv_head"
    every: int = 8
    important: float = 0.2
    published: bool = field(default=False, metadata=FITTED)  # budget=native

    def __post_init__(self) -> None:
        self.check({"head_scope": ("kv_head", "layer")}, {"every": 1})
        if not 0 <= self.recent <= 1 or not 0 <= self.important <= 1:
            raise ValueError(f"method.recent={self.recent} and method.important={self.important} must lie in [0, 1]")
        assert self.tiers  # bad bits are said here, not in the middle of a run

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return FULL_TIER, Tier(f"int{self.bits}", PerToken(self.bits), PerToken(self.bits))

    @property
    def columns(self) -> tuple[str, ...]:
        return ("mass",)

    @property
    def head_shared(self) -> bool:
        return self.head_scope == "layer"

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every)

    @property
    def restore(self) -> str:
        return "none"

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        where = (budget, geometry, prompt_len, max_new, self.every, partial(self.layer_bytes, geometry))
        if not pays(*where):
            raise infeasible(budget, f"every token at {self.bits} bits", prompt_len, needed_fraction(*where))
        return replace(self, published=budget.native)

    def layer_bytes(self, geometry: Geometry, seq_len: int) -> int:
        """Bytes of one layer after an event at `seq_len` tokens, all of them coded."""
        token = 2 * self.tiers[LOW].key.slot_bytes(geometry.head_dim, geometry.itemsize)
        entries = (seq_len + self.every) * (1 if self.head_shared else geometry.num_kv_heads)
        held = seq_len * token + self.every * geometry.slot_bytes
        return geometry.num_kv_heads * held + entries * self.entry_bytes

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return torch.ones((len(prompt_len_B), stop - start), dtype=torch.bool, device=prompt_len_B.device)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        mass_BHU = mass_BHGPU.sum((2, 3))
        view.columns["mass"] += mass_BHU.mean(1, keepdim=True) if self.head_shared else mass_BHU

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        if not self.published and bool(settled(view, allowance).all()):
            return [keep_all(view)]
        stored = view.alive_BHU & (view.pos_BHU < view.seq_len_B[:, None, None])
        exact, lower_BHU = stored & (view.tier_BHU == FULL), torch.where(stored, LOW, view.tier_BHU)
        if self.published:
            share = Fraction(str(self.important))
            num_BH = (stored.sum(-1) * share.numerator // share.denominator).minimum(exact.sum(-1))
        else:
            gain = allowance.unit_bytes[FULL] - allowance.unit_bytes[LOW]
            tier_BHU = lift_best(view, allowance, view.columns["mass"], lower_BHU, exact, FULL, gain)
            num_BH = (exact & (tier_BHU == FULL)).sum(-1)
        half = Fraction(str(self.recent))
        newest = rank(view.pos_BHU.float(), exact) < (num_BH * half.numerator // half.denominator)[..., None]
        score_BHU = view.columns["mass"].masked_fill(newest, torch.inf)
        chosen = rank(score_BHU, exact) < num_BH[..., None]
        tier_BHU = torch.where(chosen, FULL, lower_BHU)
        return [Placement(tier_BHU) if self.published else unless_fits(view, allowance, tier_BHU)]
