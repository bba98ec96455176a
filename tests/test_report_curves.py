"""Interpolation between budgets by hand-worked numbers, the Pareto front, and what bootstraps of them say."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest

from qevict_bench.report.curves import Curve, Point, Sample, front, needed, weights_at


@pytest.mark.parametrize(
    ("values", "target", "found"),
    [
        ((20, 60, 100), 80, 0.3),  # half of the way from 0.2 to 0.4
        ((20, 60, 100), 60, 0.2),
        ((20, 60, 100), 30, 0.125),  # a quarter of the way from 0.1 to 0.2
        ((90, 60, 100), 80, 0.1),  # the first measured budget does already
        ((20, 60, 70), 80, inf),
        ((20, 90, 50), 55, 0.15),  # the least, although the curve falls again
        ((50, 50, 50), 50, 0.1),
    ],
)
def test_memory_needed_by_hand(values: tuple[float, ...], target: float, found: float) -> None:
    assert needed((0.1, 0.2, 0.4), np.array([values]), np.array([float(target)])) == pytest.approx([found])


@pytest.mark.parametrize(
    ("memory", "value"),
    [(0.2, 60), (0.3, 80), (0.15, 40), (0.0975, 20), (0.4115, 100), (0.203, 60)],
)
def test_value_at_a_memory_by_hand(memory: float, value: float) -> None:
    weight_K = weights_at((0.1, 0.2, 0.4), memory)
    assert weight_K is not None
    assert weight_K @ (20, 60, 100) == pytest.approx(value)


@pytest.mark.parametrize("memory", [0.05, 0.45])
def test_nothing_is_said_beyond_what_was_measured(memory: float) -> None:
    assert weights_at((0.1, 0.2, 0.4), memory) is None
    assert weights_at((0.2,), memory) is None


def test_the_front_is_what_no_other_beats() -> None:
    rng = np.random.default_rng(0)
    for lower in (False, True):
        for _ in range(50):
            points = [Point(*map(float, rng.integers(0, 6, 2))) for _ in range(8)]
            kept = [points[index] for index in front(points, lower_is_better=lower)]
            sign = -1 if lower else 1
            for one, other in product(points, kept):
                better = one.memory <= other.memory and sign * one.value >= sign * other.value
                assert not better or one == other
            for point in points:
                assert any(k.memory <= point.memory and sign * k.value >= sign * point.value for k in kept)
            assert [p.memory for p in kept] == sorted({p.memory for p in kept})


def curve(values: list[list[float]], full: list[float], groups: list[str] | None = None) -> Curve:
    names = groups or [""] * len(full)
    return Curve((0.1, 0.2, 0.4)[: len(values)], (Sample(np.array(values), np.array(full), names),))


def test_certain_values_have_no_interval() -> None:
    """Every example scores 20, 60, 100 and FullKV 100: 95 % is three eighths short of 0.4, whatever is drawn."""
    sure = curve([[20.0] * 5, [60.0] * 5, [100.0] * 5], [100.0] * 5)
    found = sure.needed_share(0.95)
    assert (found.value, found.low, found.high) == pytest.approx((0.375, 0.375, 0.375))
    at = sure.at(0.3)
    assert at is not None
    assert (at.value, at.low, at.high) == pytest.approx((80, 80, 80))
    assert sure.at(0.6) is None


def test_an_end_may_be_out_of_reach() -> None:
    """About half of the resamples do not reach the target."""
    values = [0.0, 100.0] * 10
    found = curve([[0.0] * 20, values], [53.0] * 20).needed_share(0.95)
    assert found.value == inf
    assert found.low < 0.2
    assert found.high == inf


def test_a_method_that_equals_full_kv_reaches_it_in_every_resample() -> None:
    """FullKV and method are resampled together."""
    values = [0.0, 100.0] * 20
    found = curve([[0.0] * 40, values], values).needed_share(0.95)
    assert (found.value, found.low, found.high) == pytest.approx((0.195, 0.195, 0.195))


def test_the_interval_is_that_of_the_mean() -> None:
    values = [0.0, 100.0] * 50
    found = curve([values], [100.0] * 100).at(0.1)
    assert found is not None
    assert found.low == pytest.approx(50 - 1.96 * 50 / 99**0.5, abs=1.5)
    assert found.high == pytest.approx(50 + 1.96 * 50 / 99**0.5, abs=1.5)


def test_examples_of_a_group_are_drawn_together() -> None:
    values = [0.0] * 10 + [100.0] * 10
    alone = curve([values], [100.0] * 20).at(0.1)
    together = curve([values], [100.0] * 20, [f"g{i // 5}" for i in range(20)]).at(0.1)
    assert alone is not None
    assert together is not None
    assert together.high - together.low > 1.5 * (alone.high - alone.low)


def test_subsets_weigh_the_same() -> None:
    few = Sample(np.array([[100.0] * 2]), np.array([100.0] * 2), ["", ""])
    many = Sample(np.array([[0.0] * 20]), np.array([100.0] * 20), [""] * 20)
    assert Curve((0.1,), (few, many)).value_K == [50.0]


def test_a_lower_bound_on_a_falling_value() -> None:
    """KL 1.0, 0.2, 0.0 turned around: at most 0.1 is half of the way from 0.2 to 0.4."""
    lowered = curve([[-1.0] * 4, [-0.2] * 4, [0.0] * 4], [0.0] * 4)
    assert lowered.needed_value(-0.1).value == pytest.approx(0.3)


def test_subsets_of_one_example_are_not_certain() -> None:
    lone = [Sample(np.array([[100.0 * (i % 2)]]), np.array([100.0]), [""]) for i in range(6)]
    found = Curve((0.1,), tuple(lone)).at(0.1)
    assert found is not None
    assert found.low < 50 < found.high
