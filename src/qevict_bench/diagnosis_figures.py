"""The figures of a diagnosis: what figures.py draws, from the measured streams of each run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from qevict_bench import figures
from qevict_bench.diagnostics import NOT_YET, SHARES, History, kinds
from qevict_bench.figures import Band, Ledger, Missed, Point, Residency
from qevict_bench.measures import SPANS, WHO, Measured, Spread, busiest, mean_curve, spreads

_SPAN = 4
_HELD = {"Full + Quantized": "churn.held", "Full": "churn.full"}
_ORACLES = {"deployed": "deployed", "oracle, Eq. 1": "by_score", "oracle, next mass": "by_next_mass"}


class Observed(NamedTuple):
    """A run: its streams, and the residency of the first one."""

    streams: Sequence[Measured]
    residency: Residency


def residency_of(history: History) -> Residency:
    """Units over time in the layer and table head that `busiest` names."""
    layer, head = busiest(history)
    tier_KU, candidate_KU = history.tier_KLTU[:, layer, head], history.candidate_KU
    sink_U = history.layout.sink_U(history.num_units)
    found = []
    for tier_U, candidate_U in zip(tier_KU, candidate_KU, strict=True):
        kind_U = kinds(tier_U[None], candidate_U, sink_U)[0]
        found.append(torch.where(tier_U == NOT_YET, -1, kind_U).tolist())
    read_K = (history.seq_len_K - history.seq_len_K[0]).tolist()
    end_U = history.layout.end_U(history.num_units).tolist()
    position = [0, *end_U]
    intervals = [(kind, int(steps)) for kind, steps in zip(found, history.steps_K, strict=True) if steps]
    tokens = [*read_K[: len(intervals)], read_K[len(intervals) - 1] + intervals[-1][1]]
    by_unit = [list(column) for column in zip(*(kind for kind, _ in intervals), strict=True)]
    return Residency(position, tokens, by_unit, f"layer {layer}" + f", head {head}" * (history.tier_KLTU.shape[2] > 1))


def figures_of(runs: Mapping[str, Observed], worst: Observed | None, caption: str) -> dict[str, Figure]:
    """Figures by file name; without `ledger` where no run ever had one."""
    table = {name: spreads(run.streams) for name, run in runs.items()}
    found = {
        "fmm": figures.missed_mass(
            {name: _missed(run.streams) for name, run in runs.items()}, f"{caption} FMM: future missed mass."
        ),
        "mass": figures.mass_bars(_shares(table, "mass", SHARES), _shares(table, "mass_no_sinks", SHARES[1:]), caption),
        "residency": figures.residency(
            {name: run.residency for name, run in runs.items()},
            f"{caption} Tiers in the layer and table head where they change most often, of the first stream.",
        ),
        "routing": figures.routing(
            {label: _points(table, key) for label, key in _HELD.items()},
            {label: _points(table, f"lir.{who}.{_SPAN}") for label, who in _ORACLES.items()},
            {
                name: {span: Point(*row[f"lir.{WHO[0]}.{span}"][:3]) for span in SPANS}
                for name, row in table.items()
                if row[f"spells.{WHO[0]}.1"].value
            },
            f"{caption} Bars: 95 % intervals over streams.",
        ),
    }
    ledgers = {name: _ledger(run.streams) for name, run in runs.items() if _peak(run.streams) > 0}
    without = [name for name in runs if name not in ledgers]
    if ledgers or worst:
        none = f" No ledger: {', '.join(without)}." if without else ""
        oscillation = (
            " oscillation: worst case, full and quantized change places at every event (one stream)." if worst else ""
        )
        about = f"{caption} A point per stream in the last panel.{oscillation}{none}"
        found["ledger"] = figures.ledger(ledgers, _ledger(worst.streams) if worst else None, about)
    return found


def _missed(streams: Sequence[Measured]) -> Missed:
    return Missed(*(_band(streams, "fmm", column) for column in ("evicted", "evicted_or_quantized", "hindsight")))


def _band(streams: Sequence[Measured], curve: str, column: str, over: str = "") -> Band:
    def of(each: Measured) -> tuple[Sequence[int], Sequence[float]]:
        values = each.curves[curve].columns[column]
        if over:
            whole = each.curves[curve].columns[over]
            values = tuple(part / all_of_it for part, all_of_it in zip(values, whole, strict=True))
        return each.curves[curve].at, values

    points, found = mean_curve(streams, of)
    value, low, high = ([getattr(each, name) for each in found] for name in ("value", "low", "high"))
    return Band(points, value, low, high)


def _ledger(streams: Sequence[Measured]) -> Ledger:
    points = [(each.scalars["churn.full"], each.scalars["ledger.share"]) for each in streams]
    return Ledger(_band(streams, "bytes", "ledger"), _band(streams, "bytes", "ledger", "total"), points)


def _peak(streams: Sequence[Measured]) -> float:
    return max(each.scalars["ledger.peak"] for each in streams)


def _shares(
    table: Mapping[str, Mapping[str, Spread]], name: str, kinds_of: Sequence[str]
) -> dict[str, dict[str, float]]:
    return {run: {kind: row[f"{name}.{kind}"].value for kind in kinds_of} for run, row in table.items()}


def _points(table: Mapping[str, Mapping[str, Spread]], key: str) -> dict[str, Point]:
    return {run: Point(*row[key][:3]) for run, row in table.items()}
