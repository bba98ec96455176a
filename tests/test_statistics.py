"""Intervals and tests against hand calculation, scipy's bootstrap, and how often they err on simulated tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from qevict_bench.statistics import (
    ALPHA,
    Interval,
    bootstrap,
    bootstraps,
    detectable_difference,
    exact_p,
    holm,
    macro,
    macro_interval,
    paired_interval,
    spearman,
    tally,
)


def test_percentiles_of_the_exact_bootstrap_distribution() -> None:
    values = [0.0, 0.0, 100.0]
    means = sorted(np.mean(pick) for pick in product(values, repeat=2))  # 9 equally likely resamples of 2 out of 3
    interval = macro_interval([values])
    # 4/9 of the resamples have mean 0, 1/9 has mean 100: both ends of a 95 % interval are attained.
    assert (means[0], means[-1]) == (0.0, 100.0)
    assert interval == Interval(pytest.approx(100 / 3), 0.0, 100.0)


def test_agrees_with_scipy_on_a_large_sample() -> None:
    values = np.random.default_rng(3).normal(5, 20, size=200)
    ours = macro_interval([values.tolist()], seed=1)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=2).confidence_interval
    assert ours.low == pytest.approx(theirs.low, abs=0.2)
    assert ours.high == pytest.approx(theirs.high, abs=0.2)


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
    # The constant subset never varies; a resample of the other is one of its two examples.
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


# What simulated tables show. `differences` of two methods that are equally good, in points.
TABLES = 1_000
SEED = 20_260_805


def called_different(tables: Iterable[tuple[list[list[float]], list[list[str]]]]) -> float:
    """Share of the tables whose macro difference has p <= 0.05; 2,000 resamples instead of 10,000 save time."""
    calls = [
        macro(bootstraps(strata, groups, seed=number, resamples=2_000)).p_value() <= ALPHA
        for number, (strata, groups) in enumerate(tables)
    ]
    return sum(calls) / len(calls)


def equal_methods(subsets: int, size: int, discordant: float, seed: int) -> Iterator[list[list[float]]]:
    """Binary scores: on a share `discordant` of the examples one of the two is right, either as likely."""
    rng = np.random.default_rng(seed)
    chances = [discordant / 2, 1 - discordant, discordant / 2]
    for _ in range(TABLES):
        yield rng.choice([-100.0, 0.0, 100.0], p=chances, size=(subsets, size)).tolist()


@pytest.mark.parametrize(
    ("subsets", "size", "discordant"),
    [(1, 50, 0.2), (1, 50, 0.4), (1, 200, 0.2), (13, 4, 0.2), (13, 4, 0.4), (8, 7, 0.2), (13, 25, 0.2)],
)
def test_equal_methods_are_called_different_5_percent_of_the_time(subsets: int, size: int, discordant: float) -> None:
    print(f"seed {SEED}, {subsets} subsets of {size}, {discordant} discordant")
    share = called_different((strata, []) for strata in equal_methods(subsets, size, discordant, SEED))
    print(f"called different: {share:.3f}")
    assert 0.03 <= share <= 0.07


def test_equal_methods_with_fractional_scores() -> None:
    rng = np.random.default_rng(SEED)
    made = rng.integers(0, 5, size=(2, TABLES, 13, 4)) * 25.0
    share = called_different((strata, []) for strata in (made[0] - made[1]).tolist())
    print(f"seed {SEED}, called different: {share:.3f}")
    assert 0.03 <= share <= 0.07


def test_one_example_per_subset_is_not_taken_for_certainty() -> None:
    share = called_different((strata, []) for strata in equal_methods(13, 1, 0.5, SEED))
    print(f"seed {SEED}, called different: {share:.3f}")
    assert share <= 0.07


def shared_contexts(clusters: int, seed: int) -> Iterator[tuple[list[list[float]], list[list[str]]]]:
    """Five questions per context; in each context one of two equal methods is favoured in 4 of 5 discordant ones."""
    rng = np.random.default_rng(seed)
    groups = [[f"context {cluster}" for cluster in range(clusters) for _ in range(5)]]
    for _ in range(TABLES):
        favoured = rng.choice([-1, 1], size=(clusters, 1))
        agrees = rng.choice([1, -1], p=[0.8, 0.2], size=(clusters, 5))
        values = 100.0 * favoured * agrees * (rng.random((clusters, 5)) < 0.4)
        yield [values.ravel().tolist()], groups


@pytest.mark.parametrize("clusters", [10, 40])
def test_shared_contexts_need_clusters(clusters: int) -> None:
    tables = list(shared_contexts(clusters, SEED))
    clustered = called_different(tables)
    unclustered = called_different((strata, []) for strata, _ in tables)
    exact = sum(exact_p(strata[0], groups[0]) <= ALPHA for strata, groups in tables) / TABLES
    print(f"seed {SEED}: clustered {clustered:.3f}, unclustered {unclustered:.3f}, exact clustered {exact:.3f}")
    assert 0.03 <= clustered <= 0.07 < unclustered
    assert exact <= 0.05


def test_exact_test_and_holm_err_in_at_most_5_percent_of_the_families() -> None:
    single = family = 0
    for strata in equal_methods(13, 50, 0.3, SEED):
        p_values = [exact_p(values) for values in strata]
        single += p_values[0] <= ALPHA
        family += min(holm(p_values)) <= ALPHA
    print(f"seed {SEED}: McNemar {single / TABLES:.3f}, family of 13 after Holm {family / TABLES:.3f}")
    assert single / TABLES <= 0.05
    assert family / TABLES <= 0.05


def test_ten_points_at_200_examples_are_found() -> None:
    rng = np.random.default_rng(SEED)  # 20 % discordant: 15 % for the better one, 5 % for the other
    tables = rng.choice([-100.0, 0.0, 100.0], p=[0.05, 0.8, 0.15], size=(TABLES, 1, 200)).tolist()
    found = called_different((strata, []) for strata in tables)
    exact = sum(exact_p(strata[0]) <= ALPHA for strata in tables) / TABLES
    print(f"seed {SEED}: bootstrap {found:.3f}, McNemar {exact:.3f}")
    assert min(found, exact) >= 0.8


# Single functions against hand calculation and independent code.


def naive_bootstrap(values: list[float], groups: list[str], seed: int, resamples: int) -> list[float]:
    """One resample at a time: draw all clusters but one, pool their examples, take the mean."""
    names = list(dict.fromkeys(groups))
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(resamples):
        picks = [names[i] for i in rng.integers(len(names), size=len(names) - 1)]
        means.append(float(np.mean([v for name in picks for v, g in zip(values, groups, strict=True) if g == name])))
    return means


def test_clusters_are_resampled_whole() -> None:
    rng = np.random.default_rng(4)
    groups = [f"g{i}" for i in rng.integers(0, 12, size=60)]
    values = rng.normal(3, 10, size=60).tolist()
    ours, naive = bootstrap(values, groups, seed=1).mean_R, naive_bootstrap(values, groups, 2, 4_000)
    assert np.percentile(ours, [2.5, 25, 50, 75, 97.5]) == pytest.approx(
        np.percentile(naive, [2.5, 25, 50, 75, 97.5]), abs=0.25
    )


def test_a_group_of_one_changes_nothing() -> None:
    values = [1.0, -4.0, 9.0, 2.0, 0.0, 3.0]
    assert macro_interval([values], [["a", "b", "c", "d", "e", "f"]]) == macro_interval([values])
    assert macro_interval([values], [[""] * 6]) == macro_interval([values])


def test_the_bootstrap_knows_the_variance_of_a_small_sample() -> None:
    values = [0.0, 10.0, 20.0, 60.0]
    # Drawing n of n would give (n - 1) / n = 3/4 of s^2 / n.
    assert bootstrap(values, resamples=200_000).mean_R.var() == pytest.approx(np.var(values, ddof=1) / 4, rel=0.02)


@given(st.lists(st.integers(-4, 4), min_size=6, max_size=40), st.integers(0, 3), st.sampled_from([99, 999, 2_000]))
@settings(max_examples=100, deadline=None)
def test_p_is_5_percent_where_the_interval_ends_at_0(values: list[int], seed: int, resamples: int) -> None:
    part = bootstrap([25.0 * value for value in values], seed=seed, resamples=resamples)
    interval = part.interval()
    assert (part.p_value() <= ALPHA) == (interval.low > 0 or interval.high < 0)


def test_few_examples_that_agree_prove_nothing() -> None:
    assert bootstrap([-100.0] * 4).p_value() == 0.125 == exact_p([-100.0] * 4)
    assert bootstrap([0.0] * 50).p_value() == 1.0 == exact_p([0.0] * 50)


def test_macro_takes_no_subset_of_one_example_as_exact() -> None:
    other = [0.0, 10.0, 20.0, 30.0]
    lone = macro(bootstraps([[30.0], other]))
    assert (lone.value, lone.num_clusters) == (22.5, 5)
    assert lone.variance == pytest.approx(np.var(other, ddof=1) * (1 + 1 / 4) / 2**2)  # as if one more of the others
    assert np.std(lone.mean_R) == pytest.approx(lone.variance**0.5, rel=0.03)
    pooled = macro(bootstraps([[30.0], [0.0], [60.0]]))  # resampled as three examples: at least two equal picks
    assert set(pooled.mean_R.round(6)) == {0.0, 15.0, 30.0, 45.0, 60.0}


def test_mcnemar_by_hand() -> None:
    # 9 discordant, 1 against 8: 2 * (C(9,0) + C(9,1)) / 2^9
    differences = [100.0] * 8 + [-100.0] + [0.0] * 11
    assert exact_p(differences) == pytest.approx(2 * (1 + 9) / 2**9)
    assert tally(differences) == (8, 11, 1)
    assert str(tally(differences)) == "8/11/1"


def test_the_exact_test_counts_contexts_not_questions() -> None:
    differences = [100.0] * 10 + [-100.0] * 2
    assert exact_p(differences) < ALPHA
    assert exact_p(differences, ["a"] * 5 + ["b"] * 5 + ["c"] * 2) == 1.0  # 2 against 1


def test_sums_that_should_cancel_are_ties() -> None:
    assert tally([100 * (0.1 + 0.2) - 30, 100 / 3 * 3 - 100]) == (0, 2, 0)
    assert exact_p([100 * (0.1 + 0.2) - 30] * 9) == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1.0], [1.0]) is None


def test_detectable_difference_grows_with_shared_contexts() -> None:
    rng = np.random.default_rng(5)
    values = np.repeat(rng.choice([-100.0, 100.0], size=200), 5).tolist()
    groups = [f"{i // 5}" for i in range(1000)]
    alone, shared = detectable_difference([values], scale=100), detectable_difference([values], [groups], scale=100)
    assert shared == pytest.approx(np.sqrt(5) * alone, rel=0.01)


def test_groups_must_fit_the_values() -> None:
    with pytest.raises(ValueError, match="2 values cannot have 1 groups"):
        macro_interval([[1.0, 2.0]], [["a"]])


def test_too_few_resamples_are_an_error() -> None:
    with pytest.raises(ValueError, match="resamples=10 are too few"):
        macro_interval([[1.0, 2.0]], resamples=10)


def test_a_lone_example_of_a_subset_is_given_the_noise_of_the_others() -> None:
    """60 + 1 examples of equal methods: with the single one taken for exact, 4 of 10 tables call them different."""
    rng, called = np.random.default_rng(5), 0
    for trial in range(400):
        big, one = (rng.choice([-1.0, 0.0, 1.0], size=n, p=[0.2, 0.6, 0.2]).tolist() for n in (60, 1))
        interval = macro_interval([big, one], seed=trial, resamples=500)
        called += not interval.low <= 0 <= interval.high
    assert called / 400 <= 0.07


@pytest.mark.parametrize("num", [2, 5, 300])
def test_resamples_draw_one_cluster_less_than_there_are(num: int) -> None:
    """The counts that all runs share are those of drawing clusters one by one."""
    values = np.random.default_rng(1).normal(size=num)
    picks_RM = np.random.default_rng((3, 1)).integers(num, size=(50, num - 1), dtype=np.uint32)
    found = bootstrap(values.tolist(), seed=(3, 1), resamples=50)
    assert found.mean_R == pytest.approx(values[picks_RM].mean(axis=1), abs=1e-8)
