"""Quality over achieved bytes: interpolation between measured budgets, the Pareto front, and their intervals.

A curve is measured at a few budgets on the same examples. Between two of them it is a straight line; beyond the last
nothing is known, so nothing is said. Intervals: bootstrap over examples (over contexts, where examples share them), the
same resamples at every budget and for FullKV, m - 1 of a subset's m clusters as in statistics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from qevict_bench.statistics import Interval

# K measured budgets, M clusters, N examples, R resamples
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


def needed(memory_K: Sequence[float], value_K: Sequence[float], target: float) -> float:
    """The least memory at which the curve reaches `target`; infinite if it does not at any measured budget.

    `memory_K` rises. A curve that begins above the target gives its first memory: less was not measured.
    """
    for at, value in enumerate(value_K):
        if value >= target:
            if at == 0 or value == value_K[at - 1]:
                return memory_K[at]
            share = (target - value_K[at - 1]) / (value - value_K[at - 1])
            return memory_K[at - 1] + share * (memory_K[at] - memory_K[at - 1])
    return inf


def value_at(memory_K: Sequence[float], value_K: Sequence[float], memory: float) -> float:
    """The curve's value at `memory`: as measured if that is EQUAL, nan outside of what was measured."""
    near = min(range(len(memory_K)), key=lambda at: abs(memory_K[at] - memory))
    if abs(memory_K[near] - memory) <= EQUAL * memory:
        return value_K[near]
    if not memory_K[0] <= memory <= memory_K[-1]:
        return nan
    return float(np.interp(memory, memory_K, value_K))


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
        num_K = len(self.memory_K)
        value_RK, full_R = np.zeros((RESAMPLES, num_K)), np.zeros(RESAMPLES)
        for index, sample in enumerate(self.samples):
            sum_JM, size_M = _clusters(np.vstack([sample.value_KN, sample.full_N]), sample.groups)
            num_M = len(size_M)
            draws = max(1, num_M - 1)
            rng = np.random.default_rng((0, index))
            count_RM = rng.multinomial(draws, np.full(num_M, 1 / num_M), size=RESAMPLES).astype(np.float64)
            mean_RJ = (count_RM @ sum_JM.T) / (count_RM @ size_M)[:, None]
            value_RK += mean_RJ[:, :num_K] / len(self.samples)
            full_R += mean_RJ[:, num_K] / len(self.samples)
        return value_RK, full_R

    def needed_share(self, share: float) -> Interval:
        """Memory needed for `share` of FullKV's value, with its 95 % interval; infinite where it is not reached."""
        value_RK, full_R = self._resampled
        found_R = [needed(self.memory_K, row, share * top) for row, top in zip(value_RK.tolist(), full_R, strict=True)]
        return _interval(needed(self.memory_K, self.value_K, share * self.full), np.array(found_R))

    def needed_value(self, least: float) -> Interval:
        """Memory needed for a value of at least `least`."""
        found_R = [needed(self.memory_K, row, least) for row in self._resampled[0].tolist()]
        return _interval(needed(self.memory_K, self.value_K, least), np.array(found_R))

    def at(self, memory: float) -> Interval | None:
        """The value at `memory` with its 95 % interval; None outside of what was measured."""
        value = value_at(self.memory_K, self.value_K, memory)
        if np.isnan(value):
            return None
        found_R = [value_at(self.memory_K, row, memory) for row in self._resampled[0].tolist()]
        return _interval(value, np.array(found_R))


def _interval(value: float, found_R: Floats) -> Interval:
    """Percentiles that are values of resamples: some may be infinite."""
    ordered_R = np.sort(found_R)
    rank = max(1, int((len(ordered_R) + 1) * 0.025 + 1e-9))
    return Interval(value, float(ordered_R[rank - 1]), float(ordered_R[-rank]))


def _clusters(value_JN: Floats, groups: Sequence[str]) -> tuple[Floats, Floats]:
    """Sums of the values per cluster [J, M], and how many examples each has."""
    if not any(groups):
        return value_JN, np.ones(value_JN.shape[1])
    names = [group or index for index, group in enumerate(groups)]
    index_of = {name: position for position, name in enumerate(dict.fromkeys(names))}
    member_N = [index_of[name] for name in names]
    sum_JM = np.array([np.bincount(member_N, row, minlength=len(index_of)) for row in value_JN])
    return sum_JM, np.bincount(member_N).astype(np.float64)
