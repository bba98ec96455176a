"""Attention mass to scores: published vectors, one-number-at-a-time pooling, and what must not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict_bench.scoring import last_rows, pool, reduce_group


def pooled(vote: list[float], kernel: int, kind: str) -> list[float]:
    return pool(torch.tensor([[vote]]), kernel, kind)[0, 0].tolist()


@pytest.mark.parametrize(
    ("vote", "kind", "expected"),
    [
        ([0, 0, 1, 0, 0, 0, 0], "max", [0, 1, 1, 1, 0, 0, 0]),
        ([0, 0, 1, 0, 0, 0, 0], "avg", [0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0]),
        ([1, 0, 0, 0], "avg", [1 / 3, 1 / 3, 0, 0]),  # zeros outside count
        ([1, 0, 0, 0], "max", [1, 1, 0, 0]),
    ],
)
def test_pool_vectors(vote: list[float], kind: str, expected: list[float]) -> None:
    assert pooled([float(v) for v in vote], 3, kind) == pytest.approx(expected)


@given(
    vote=st.lists(st.floats(0, 8, width=32), min_size=1, max_size=40),
    kernel=st.sampled_from((1, 3, 5, 7, 13)),
    kind=st.sampled_from(("max", "avg")),
)
@settings(max_examples=60, deadline=None)
def test_pool_is_a_window_around_each_unit(vote: list[float], kernel: int, kind: str) -> None:
    half = kernel // 2
    near = [vote[max(0, j - half) : j + half + 1] for j in range(len(vote))]
    expected = [max(v) if kind == "max" else sum(v) / kernel for v in near]
    assert pooled(vote, kernel, kind) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_group_is_reduced_before_pooling() -> None:
    """Max pooling and the group mean do not commute; average pooling does."""
    heads = torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    mass_BHGPU = heads[None, None, :, None]
    assert pool(reduce_group(mass_BHGPU, "mean"), 3, "max").flatten().tolist() == [0.5, 0.5, 0.5]
    assert pool(heads[None], 3, "max").mean(1).flatten().tolist() == [1, 1, 0.5]
    torch.testing.assert_close(
        pool(reduce_group(mass_BHGPU, "mean"), 3, "avg"), pool(heads[None], 3, "avg").mean(1, keepdim=True)
    )


def test_reduce_group_sums_rows_first() -> None:
    mass_BHGPU = torch.tensor([[[[[3.0], [0.0]], [[2.0], [2.0]]]]])  # G = 2, P = 2, U = 1
    assert reduce_group(mass_BHGPU, "max").item() == 4  # not 3 + 2
    assert reduce_group(mass_BHGPU, "mean").item() == 3.5
    same = mass_BHGPU[:, :, :1].expand(-1, -1, 4, -1, -1)
    assert torch.equal(reduce_group(same, "mean"), reduce_group(same, "max"))


@pytest.mark.parametrize("window", [1, 5, 32, 100])
@pytest.mark.parametrize("chunk", [1, 7, 16, 1024])
def test_last_rows_of_every_prompt_once(window: int, chunk: int) -> None:
    lens = torch.tensor([63, 40])
    seen: list[set[int]] = [set(), set()]
    for start in range(0, 63, chunk):
        mask_BQ = last_rows(start, min(start + chunk, 63), lens, window)
        if mask_BQ is None:
            continue
        for row, rows in enumerate(seen):
            fresh = {start + int(i) for i in mask_BQ[row].nonzero()}
            assert not fresh & rows
            rows |= fresh
    assert seen == [set(range(max(0, n - window), n)) for n in (63, 40)]
