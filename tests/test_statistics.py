"""Intervals against hand-computed distributions, scipy's bootstrap, and simulated coverage."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from qevict_bench.statistics import Interval, detectable_difference, macro_interval, paired_interval


def test_percentiles_of_the_exact_bootstrap_distribution() -> None:
    values = [0.0, 0.0, 100.0]
    means = sorted(np.mean(pick) for pick in product(values, repeat=3))  # 27 equally likely resamples
    interval = macro_interval([values])
    # 8/27 of the resamples have mean 0, 1/27 = 3.7 % has mean 100: both ends of a 95 % interval are attained.
    assert (means[0], means[-1]) == (0.0, 100.0)
    assert interval == Interval(pytest.approx(100 / 3), 0.0, 100.0)


def test_agrees_with_scipy_on_a_large_sample() -> None:
    values = np.random.default_rng(3).normal(5, 20, size=200)
    ours = macro_interval([values.tolist()], seed=1)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=2).confidence_interval
    assert ours.low == pytest.approx(theirs.low, abs=0.15)
    assert ours.high == pytest.approx(theirs.high, abs=0.15)


def test_covers_the_true_macro_mean_about_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(400):
        strata = [rng.binomial(1, p, size=40).astype(float).tolist() for p in (0.3, 0.6, 0.8)]
        interval = macro_interval(strata, seed=trial, resamples=500)
        hits += interval.low <= (0.3 + 0.6 + 0.8) / 3 <= interval.high
    assert 0.91 <= hits / 400 <= 0.98


def test_macro_weighs_subsets_equally_and_resamples_within_them() -> None:
    constant, short = [10.0] * 100, [0.0, 4.0]
    interval = macro_interval([constant, short])
    # The constant subset never varies; the other's mean is 0, 2 or 4 with probability 1/4, 1/2, 1/4.
    assert interval == Interval(pytest.approx(6.0), 5.0, 7.0)


def test_pairing_removes_what_examples_share() -> None:
    hard_to_easy = np.linspace(0, 100, 50)
    interval = paired_interval((hard_to_easy - 3).tolist(), hard_to_easy.tolist())
    assert interval == Interval(pytest.approx(-3.0), pytest.approx(-3.0), pytest.approx(-3.0))


def test_same_seed_same_interval() -> None:
    values = [[1.0, 5.0, 9.0, 2.0]]
    assert macro_interval(values, seed=7) == macro_interval(values, seed=7)
    assert macro_interval(values, seed=7) != macro_interval([[1.0, 5.0, 9.5, 2.0]], seed=7)


def test_detectable_difference_matches_the_hand_formula() -> None:
    # Two subsets of 4 with variances 4/3 * 100^2 / 4 = 10000/3 each.
    values = [[0.0, 0.0, 100.0, 100.0]] * 2
    expected = 1.959964 * np.sqrt(2 * (10000 / 3) / 4) / 2
    assert detectable_difference(values, scale=0.0) == pytest.approx(expected, rel=1e-6)


def test_detectable_difference_of_identical_scores_is_not_zero() -> None:
    # 95 % bound on a rate never seen in 20 draws: 1 - 0.05^(1/20) = 13.9 %.
    assert detectable_difference([[0.0] * 20], scale=100) == pytest.approx(13.91, abs=0.01)


@pytest.mark.parametrize("strata", [[], [[]], [[1.0], []]])
def test_nothing_to_average_is_an_error(strata: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one example"):
        macro_interval(strata)


def test_unequal_lengths_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="2 values cannot be paired with 1"):
        paired_interval([1.0, 2.0], [1.0])
