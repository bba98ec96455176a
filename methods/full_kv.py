"""FullKV: every token at full precision; the reference every method is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qevict_bench.policy import Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.selection import keep_all


@dataclass(frozen=True)
class FullKV(KVPolicy):
    """Keeps everything."""

    @property
    def cadence(self) -> Cadence:
        return Cadence()

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        return [keep_all(view) for view in views]
