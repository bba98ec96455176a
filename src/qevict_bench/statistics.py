"""Paired comparisons: percentile bootstrap over examples, and how small a difference the examples can show.

A stratum holds one value per example of one subset: a score, or a difference of two scores on the same example. The
statistic is the mean over strata of their means (macro average); with one stratum it is the plain mean. Resampling
draws examples within strata, so every subset keeps its weight. Efron and Tibshirani, An Introduction to the Bootstrap
(1993), chapter 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with the ends of its confidence interval, in the unit of the values."""

    value: float
    low: float
    high: float


def macro_interval(
    strata: Sequence[Sequence[float]], *, seed: int = 0, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> Interval:
    """Percentile bootstrap of the macro average; the same input and seed give the same interval.

    Raises ValueError if there is no stratum, or an empty one.
    """
    values = _arrays(strata)
    rng = np.random.default_rng(seed)
    total = np.zeros(resamples)
    for value_N in values:
        picks_RN = rng.integers(len(value_N), size=(resamples, len(value_N)))
        total += value_N[picks_RN].mean(axis=1)
    tail = 50 * (1 - confidence)
    low, high = np.percentile(total / len(values), [tail, 100 - tail])
    return Interval(float(np.mean([value_N.mean() for value_N in values])), float(low), float(high))


def paired_interval(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Interval:
    """Interval of the mean of first - second, both in the order of the same examples."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot be paired with {len(second)}; give both for the same examples")
    return macro_interval([[a - b for a, b in zip(first, second, strict=True)]], seed=seed)


def detectable_difference(strata: Sequence[Sequence[float]], *, scale: float, confidence: float = CONFIDENCE) -> float:
    """How far the macro average of paired differences must lie from 0 to stand out from noise, in their unit.

    The normal half-width z * sqrt(sum(var / n)) / strata, but at least scale * (1 - (1 - confidence)^(1/n)) with n all
    examples: a difference of size `scale` (100 for scores in points) that none of n examples showed may still hit that
    share of examples (the exact form of the "rule of three"), however small the observed variance is.
    """
    values = _arrays(strata)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    variances = [value_N.var(ddof=1) / len(value_N) for value_N in values if len(value_N) > 1]
    half_width = z * float(np.sqrt(sum(variances))) / len(values)
    num_examples = sum(len(value_N) for value_N in values)
    return max(half_width, scale * float(1 - (1 - confidence) ** (1 / num_examples)))


def _arrays(strata: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    if not strata or not all(len(values) for values in strata):
        raise ValueError("an interval needs at least one example in every subset; leave empty subsets out")
    return [np.asarray(values, dtype=np.float64) for values in strata]
