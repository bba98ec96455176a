"""KIVI: tuning-free asymmetric quantization, keys per channel, values per token (Liu et al., arXiv 2402.02750).

Rule: after the prompt of T tokens the newest T mod R keys and the newest R values stay exact; older keys are coded per
channel over `group` consecutive tokens, older values per token over `group` channels, code = round((x - min) / s),
s = (max - min) / (2^b - 1). When R exact keys have gathered they are coded together; values follow one by one. Keys are
taken after RoPE; no sinks, no calibration; nothing is evicted, and codes never change.
Deviations: exact tokens are counted at events every `every` decoded tokens (the authors': every step; every=1 does the
same); several tokens may be appended at once; zero-range groups have code 0 (theirs 0/0); scale and zero are rounded to
the storage dtype before codes are computed. The authors give G = 32, R = 128 for LongBench, and 4 bits for models with
grouped queries. Under a budget `fit` keeps the bits and chooses the first G of `group`, 32, 64, 128 with a feasible R,
and the largest such R; a head dim that G does not divide has value groups of gcd(G, D) channels. `native` runs the
fields as given. With enforce=always an appended question may shorten the residual, in steps of G.
https://github.com/jy-yuan/KIVI
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.codecs import Exact, PerChannel, PerToken, Tier
from qevict_bench.fitting import infeasible, needed_fraction, pays
from qevict_bench.policy import FITTED, FULL_TIER, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.selection import keep_all, settled, unless_fits

KEYS, BOTH = 1, 2  # tiers: keys coded and values exact; both coded
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class KIVI(KVPolicy):
    """`group` (G), `residual` (R) and `every` in tokens; `bits` of keys and of values."""

    bits: int = 2
    group: int = 32
    residual: int = 128
    every: int = 8
    channels: int = field(default=32, metadata=FITTED)  # of a value group
    published: bool = field(default=False, metadata=FITTED)  # budget=native
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too

    def __post_init__(self) -> None:
        self.check({}, {"group": 1, "residual": 1, "every": 1})
        if self.residual % self.group:
            raise ValueError(f"method.residual={self.residual} must be a multiple of method.group={self.group}")
        assert self.tiers  # bad bits are said here, not in the middle of a run

    @property
    def tiers(self) -> tuple[Tier, ...]:
        key = PerChannel(self.bits, params="group", group=self.group, pre_rope=False, whole=True)
        value = PerToken(self.bits, channels=self.channels)
        return FULL_TIER, Tier(f"key{self.bits}", key, Exact()), Tier(f"int{self.bits}", key, value)

    @property
    def head_shared(self) -> bool:
        return True

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every)

    @property
    def restore(self) -> str:
        return "none"

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        enforced = budget.enforce == "always" and not budget.native
        asked = replace(self._grouped(self.group, self.residual, geometry), published=budget.native, enforced=enforced)
        if budget.native or budget.everything:
            return asked
        where = (budget, geometry, prompt_len, max_new, self.every)
        whole = prompt_len + max_new
        nearest = Fraction(1)
        for group in dict.fromkeys((self.group, *GROUPS)):
            saved = geometry.num_kv_heads * geometry.head_dim * geometry.itemsize
            allowed = (budget.allowed_bytes(geometry, whole, whole, 0) or 0) // geometry.num_layers
            most = max(1, min(whole, allowed // saved))  # exact values that fit, had nothing else to be paid
            for residual in range(-(-most // group) * group, 0, -group):
                tried = asked._grouped(group, residual, geometry)
                needs = [partial(tried.layer_bytes, geometry), partial(tried.least_bytes, geometry)]
                if all(pays(*where, need) for need in needs):
                    return tried
                if residual <= 4 * group:
                    nearest = min(nearest, max(needed_fraction(*where, need) for need in needs))
        raise infeasible(budget, f"every token at {self.bits} bits with a residual", prompt_len, nearest)

    def knobs(self) -> dict[str, Any]:
        return {"group": self.group, "residual": self.residual}

    def layer_bytes(self, geometry: Geometry, seq_len: int) -> int:
        """Bytes of one layer after an event at `seq_len` tokens."""
        exact_keys, exact_values = seq_len % self.residual, min(seq_len, self.residual)
        return self._bytes(geometry, seq_len, exact_keys, exact_values)

    def least_bytes(self, geometry: Geometry, seq_len: int) -> int:
        """The same without a residual, if the unfinished group is as long as can be: a question may move its end."""
        unfinished = min(seq_len, self.group - 1)
        return self._bytes(geometry, seq_len, unfinished, unfinished)

    def _bytes(self, geometry: Geometry, seq_len: int, exact_keys: int, exact_values: int) -> int:
        dim, size, tier = geometry.head_dim, geometry.itemsize, self.tiers[BOTH]
        keys, values = seq_len - exact_keys, seq_len - exact_values
        coded = keys * tier.key.slot_bytes(dim, size) - (-keys * tier.key.group_bytes(dim, size) // self.group)
        coded += values * tier.value.slot_bytes(dim, size)
        exact = (exact_keys + exact_values) * dim * size + self.every * geometry.slot_bytes
        return geometry.num_kv_heads * (coded + exact) + (seq_len + self.every) * self.entry_bytes

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        if not self.published and bool(settled(view, allowance).all()):
            return [keep_all(view)]
        residual_B = torch.full_like(view.seq_len_B, self.residual)
        while True:
            tier_BHU = self._aged(view, residual_B)
            over_B = (allowance.bytes_of([Placement(tier_BHU)]) > allowance.bytes_B) & (residual_B > 0)
            if not self.enforced or not bool(over_B.any()):
                break
            residual_B = torch.where(over_B, residual_B - self.group, residual_B)
        return [Placement(tier_BHU) if self.published else unless_fits(view, allowance, tier_BHU)]

    def _aged(self, view: LayerView, residual_B: Tensor) -> Tensor:
        """Tiers by age: whole multiples of the residual (of a group, if it is 0) have coded keys. None goes back."""
        step_B = torch.where(residual_B > 0, residual_B, self.group)
        keys_B, values_B = view.seq_len_B - view.seq_len_B % step_B, view.seq_len_B - residual_B
        keys = view.pos_BHU < keys_B[:, None, None]
        both = keys & (view.pos_BHU < values_B[:, None, None])
        wanted = torch.where(both, BOTH, torch.where(keys, KEYS, view.tier_BHU))
        return torch.where(view.alive_BHU, torch.maximum(wanted, view.tier_BHU), view.tier_BHU)

    def _grouped(self, group: int, residual: int, geometry: Geometry) -> Self:
        channels = math.gcd(group, geometry.head_dim)
        residual = residual if residual % group == 0 else -(-residual // group) * group
        return replace(self, group=group, residual=residual, channels=channels)
