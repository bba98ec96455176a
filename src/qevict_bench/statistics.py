"""Paired comparisons over clustered examples: bootstrap, exact tests, Holm, and how small a difference can be shown.

The values of a subset are one number per example: a score, or the difference of two scores on the same example.
Examples with the same group share a context and form a cluster; an example without a group ("") is one by itself.
Groups are looked at within a subset. The statistic is the mean over subsets of their means over examples (macro).

The bootstrap resamples whole clusters within subsets, so every subset keeps its weight: m - 1 of a subset's m clusters,
with replacement, which makes the variance of the resampled mean s^2/m as it should be (drawing m gives (m - 1)/m of it,
and intervals too short by a quarter of their variance at m = 4): Rao and Wu, Resampling inference with complex survey
data, JASA 83 (1988), with n* = n - 1. With clusters of several sizes a resample's mean is a ratio. Deviations are then
widened by Student's t over the normal quantile (10 clusters: 15 %, 50: 3 %). Intervals and p-values are percentiles of
the same resamples: Davison and Hinkley, Bootstrap Methods and their Application (1997), sections 4.4 and 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import floor, inf
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit
from scipy.stats import binomtest, spearmanr

# M clusters, R resamples
Floats = NDArray[np.float64]

RESAMPLES = 10_000
CONFIDENCE = 0.95
ALPHA = 0.05
_DECIMALS = 9  # sums of thirds that should cancel leave 1e-14
_CHUNK = 2**22  # draws held in memory at a time


@dataclass(frozen=True)
class Interval:
    """A mean with the ends of its confidence interval, in the unit of the values."""

    value: float
    low: float
    high: float


class Tally(NamedTuple):
    """On how many examples the first of two was better, as good, and worse."""

    wins: int
    ties: int
    losses: int

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclass(frozen=True)
class Bootstrap:
    """The observed mean of one subset (or of several, by `macro`) and the means of its resamples.

    `variance` of the mean, and its degrees of freedom (infinite where nothing varies).
    """

    value: float
    mean_R: Floats
    variance: float
    dof: float
    num_clusters: int

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        """Percentile interval. Raises ValueError if the resamples are too few to have such percentiles."""
        num = len(self.mean_R)
        rank = floor((num + 1) * (1 - confidence) / 2 + 1e-9)
        if rank < 1:
            raise ValueError(f"resamples={num} are too few for a {confidence:.0%} interval; take {RESAMPLES}")
        ends = np.partition(self.widened_R, [rank - 1, num - rank])
        return Interval(self.value, float(ends[rank - 1]), float(ends[num - rank]))

    def p_value(self) -> float:
        """Two-sided p of "the mean is 0": at most 1 - confidence exactly where `interval(confidence)` excludes 0.

        But never less than 2^(1 - num_clusters), which no test that flips signs can go below: fewer than 6 clusters
        settle nothing at 5 %, even where they agree so well that no resample varies.
        """
        num_below, num_above = int((self.widened_R <= 0).sum()), int((self.widened_R >= 0).sum())
        percentile = 2 * (1 + min(num_below, num_above)) / (len(self.mean_R) + 1)
        return float(min(1.0, max(percentile, 2.0 ** (1 - self.num_clusters))))

    @cached_property
    def widened_R(self) -> Floats:
        """Deviations times t / z, since the variance is estimated too; never beyond what a resample reached."""
        upper = 0.5 + CONFIDENCE / 2
        factor = float(stdtrit(self.dof, upper)) / NormalDist().inv_cdf(upper) if self.dof < inf else 1.0
        wide_R = np.clip(self.value + factor * (self.mean_R - self.value), self.mean_R.min(), self.mean_R.max())
        return wide_R.round(_DECIMALS)


def bootstrap(
    values: Sequence[float], groups: Sequence[str] = (), *, seed: int | Sequence[int] = 0, resamples: int = RESAMPLES
) -> Bootstrap:
    """Resample the clusters of one subset; `groups` is parallel to `values`, () = every example stands alone.

    The same input and seed give the same resamples. A single cluster cannot vary. Raises ValueError without values.
    """
    sum_M, size_M = _clusters(values, groups)
    num, value = len(sum_M), float(sum_M.sum() / size_M.sum())
    mean_R = np.full(resamples, value)
    if num > 1:
        count_RM = _counts(num, seed if isinstance(seed, int) else tuple(seed), resamples)
        step = max(1, _CHUNK // num)
        for start in range(0, resamples, step):
            part_RM = count_RM[start : start + step].astype(np.float64)
            mean_R[start : start + step] = (part_RM @ sum_M) / (part_RM @ size_M)
    variance = _variance_of_mean(sum_M, size_M)
    return Bootstrap(value, mean_R, variance, num - 1 if variance else inf, num)


@lru_cache(maxsize=32)  # tables compare many runs on the same examples
def _counts(num: int, seed: int | tuple[int, ...], resamples: int) -> NDArray[np.uint8]:
    """How often each resample draws each of `num` clusters [R, M]; `num` - 1 draws."""
    rng = np.random.default_rng(seed)
    count_RM = np.zeros((resamples, num), dtype=np.uint8)
    step = max(1, _CHUNK // num)
    for start in range(0, resamples, step):
        part_RM = count_RM[start : start + step]
        picks_RM = rng.integers(num, size=(len(part_RM), num - 1), dtype=np.uint32)
        picks_RM += (num * np.arange(len(part_RM), dtype=np.uint32))[:, None]
        part_RM[:] = np.bincount(picks_RM.ravel(), minlength=part_RM.size).reshape(part_RM.shape)
    return count_RM


def macro(parts: Sequence[Bootstrap], *, seed: int = 0) -> Bootstrap:
    """The mean over subsets. `parts` must come from different seeds and have equally many resamples.

    Subsets of one cluster say nothing about their own noise. Two or more of them are resampled as if they were examples
    of one subset (collapsed strata: cautious, since subsets also differ in their means); a lone one is given the noise
    that one cluster of the other subsets has.
    Degrees of freedom after Satterthwaite, Biometrics Bulletin 2 (1946).
    """
    if not parts:
        raise ValueError("a macro average needs at least one example; run some first")
    num = len(parts)
    weighted = [(1 / num, part) for part in parts if part.num_clusters > 1]
    lone = [part.value for part in parts if part.num_clusters == 1]
    if len(lone) == 1 and weighted:
        weighted.append((1 / num, _borrowed(lone[0], [part for _, part in weighted], seed=(seed, num))))
    elif lone:
        pooled = bootstrap(lone, seed=(seed, num), resamples=len(parts[0].mean_R))
        weighted.append((len(lone) / num, pooled))
    variances = [(weight**2 * part.variance, part.dof) for weight, part in weighted]
    variance = sum(share for share, _ in variances)
    spread = sum(share**2 / dof for share, dof in variances)
    return Bootstrap(
        value=float(sum(weight * part.value for weight, part in weighted)),
        mean_R=np.sum([weight * part.mean_R for weight, part in weighted], axis=0),
        variance=variance,
        dof=variance**2 / spread if spread else inf,
        num_clusters=sum(part.num_clusters for part in parts),
    )


def _borrowed(value: float, others: Sequence[Bootstrap], *, seed: Sequence[int]) -> Bootstrap:
    """A subset of one cluster, with the mean variance that single clusters have in the other subsets."""
    variance = float(np.mean([part.variance * part.num_clusters for part in others]))
    noise_R = np.random.default_rng(seed).normal(0.0, variance**0.5, len(others[0].mean_R))
    dof = min(part.dof for part in others)
    return Bootstrap(value, value + noise_R, variance, dof if variance else inf, 1)


def macro_interval(
    strata: Sequence[Sequence[float]],
    groups: Sequence[Sequence[str]] = (),
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Interval of the macro average of `strata`, the values of each subset, with `groups` of the same shape (or ())."""
    return macro(bootstraps(strata, groups, seed=seed, resamples=resamples), seed=seed).interval(confidence)


