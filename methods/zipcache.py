"""ZipCache: two low precisions, chosen by normalized attention (He et al., arXiv 2405.14256).

Rule: p_i = (sum over probe rows k of A[k, i]) / (T - i), summed over the query heads of a KV head; probes are the last
5 % of the prompt's T rows and 5 % random earlier ones. The most salient `ratio` of a KV head's tokens are coded at
`high` bits, the others at `low`, nothing is evicted. Keys (after RoPE) per channel, one scale and zero for all tokens
of a precision; values per token after every channel is divided by sqrt(max |v|). New tokens are exact until, every
`gap` decoded tokens, everything is decoded and coded again (values drift); the newest row's attention then ranks the
new ones, un-normalized, and older ones keep their class. As in the authors' code a value scale serves all KV heads: the
j-th tokens of every head's set share it, here in order of position (theirs: of saliency in the lower set). T - i counts
all rows though a tenth is used, which favours late tokens: their code, kept.
Deviations: minima are not pooled over a batch; random probes are drawn without replacement from the row's seeded
generator; channels that are zero stay zero (theirs 0 / 0); an appended question is probed with all its rows.
Under a budget the share at `high` bits is what the bytes pay for (least salient lowered first), and `fit` halves `gap`
until the published share fits beside the exact buffer, down to 8. Above all-`high` bytes are left over. Position, class
and saliency are 10 bytes per token and KV head (2 % of 16 bit at D = 128), which the paper does not count.
https://github.com/ThisisBillhe/ZipCache
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.codecs import PerChannel, PerToken, Tier
from qevict_bench.fitting import infeasible, lift_best, needed_fraction, pays
from qevict_bench.policy import FITTED, FULL, FULL_TIER, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import last_rows
from qevict_bench.selection import keep_all, rank, settled, unless_fits

HIGH, LOW = 1, 2
SHORTEST_GAP = 8


@dataclass(frozen=True)
class ZipCache(KVPolicy):
    """`ratio` and `probes` (of last and of random rows) are shares, `gap` decoded tokens, `high` and `low` bits."""

    ratio: float = 0.6
    high: int = 4
    low: int = 2
    probes: float = 0.05
    gap: int = 100
    every: int = field(default=100, metadata=FITTED)  # decoded tokens between events
    published: bool = field(default=False, metadata=FITTED)  # budget=native

    def __post_init__(self) -> None:
        self.check({}, {"gap": 1})
        if not 0 <= self.ratio <= 1 or not 0 < self.probes <= 0.5 or self.low >= self.high:
            shares = f"method.ratio={self.ratio} must lie in [0, 1], method.probes={self.probes} in (0, 0.5]"
            raise ValueError(f"{shares}, and method.low={self.low} below method.high={self.high}")
        assert self.tiers  # bad bits are said here, not in the middle of a run

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return FULL_TIER, *(
            Tier(f"int{bits}", PerChannel(bits, "segment", 0, pre_rope=False), PerToken(bits, balanced=True))
            for bits in (self.high, self.low)
        )

    @property
    def recompresses(self) -> bool:
        return True

    @property
    def columns(self) -> tuple[str, ...]:
        return ("saliency",)

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every, replay=True)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        gap = self.gap if budget.native else max(1, min(self.gap, max_new))
        while True:
            where = (budget, geometry, prompt_len, max_new, gap)
            if pays(*where, partial(self.layer_bytes, geometry, Fraction(str(self.ratio)), gap)):
                break
            if gap <= SHORTEST_GAP:
                least = partial(self.layer_bytes, geometry, Fraction(0), gap)
                if pays(*where, least):
                    break
                raise infeasible(budget, f"every token at {self.low} bits", prompt_len, needed_fraction(*where, least))
            gap = max(SHORTEST_GAP, gap // 2)
        return replace(self, every=gap, published=budget.native)

    def knobs(self) -> dict[str, Any]:
        return {"every": self.every}

    def layer_bytes(self, geometry: Geometry, ratio: Fraction, gap: int, seq_len: int) -> int:
        """Bytes of one layer after an event at `seq_len` tokens with `ratio` of them at `high` bits."""
        dim, size = geometry.head_dim, geometry.itemsize
        high = int(seq_len * ratio)
        heads = geometry.num_kv_heads
        held = heads * (gap * geometry.slot_bytes + (seq_len + gap) * self.entry_bytes)
        for tier, count in ((self.tiers[HIGH], high), (self.tiers[LOW], seq_len - high)):
            group = tier.key.group_bytes(dim, size) + tier.value.group_bytes(dim, size)
            held += heads * (count * tier.key.slot_bytes(dim, size) + (count > 0) * group)
            held += count * tier.value.slot_bytes(heads * dim, size)
        return held

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        rows = torch.arange(start, stop, device=prompt_len_B.device).expand(len(prompt_len_B), -1)
        if phase != "prefill":
            return torch.ones_like(rows, dtype=torch.bool) if phase == "append" else rows == stop - 1
        mask = torch.zeros_like(rows, dtype=torch.bool)
        for row, prompt_len in enumerate(prompt_len_B.tolist()):
            num = max(1, int(Fraction(str(self.probes)) * prompt_len))
            last = last_rows(start, stop, prompt_len_B[row : row + 1], num)
            same_draw = torch.Generator().set_state(rng(row).get_state())  # for every chunk of the prompt
            drawn = torch.randperm(prompt_len - num, generator=same_draw)[:num].to(rows.device)
            mask[row] = torch.isin(rows[row], drawn) | (last[0] if last is not None else False)
        return mask

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        mass_BHU, prompt_len = mass_BHGPU.sum((2, 3)), view.prompt_len_B[:, None, None]
        if bool((rows_BP < view.prompt_len_B[:, None]).all()):
            view.columns["saliency"] += mass_BHU / (prompt_len - view.pos_BHU).clamp(min=1)
        else:
            new = view.pos_BHU >= view.event_len_B[:, None, None]
            view.columns["saliency"] += torch.where(new, mass_BHU, 0.0)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        if not self.published and bool(settled(view, allowance).all()):
            return [keep_all(view)]
        stored = view.alive_BHU & (view.pos_BHU < view.seq_len_B[:, None, None])
        new, lower_BHU = stored & (view.tier_BHU == FULL), torch.where(stored, LOW, view.tier_BHU)
        if self.published:
            share = Fraction(str(self.ratio))
            num_BH = new.sum(-1) - new.sum(-1) * (share.denominator - share.numerator) // share.denominator
            best = rank(view.columns["saliency"], new) < num_BH[..., None]
            return [Placement(torch.where(best | (view.tier_BHU == HIGH), HIGH, lower_BHU))]
        eligible = new | (view.tier_BHU == HIGH)
        gain = allowance.unit_bytes[HIGH] - allowance.unit_bytes[LOW]
        tier_BHU = lift_best(view, allowance, view.columns["saliency"], lower_BHU, eligible, HIGH, gain)
        return [unless_fits(view, allowance, tier_BHU)]
