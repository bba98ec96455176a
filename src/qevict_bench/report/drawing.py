"""Accuracy-memory curves: drawing only, in the style of figures.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qevict_bench import figures
from qevict_bench.report.curves import Point, front

WIDE = 6.9
"""Inches: two columns of a page."""
MOST = 8
"""So many methods have a colour of their own; the others are grey."""
_GREY = "#B8B8B8"


class Drawing(NamedTuple):
    """Points by rising memory. `published`: as its authors publish it, hollow and not joined to enforced ones."""

    method: str
    published: bool
    points: Sequence[Point]


class Axis(NamedTuple):
    label: str
    lower_is_better: bool
    full: float | None
    """FullKV's value."""


def over_memory(curves: Sequence[Drawing], axis: Axis, caption: str, width: float = WIDE) -> Figure:
    """Values over achieved bytes with the Pareto front of all points; the legend stands beside the data, or above it in
    a figure of less than WIDE inches."""
    named = _named(curves, axis)
    with matplotlib.rc_context(figures.STYLE):
        handles, labels = _legend(curves, axis, named, 40 if width >= WIDE else 24)
        height = 2.9 if width >= WIDE else 2.4 + 0.07 * len(labels)
        figure = figures.page(height, f"{caption} {_about(axis, curves, named)}", width=width)
        ax = figure.subplots()
        for curve in sorted(curves, key=lambda curve: curve.method in named):
            style = named.get(curve.method, {"color": _GREY, "marker": ".", "linestyle": "-", "zorder": 1})
            memory = [100 * point.memory for point in curve.points]
            value = [point.value for point in curve.points]
            hollow: dict[str, Any] = {"linestyle": "none", "markerfacecolor": "white"} if curve.published else {}
            ax.plot(memory, value, **{"zorder": 3, "clip_on": False, **style, **hollow})
        together = [point for curve in curves for point in curve.points]
        best = [together[index] for index in front(together, lower_is_better=axis.lower_is_better)]
        where = [100 * point.memory for point in best]
        ax.step(
            [*where, max(100 * p.memory for p in together)],
            [*(p.value for p in best), best[-1].value],
            where="post",
            color="#999999",
            linewidth=0.7,
            linestyle=(0, (1, 1)),
            zorder=2,
        )
        if axis.full is not None:
            ax.axhline(axis.full, color="black", linewidth=0.7, linestyle=(0, (6, 2)), zorder=0)
        ax.set_xlabel("bytes held, % of FullKV's (achieved, mean while decoding)")
        ax.set_ylabel(axis.label)
        ax.set_xlim(0, 1.03 * max(100 * point.memory for point in together))
        ax.set_ylim(*_limits([point.value for point in together], axis))
        ax.grid(axis="y", color="#EEEEEE", linewidth=0.5)
        ax.set_axisbelow(True)
        if width >= WIDE:
            ax.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.02), borderpad=0, labelspacing=0.45)
        else:
            figure.legend(handles, labels, loc="outside upper center", ncols=2, columnspacing=1.0)
    return figure


def svg(figure: Figure) -> str:
    """The figure as SVG, the same text every time."""
    stream = StringIO()
    with matplotlib.rc_context({**figures.STYLE, "svg.hashsalt": "qevict_bench"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()


def _named(curves: Sequence[Drawing], axis: Axis) -> dict[str, dict[str, Any]]:
    """Styles of the methods that are told apart: those on the front and the best, in the order of their best value."""
    sign = 1.0 if axis.lower_is_better else -1.0
    together = [(point, curve.method) for curve in curves for point in curve.points]
    on_front = {together[i][1] for i in front([p for p, _ in together], lower_is_better=axis.lower_is_better)}
    best: dict[str, float] = {}
    for point, method in together:
        best[method] = min(best.get(method, 1e9), sign * point.value)
    order = sorted(best, key=lambda method: (method not in on_front, best[method], method))[:MOST]
    return {method: figures.style_of(number) for number, method in enumerate(sorted(order, key=lambda m: best[m]))}


def _legend(
    curves: Sequence[Drawing], axis: Axis, named: Mapping[str, Mapping[str, Any]], most: int
) -> tuple[list[Line2D], list[str]]:
    """Names of more than `most` signs are cut."""
    handles = [Line2D([], [], **style) for style in named.values()]
    labels = [figures.drawable(name if len(name) <= most else f"{name[: most - 1]}…") for name in named]
    if others := {curve.method for curve in curves} - {*named}:
        handles.append(Line2D([], [], color=_GREY, marker="."))
        labels.append(f"{len(others)} other method{'s' * (len(others) > 1)}")
    if any(curve.published for curve in curves):
        handles.append(Line2D([], [], color="#555555", marker="o", markerfacecolor="white", linestyle="none"))
        labels.append("as published")
    handles.append(Line2D([], [], color="#999999", linewidth=0.7, linestyle=(0, (1, 1))))
    labels.append("Pareto front")
    if axis.full is not None:
        handles.append(Line2D([], [], color="black", linewidth=0.7, linestyle=(0, (6, 2))))
        labels.append("FullKV")
    return handles, labels


def _about(axis: Axis, curves: Sequence[Drawing], named: Mapping[str, object]) -> str:
    others = sorted({curve.method for curve in curves} - {*named})
    grey = f" Grey: {', '.join(others)}." if others else ""
    better = "lower" if axis.lower_is_better else "higher"
    return f"Points are runs, {better} is better; intervals stand in the tables.{grey}"


def _limits(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    top = max([*values, axis.full or 0.0])
    return -0.03 * top, 1.05 * top or 1.0
