"""The worst case for the ledger: scores that send every unit from full precision to the low-bit tier and back, always.

Shapes: B rows, H table heads (1 if all KV heads share the units), U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qevict_bench.codecs import Tier
from qevict_bench.policy import EVICTED, FULL, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.selection import Split, fit_split

LOW = 1


@dataclass(frozen=True)
class Oscillating(KVPolicy):
    """Tiers, units and protected tokens of another method, under scores that look at no attention.

    At every event after the first, what is quantized scores 1, what is full 0, and what has aged since the last event
    -1; at the first all score 0, and ties go to the earlier unit. With q = 2 M_q / (M_f + 2 M_q) the bytes pay for as
    many full units that keep their codes as for quantized ones (Eq. 3 of arXiv 2608.05326, M = bytes of a unit), so
    from the third event on the two halves change places, and every full unit has its codes in the ledger.
    """

    base: KVPolicy
    """Fitted, with a low-bit tier."""
    sink: int
    recent: int

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self.base.tiers[: LOW + 1]

    @property
    def unit(self) -> int:
        return self.base.unit

    @property
    def offset(self) -> int:
        return self.base.offset

    @property
    def head_shared(self) -> bool:
        return self.base.head_shared

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.base.cadence.decode_every)

    @property
    def restore(self) -> str:
        return self.base.restore

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        placements = []
        for view in views:
            old_BHU = view.end_BHU <= (view.seq_len_B - self.recent)[:, None, None]
            known_BHU = view.end_BHU <= (view.event_len_B - self.recent)[:, None, None]
            candidate_BHU = view.alive_BHU & (view.pos_BHU >= self.sink) & old_BHU
            score_BHU = torch.where(view.tier_BHU == LOW, 1.0, 0.0)
            if bool((view.event_len_B > 0).any()):
                score_BHU = torch.where(known_BHU, score_BHU, -1.0)
            full, low = allowance.unit_bytes[FULL], allowance.unit_bytes[LOW]
            q = round(2 * low / (full + 2 * low), 6)
            split = Split(score_BHU, candidate_BHU, candidate_BHU, view.alive_BHU & ~candidate_BHU, q, fill=False)
            placements.append(Placement(fit_split(split, allowance, FULL, LOW, EVICTED)))
        return placements
