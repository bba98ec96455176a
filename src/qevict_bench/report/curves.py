"""Quality over achieved bytes: interpolation between measured budgets, the Pareto front, and their intervals.

A curve is measured at a few budgets on the same examples. Between two of them it is a straight line; beyond the last
nothing is known, so nothing is said. Intervals: the bootstrap of statistics.py, the same resamples at every budget and
for FullKV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from qevict_bench.statistics import Interval, bootstraps, macro, macro_interval

# K measured budgets, N examples, R resamples
Floats = NDArray[np.float64]

RESAMPLES = 2000
EQUAL = 0.03
"""Bytes that differ by this share at most count as equal: what the engine calls matched."""


@dataclass(frozen=True)
class Point:
    """What one run achieved: mean share of FullKV's bytes, and a value."""

    memory: float
    value: float


@dataclass(frozen=True)
class Sample:
    """Values of one subset's examples: of each run of a curve [K, N], of FullKV [N]; `groups` as Row.group."""

    value_KN: Floats
    full_N: Floats
    groups: Sequence[str]


def front(points: Sequence[Point], *, lower_is_better: bool = False) -> list[int]:
    """Indices of the points that no other beats in both, by rising memory. Of equal ones the first."""
    sign = -1.0 if lower_is_better else 1.0
    kept: list[int] = []
    top = -inf
    for index in sorted(range(len(points)), key=lambda i: (points[i].memory, -sign * points[i].value)):
        if sign * points[index].value > top:
            top = sign * points[index].value
            kept.append(index)
    return kept


def needed(memory_K: Sequence[float], value_RK: Floats, target_R: Floats) -> Floats:
    """The least memory [R] at which each curve reaches its target; infinite if it does not at any measured budget.

    `memory_K` rises. A curve that begins above the target gives its first memory: less was not measured.
    """
    reached_RK = value_RK >= target_R[:, None]
    row_R, at_R = np.arange(len(value_RK)), reached_RK.argmax(axis=1)
    before_R = np.maximum(at_R - 1, 0)
    below_R, step_R = value_RK[row_R, before_R], value_RK[row_R, at_R] - value_RK[row_R, before_R]
    share_R = np.divide(target_R - below_R, step_R, out=np.zeros(len(row_R)), where=step_R != 0)
    from_R, to_R = np.array(memory_K)[before_R], np.array(memory_K)[at_R]
    return np.where(reached_RK.any(axis=1), from_R + share_R * (to_R - from_R), inf)


def weights_at(memory_K: Sequence[float], memory: float) -> Floats | None:
    """Shares [K] of the measured values in the curve's value at `memory`; None outside of what was measured.

    A measured memory that is EQUAL counts whole.
    """
    near = min(range(len(memory_K)), key=lambda at: abs(memory_K[at] - memory))
    whole_KK: Floats = np.eye(len(memory_K))
    if abs(memory_K[near] - memory) <= EQUAL * memory:
        return np.array(whole_KK[near])
    if not memory_K[0] <= memory <= memory_K[-1]:
        return None
    return np.array([np.interp(memory, memory_K, whole_K) for whole_K in whole_KK])


@dataclass(frozen=True)
class Curve:
    """A method's value over memory: `memory_K` rises, `samples` are its examples by subset. Values may be negative."""

    memory_K: tuple[float, ...]
    samples: tuple[Sample, ...]

    @cached_property
    def value_K(self) -> list[float]:
        """Macro means over subsets."""
        found: list[float] = np.mean([sample.value_KN.mean(axis=1) for sample in self.samples], axis=0).tolist()
        return found

    @property
    def full(self) -> float:
        """FullKV's macro mean."""
        return float(np.mean([sample.full_N.mean() for sample in self.samples]))

    @cached_property
    def _resampled(self) -> tuple[Floats, Floats]:
        """Macro means of every resample: of the curve [R, K], and of FullKV [R]."""
        value_KR = [self._bootstrap([s.value_KN[at] for s in self.samples]) for at in range(len(self.memory_K))]
        return np.array(value_KR).T, self._bootstrap([sample.full_N for sample in self.samples])

    def _bootstrap(self, strata: Sequence[Floats]) -> Floats:
        groups = [sample.groups for sample in self.samples]
        return macro(bootstraps([value_N.tolist() for value_N in strata], groups, resamples=RESAMPLES)).widened_R

    def needed_share(self, share: float) -> Interval:
        """Memory needed for `share` of FullKV's value, with its 95 % interval; infinite where it is not reached."""
        value_RK, full_R = self._resampled
        return self._needed(value_RK, share * self.full, share * full_R)

    def needed_value(self, least: float) -> Interval:
        """Memory needed for a value of at least `least`."""
        return self._needed(self._resampled[0], least, np.full(RESAMPLES, least))

    def _needed(self, value_RK: Floats, target: float, target_R: Floats) -> Interval:
        [value] = needed(self.memory_K, np.array([self.value_K]), np.array([target]))
        return _interval(float(value), needed(self.memory_K, value_RK, target_R))

    def at(self, memory: float) -> Interval | None:
        """The value at `memory` with its 95 % interval; None outside of what was measured."""
        weight_K = weights_at(self.memory_K, memory)
        if weight_K is None:
            return None
        strata = [(weight_K @ sample.value_KN).tolist() for sample in self.samples]
        return macro_interval(strata, [sample.groups for sample in self.samples], resamples=RESAMPLES)


def _interval(value: float, found_R: Floats) -> Interval:
    """Percentiles that are values of resamples: some may be infinite."""
    ordered_R = np.sort(found_R)
    rank = max(1, int((len(ordered_R) + 1) * 0.025 + 1e-9))
    return Interval(value, float(ordered_R[rank - 1]), float(ordered_R[-rank]))
