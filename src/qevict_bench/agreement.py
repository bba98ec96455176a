"""Do a method's scores rank units as FullKV's attention does? Increments of one interval, over quantized units.

A cosine of skewed non-negative numbers is high whatever they are, so a uniform and a shuffled score stand beside it.

Shapes: K events, L layers, T table heads, U units, N units of one layer, head and event.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor

from qevict_bench.diagnostics import Mean, best, mean_of


@dataclass(frozen=True)
class Agreement:
    """Cosine, Spearman's rank correlation, and how many of one's first `top` are among the other's, as a share."""

    cosine: Mean
    spearman: Mean
    overlap: Mean


@dataclass(frozen=True)
class ScoreAgreement:
    """`measured`, beside what a uniform and a shuffled score would reach against the same FullKV increments."""

    measured: Agreement
    uniform: Agreement
    shuffled: Agreement


def agreement(first_N: Tensor, second_N: Tensor, top: int) -> tuple[float, float, float]:
    """Cosine, Spearman and overlap of two lists of scores; nan where undefined.

    The cosine of zeros is, the correlation with a constant, any of fewer than two numbers, and an overlap of none. The
    overlap of a constant with anything is the expected one of a random choice.
    """
    num, top = len(first_N), min(top, len(first_N))
    if num < 2:
        return nan, nan, nan
    first_N, second_N = first_N.double(), second_N.double()
    norm = float(first_N.norm() * second_N.norm())
    constant = [bool((each == each[0]).all()) for each in (first_N, second_N)]
    cosine = float(first_N @ second_N) / norm if norm else nan
    spearman = nan if any(constant) else _correlation(_ranks(first_N), _ranks(second_N))
    overlap = nan
    if top:
        every, number = torch.ones(num, dtype=torch.bool), torch.tensor(top)
        same = (best(first_N, every, number) & best(second_N, every, number)).sum()
        overlap = top / num if any(constant) else float(same) / top
    return cosine, spearman, overlap


def score_agreement(
    measured_KLTU: Tensor, full_KLTU: Tensor, where_KLTU: Tensor, top_KLT: Tensor, seed: int
) -> ScoreAgreement:
    """Agreement of score increments with FullKV's, over the units in `where`, mean over events, layers and heads.

    `top` is K_f. Units whose increment is not known (nan) are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[tuple[float, float, float]]] = {"measured": [], "uniform": [], "shuffled": []}
    where_KLTU = where_KLTU & ~measured_KLTU.isnan()
    for place in where_KLTU.any(-1).nonzero().tolist():
        where_U, top = where_KLTU[tuple(place)], int(top_KLT[tuple(place)])
        measured_N, full_N = measured_KLTU[tuple(place)][where_U], full_KLTU[tuple(place)][where_U]
        shuffled_N = full_N[torch.randperm(len(full_N), generator=generator)]
        for name, score_N in (
            ("measured", measured_N),
            ("uniform", torch.ones_like(full_N)),
            ("shuffled", shuffled_N),
        ):
            found[name].append(agreement(score_N, full_N, top))
    return ScoreAgreement(**{name: _agreement(values) for name, values in found.items()})


def _agreement(values: list[tuple[float, float, float]]) -> Agreement:
    table = torch.tensor(values, dtype=torch.float64).view(-1, 3)
    known = ~table.isnan()
    return Agreement(*(mean_of(table[known[:, i], i], int((~known[:, i]).sum())) for i in range(3)))


def _ranks(x_N: Tensor) -> Tensor:
    """Ranks from 1, the mean rank where values are equal."""
    _, index_N, count = x_N.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    rank_N: Tensor = (last - (count - 1) / 2)[index_N]
    return rank_N


def _correlation(x_N: Tensor, y_N: Tensor) -> float:
    x_N, y_N = x_N - x_N.mean(), y_N - y_N.mean()
    return float((x_N @ y_N) / (x_N.norm() * y_N.norm()))