def bootstraps(
    strata: Sequence[Sequence[float]],
    groups: Sequence[Sequence[str]] = (),
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[Bootstrap]:
    """One independent bootstrap per subset, ready for `macro`."""
    labels = groups or [()] * len(strata)
    return [
        bootstrap(values, names, seed=(seed, index), resamples=resamples)
        for index, (values, names) in enumerate(zip(strata, labels, strict=True))
    ]


def paired_interval(
    first: Sequence[float], second: Sequence[float], groups: Sequence[str] = (), *, seed: int = 0
) -> Interval:
    """Interval of the mean of first - second, both in the order of the same examples."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot be paired with {len(second)}; give both for the same examples")
    return bootstrap([a - b for a, b in zip(first, second, strict=True)], groups, seed=(seed, 0)).interval()


def tally(differences: Sequence[float]) -> Tally:
    """Wins, ties and losses of the first over the second, of differences first - second per example."""
    signs = np.sign(np.round(np.asarray(differences, dtype=np.float64), _DECIMALS))
    return Tally(int((signs > 0).sum()), int((signs == 0).sum()), int((signs < 0).sum()))


def exact_p(differences: Sequence[float], groups: Sequence[str] = ()) -> float:
    """Two-sided exact p of "neither of the two is better": McNemar's test for scores of 0 and 1 without groups.

    For other scores it is the sign test on the examples that are no ties, whatever the size of their differences; with
    groups the signs are those of the clusters' summed differences. No difference at all gives 1.
    """
    sum_M, _ = _clusters(differences, groups)
    wins, _, losses = tally(sum_M.tolist())
    return _sign_p(wins, wins + losses) if wins + losses else 1.0


@lru_cache(maxsize=4096)
def _sign_p(wins: int, num: int) -> float:
    return float(binomtest(wins, num).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for being one family: rejecting those <= alpha errs at all with probability <= alpha.

    Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist. 6 (1979).
    """
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation of two lists of scores of the same examples; None (undefined) if one of them is constant."""
    if len(first) < 2 or min(len(set(first)), len(set(second))) < 2:
        return None
    return float(spearmanr(first, second).statistic)


def detectable_difference(
    strata: Sequence[Sequence[float]],
    groups: Sequence[Sequence[str]] = (),
    *,
    scale: float,
    confidence: float = CONFIDENCE,
) -> float:
    """How far the macro average of paired differences must lie from 0 to stand out from noise, in their unit.

    The normal half-width z * sqrt(sum of the subsets' variances of the mean) / subsets, the variances between clusters,
    but at least scale * (1 - (1 - confidence)^(1/m)) with m all clusters: a difference of size `scale` (100 for scores
    in points) that none of m clusters showed may still hit that share of them (the exact form of the "rule of three"),
    however small the observed variance is. A true difference of this size is found half of the time.
    """
    labels = groups or [()] * len(strata)
    pairs = [_clusters(values, names) for values, names in zip(strata, labels, strict=True)]
    if not pairs:
        raise ValueError("a detectable difference needs at least one example; run some first")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    half_width = z * float(np.sqrt(sum(_variance_of_mean(*pair) for pair in pairs))) / len(pairs)
    num_clusters = sum(len(sum_M) for sum_M, _ in pairs)
    return max(half_width, scale * float(1 - (1 - confidence) ** (1 / num_clusters)))


def _variance_of_mean(sum_M: Floats, size_M: Floats) -> float:
    """Of the ratio sum / size, linearized; s^2 / m where every cluster is one example."""
    num = len(sum_M)
    if num < 2:
        return 0.0
    residual_M = sum_M - size_M * sum_M.sum() / size_M.sum()
    return float(num / (num - 1) * (residual_M**2).sum() / size_M.sum() ** 2)


def _clusters(values: Sequence[float], groups: Sequence[str]) -> tuple[Floats, Floats]:
    """Sum of the values and number of examples of each cluster, in the order of their first examples."""
    if not len(values):
        raise ValueError("statistics need at least one example in every subset; leave empty subsets out")
    value_N = np.asarray(values, dtype=np.float64)
    if len(groups) not in (0, len(value_N)):
        raise ValueError(f"{len(value_N)} values cannot have {len(groups)} groups; give one group per value")
    if not any(groups):
        return value_N.round(_DECIMALS), np.ones(len(value_N))
    names = [group or index for index, group in enumerate(groups)]
    index_of = {name: position for position, name in enumerate(dict.fromkeys(names))}
    member_N = [index_of[name] for name in names]
    sum_M = np.bincount(member_N, value_N).astype(np.float64).round(_DECIMALS)
    return sum_M, np.bincount(member_N).astype(np.float64)
