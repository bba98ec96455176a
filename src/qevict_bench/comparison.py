"""Two runs on the same examples: pairs of rows, and what their scores say about each other.

Scores are points (0 - 100). Only examples that are `ok` in both runs are paired.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from qevict_bench.rows import Row
from qevict_bench.statistics import (
    ALPHA,
    Bootstrap,
    Interval,
    bootstraps,
    detectable_difference,
    exact_p,
    holm,
    macro,
    tally,
)

FLOOR = 20.0
"""A subset on which the reference scores less shows little about a method."""
CEILING = 99.0
"""A subset on which the reference scores this much can show losses only, and small ones hardly."""
MIN_DIFFERING = 6
"""So many examples must differ before a difference is believed: 5 that all agree still have an exact p of 6 %."""

Pair = tuple[Row, Row]
"""Rows of one example, of the run in question and of the one it is compared with (the reference)."""


@dataclass(frozen=True)
class Comparison:
    """A run against another (the reference) on `num_pairs` examples that form `num_clusters` independent ones.

    Mean scores, paired difference with its 95 % bootstrap interval and the bootstrap's `p`; examples on which the run
    did better, as well and worse, with the exact p of those counts (McNemar for scores of 0 and 1, else sign test).
    `noise` is how far the difference must lie from 0 to stand out (statistics.detectable_difference).
    """

    num_pairs: int
    num_clusters: int
    score: float
    reference: float
    diff: Interval
    p: float
    wins: int
    ties: int
    losses: int
    exact_p: float
    noise: float

    def stands_out(self, p: float) -> bool:
        """Whether the difference is more than noise, given its p (adjusted if it is one of a family)."""
        return p <= ALPHA and abs(self.diff.value) > self.noise and self.wins + self.losses >= MIN_DIFFERING

    @property
    def at_floor(self) -> bool:
        return self.reference < FLOOR

    @property
    def at_ceiling(self) -> bool:
        return self.reference >= CEILING


@dataclass(frozen=True)
class Comparisons:
    """By subset, over all subsets (macro), and over those where the reference is not at floor.

    `adjusted`: the exact p of each subset after Holm over the subsets. The exact one, because a bootstrap of four
    examples that agree knows no doubt.
    """

    subsets: Mapping[str, Comparison]
    adjusted: Mapping[str, float]
    overall: Comparison | None
    above_floor: Comparison | None


def pair(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, list[Pair]]:
    """Pairs of `ok` rows by subset, in the order of `rows`; subsets without a pair are left out."""
    by_id = {row.example_id: row for row in others if row.status == "ok"}
    pairs: dict[str, list[Pair]] = {}
    for row in rows:
        if row.status == "ok" and row.example_id in by_id:
            pairs.setdefault(row.subset, []).append((row, by_id[row.example_id]))
    return pairs


def compare(pairs: Mapping[str, Sequence[Pair]]) -> Comparisons:
    """Compare runs by their pairs; every subset weighs the same in a macro average."""
    differences = [_differences(members) for members in pairs.values()]
    parts = bootstraps(differences, [_groups(members) for members in pairs.values()])
    part_of = dict(zip(pairs, parts, strict=True))
    subsets = {name: _comparison([members], [part_of[name]]) for name, members in pairs.items()}
    adjusted = dict(zip(subsets, holm([found.exact_p for found in subsets.values()]), strict=True))
    above = [name for name, found in subsets.items() if not found.at_floor]
    return Comparisons(
        subsets=subsets,
        adjusted=adjusted,
        overall=_comparison(list(pairs.values()), parts) if pairs else None,
        above_floor=_comparison([pairs[name] for name in above], [part_of[name] for name in above]) if above else None,
    )


def points(row: Row) -> float:
    """Score of an `ok` row, 0 - 100."""
    assert row.score is not None, "only ok rows are compared"
    return 100 * row.score


def shown_p(p: float) -> str:
    """A p-value in five characters."""
    return f"{p:.3f}" if p >= 0.001 else "<.001"


def _comparison(strata: Sequence[Sequence[Pair]], parts: Sequence[Bootstrap]) -> Comparison:
    whole = macro(parts)
    differences = [_differences(members) for members in strata]
    groups = [_groups(members) for members in strata]
    together = [difference for values in differences for difference in values]
    wins, ties, losses = tally(together)
    return Comparison(
        num_pairs=len(together),
        num_clusters=whole.num_clusters,
        score=fmean(fmean(points(row) for row, _ in members) for members in strata),
        reference=fmean(fmean(points(reference) for _, reference in members) for members in strata),
        diff=whole.interval(),
        p=whole.p_value(),
        wins=wins,
        ties=ties,
        losses=losses,
        exact_p=exact_p(together, [name and f"{index} {name}" for index, names in enumerate(groups) for name in names]),
        noise=detectable_difference(differences, groups, scale=100),
    )


def _differences(members: Sequence[Pair]) -> list[float]:
    return [points(row) - points(reference) for row, reference in members]


def _groups(members: Sequence[Pair]) -> list[str]:
    return [row.group for row, _ in members]
