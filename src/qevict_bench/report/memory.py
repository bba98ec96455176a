"""Tables and series of quality over achieved bytes, from the runs of one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from qevict_bench.comparison import points
from qevict_bench.report.curves import EQUAL, Curve, Point, Sample
from qevict_bench.report.entries import Entry
from qevict_bench.report.groups import Group
from qevict_bench.report.scores import gold_memory
from qevict_bench.rows import Row
from qevict_bench.tables import Cell, Missing, Number, Table

SHARE = 0.95
"""Of FullKV's score: the bytes that this takes are looked for."""
KL = 0.1
"""Nats per token: the bytes that keep the KL on the gold text at most this are looked for."""
_HOW = (
    "Between measured budgets the curve is a straight line, beyond them nothing is said. 95 % intervals: bootstrap "
    "over examples, the same resamples at every budget and for FullKV."
)


@dataclass(frozen=True)
class Series:
    """A method's runs by rising memory, on the examples that all of them share."""

    method: str
    published: bool
    curve: Curve

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(map(Point, self.curve.memory_K, self.curve.value_K))

    @property
    def num_examples(self) -> int:
        return sum(len(sample.full_N) for sample in self.curve.samples)


@dataclass(frozen=True)
class Quality:
    """What a curve shows: `value` of a row (None without one), in `unit`; `memory` of a run."""

    name: str
    unit: str
    decimals: int
    lower_is_better: bool
    value: Callable[[Row], float | None]
    memory: Callable[[Entry], float | None]


SCORE = Quality("score", "points", 1, False, lambda r: points(r) if r.metrics else None, lambda e: e.memory)
GOLD_KL = Quality("KL", "nats", 3, True, lambda r: (r.fidelity or {}).get("gold.kl"), gold_memory)


def series_of(entries: Sequence[Entry], quality: Quality) -> list[Series]:
    """One per method and variant (enforced, published), on the examples that its runs and FullKV share."""
    found: dict[tuple[str, bool], list[Entry]] = {}
    for entry in entries:
        has = any(quality.value(row) is not None for row in entry.good)
        if not entry.is_reference and has and quality.memory(entry) is not None:
            found.setdefault((entry.method, entry.published), []).append(entry)
    made = []
    for (method, published), members in found.items():
        members.sort(key=lambda entry: quality.memory(entry) or 0.0)
        samples = _samples(members, quality)
        if samples:
            memory_K = tuple(quality.memory(entry) or 0.0 for entry in members)
            made.append(Series(method, published, Curve(memory_K, tuple(samples))))
    return made


def full_value(entries: Sequence[Entry]) -> float | None:
    """FullKV's macro score; None if there are several, of several conditions."""
    found = [entry.score for entry in entries if entry.is_reference]
    return found[0] if len(found) == 1 else None


def needed_table(group: Group, name: str, every: Sequence[Series], quality: Quality) -> Table | None:
    """Bytes for SHARE of FullKV's score, or for a KL of at most KL; None without a curve of two points."""
    rows: list[tuple[Cell, ...]] = []
    for series in every:
        low, high = series.points[0].memory, series.points[-1].memory
        if series.published or len(series.points) < 2:
            continue
        if quality.lower_is_better:
            lowered = tuple(Sample(-each.value_KN, -each.full_N, each.groups) for each in series.curve.samples)
            found = Curve(series.curve.memory_K, lowered).needed_value(-KL)
        else:
            found = series.curve.needed_share(SHARE)
        least = "≤ measured" if found.value <= low else ""
        if not quality.lower_is_better and series.curve.full <= 0:
            continue  # of nothing
        cell: Cell = Missing(f"not reached up to {high:.3f}")
        if np.isfinite(found.value):
            cell = Number.of(found, 3)
        measured = f"{low:.3f} to {high:.3f}"
        rows.append((series.method, cell, least, measured, str(len(series.points)), str(series.num_examples)))
    if not rows:
        return None
    rows.sort(key=lambda row: row[1].value if isinstance(row[1], Number) else 9.0)
    what = f"a KL of at most {KL} nats" if quality.lower_is_better else f"{100 * SHARE:.0f} % of FullKV's score"
    head = ("method", "bytes needed / FullKV's", "remark", "measured from, to", "budgets", "n")
    notes = (
        f"The least share of FullKV's bytes at which the curve over achieved bytes reaches {what}. {_HOW} "
        "≤ measured: the smallest measured budget already does. An open end of an interval reads not reached.",
    )
    return Table(name, group.title, head, tuple(rows), group.setting, notes, f"bytes needed for {what}")


def equal_bytes_table(group: Group, name: str, every: Sequence[Series], quality: Quality) -> Table | None:
    """Every method at the same achieved bytes: those of the budgets, and those of methods as published."""
    curves = [series for series in every if not series.published]
    fixed = [series for series in every if series.published]
    grid = _grid(curves, fixed)
    if not grid:
        return None
    rows: list[tuple[Cell, ...]] = []
    for series in [*curves, *fixed]:
        line: list[Cell] = [series.method + " (published)" * series.published]
        for memory in grid:
            found = series.curve.at(memory)
            line.append(Missing("not measured") if found is None else Number.of(found, quality.decimals))
        if any(isinstance(cell, Number) for cell in line):
            rows.append(tuple(line))
    sign = 1.0 if quality.lower_is_better else -1.0
    rows.sort(key=lambda row: [sign * c.value if isinstance(c, Number) else 1e9 for c in row[:0:-1]])
    head = ("method", *(f"{memory:.3f}" for memory in grid))
    what = f"{quality.name} ({quality.unit}) at equal bytes"
    notes = (
        f"Columns: share of FullKV's bytes, achieved within {100 * EQUAL:.0f} %. {_HOW} "
        "Intervals are of the method's own value, not of a difference.",
    )
    return Table(name, group.title, head, tuple(rows), group.setting, notes, what)


def _samples(members: Sequence[Entry], quality: Quality) -> list[Sample]:
    """Values by subset on the examples that all members have, and FullKV where it has one."""
    values = [{row.example_id: x for row in e.good if (x := quality.value(row)) is not None} for e in members]
    full: dict[str, float] = {}
    if not quality.lower_is_better:
        reference = members[0].reference
        rows = reference.good if reference else []
        full = {row.example_id: x for row in rows if (x := quality.value(row)) is not None}
        values.append(full)
    strata: dict[str, list[Row]] = {}
    for row in members[0].good:
        if all(row.example_id in known for known in values):
            strata.setdefault(row.subset, []).append(row)
    made = []
    for rows in strata.values():
        names = [row.example_id for row in rows]
        value_KN = np.array([[known[name] for name in names] for known in values[: len(members)]])
        full_N = np.array([full.get(name, 0.0) for name in names])
        made.append(Sample(value_KN, full_N, [row.group for row in rows]))
    return made


def _grid(curves: Sequence[Series], fixed: Sequence[Series]) -> list[float]:
    """Bytes worth a column: where two or more curves were measured, and every published point inside some curve."""
    at = sorted(point.memory for series in curves for point in series.points)
    grid: list[float] = []
    while at:
        near = [memory for memory in at if memory <= at[0] * (1 + EQUAL)]
        if len(near) > 1:
            grid.append(fmean(near))
        at = at[len(near) :]
    for series in fixed:
        for point in series.points:
            inside = any(s.curve.memory_K[0] <= point.memory <= s.curve.memory_K[-1] for s in curves)
            if inside and all(abs(point.memory - known) > EQUAL * known for known in grid):
                grid.append(point.memory)
    return sorted(grid)
