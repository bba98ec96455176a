"""What the rows of a session went through, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

from qevict_bench.budget import Usage


@dataclass
class RowTrace:
    """What one row went through. Fractions are bytes / FullKV bytes at the same step; bytes as in `Usage`."""

    after_prefill: float = 0.0
    after_prefill_bytes: int = 0
    after_prefill_allowed: int = 0
    prefill_peak_bytes: int = 0
    decode: list[tuple[int, int, int]] = field(default_factory=list)  # (bytes, FullKV bytes, allowed) per decode step
    whole_cache: float = 0.0
    usage: Usage = field(default_factory=Usage)
    workspace: int = 0  # largest after any step
    measured_at: int = 0
    events: int = 0
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0

    def next_turn(self) -> RowTrace:
        """The trace of a further turn: counts begin anew, what the cache holds goes on."""
        return RowTrace(prefill_peak_bytes=self.prefill_peak_bytes, usage=self.usage, measured_at=self.measured_at)
