"""Figures of a diagnosis: drawing only, from numbers that are given.

Made for one column of a page: 3.35 inches wide, type of 6 to 7 points, fonts embedded in the PDF. Colours are those of
Okabe and Ito (Color Universal Design, 2008), which people with any colour vision tell apart; lines differ in dashes and
points in markers as well. The caption of a figure says what it was made from, and stands below it in small type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil, log2
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MultipleLocator

WIDTH = 3.35  # inches
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
KINDS = {
    "sink": "#4D4D4D",
    "full": "#0072B2",
    "quantized": "#E69F00",
    "recent": "#56B4E9",
    "evicted": "#E3E3E3",
}
_WORST = {"color": "#000000", "linestyle": "-.", "marker": "*"}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 6.5,
    "axes.titlesize": 7,
    "axes.labelsize": 6.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 6,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "lines.linewidth": 1.1,
    "lines.markersize": 3.5,
    "figure.dpi": 100,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,
}


class Band(NamedTuple):
    """A curve with the ends of its intervals, one number per point."""

    at: Sequence[float]
    value: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


class Point(NamedTuple):
    """A number with the ends of its interval."""

    value: float
    low: float
    high: float


class Missed(NamedTuple):
    """FMM curves of a run, as shares: as it is, with quantized units counted as lost too, and of hindsight eviction."""

    evicted: Band
    lost: Band
    hindsight: Band


class Residency(NamedTuple):
    """What each unit is over time. `position` and `tokens` are the edges of units and intervals, one more than there
    are; `kind[u][k]` is an index into KINDS, or -1 for a unit that is not there yet."""

    position: Sequence[float]
    tokens: Sequence[float]
    kind: Sequence[Sequence[int]]
    title: str


class Ledger(NamedTuple):
    """Bytes and share of the ledger over time, and (churn, mean share) of each stream."""

    bytes: Band
    share: Band
    streams: Sequence[tuple[float, float]]


def missed_mass(runs: Mapping[str, Missed], caption: str) -> Figure:
    """FMM (future missed mass) over decoded tokens, one panel per run, with bands."""
    figure, axes = _panels(len(runs), 1.15, caption)
    styles: dict[str, tuple[str, Any]] = {
        "evicted": (SERIES[0], "-"),
        "lost": (SERIES[1], "--"),
        "hindsight": (SERIES[2], ":"),
    }
    with matplotlib.rc_context(STYLE):
        for ax, (name, curves) in zip(axes, runs.items(), strict=True):
            for kind, (color, dash) in styles.items():
                if kind == "lost" and list(curves.lost.value) == list(curves.evicted.value):
                    continue  # nothing is quantized
                _draw_band(ax, getattr(curves, kind), 100, color=color, linestyle=dash, label=kind)
            ax.set_title(name)
            _tokens(ax, max(curves.evicted.at, default=0))
        top = max([100 * value for run in runs.values() for band in run for value in band.high], default=0.0)
        for ax in axes:
            ax.set_ylim(0, 1.06 * top or 1)
        handles = [Line2D([], [], color=color, linestyle=dash) for color, dash in styles.values()]
        labels = ["evicted", "evicted or quantized", "hindsight, equal bytes"]
        _legend(figure, handles, labels, 3)
        _label_outside(axes, "decoded tokens", "FMM, %")
    return figure


def mass_bars(
    runs: Mapping[str, Mapping[str, float]], no_sinks: Mapping[str, Mapping[str, float]], caption: str
) -> Figure:
    """Attention by kind, a bar per run; on the right as shares of what is not on sinks."""
    with matplotlib.rc_context(STYLE):
        figure = page(0.75 + 0.26 * len(runs), caption)
        axes = figure.subplots(1, 2, sharey=True)
        for ax, shares, title in zip(axes, (runs, no_sinks), ("all attention", "without sinks"), strict=True):
            for row, kinds in enumerate(shares.values()):
                left = 0.0
                for kind, color in KINDS.items():
                    wide = 100 * kinds.get(kind, 0.0)
                    ax.barh(row, wide, left=left, color=color, edgecolor="white", linewidth=0.5, height=0.8)
                    if wide >= 9:
                        ink = "white" if kind in ("sink", "full") else "black"
                        ax.text(left + wide / 2, row, f"{wide:.0f}", color=ink, ha="center", va="center", fontsize=5.5)
                    left += wide
            ax.set_xlim(0, 100)
            ax.set_xticks([0, 50, 100])
            ax.set_xlabel("FullKV's attention, %")
            ax.set_title(title)
            ax.set_yticks(range(len(shares)), list(shares))
            ax.tick_params(axis="y", length=0)
        axes[0].invert_yaxis()
        _legend(figure, [Patch(color=color) for color in KINDS.values()], list(KINDS), len(KINDS))
    return figure


def residency(runs: Mapping[str, Residency], caption: str) -> Figure:
    """Units by tier over time, one panel per run."""
    figure, axes = _panels(len(runs), 1.3, caption)
    colors = ListedColormap(["#FFFFFF", *KINDS.values()])
    norm = BoundaryNorm([number - 1.5 for number in range(len(KINDS) + 2)], colors.N)
    with matplotlib.rc_context(STYLE):
        for ax, (name, run) in zip(axes, runs.items(), strict=True):
            ax.pcolormesh(run.tokens, run.position, run.kind, cmap=colors, norm=norm, rasterized=True)
            ax.set_ylim(run.position[-1], run.position[0])
            ax.set_title(f"{name}: {run.title}")
            _tokens(ax, run.tokens[-1])
        patches = [Patch(facecolor=color, edgecolor="#888888", linewidth=0.4) for color in KINDS.values()]
        _legend(figure, patches, list(KINDS), len(KINDS))
        _label_outside(axes, "decoded tokens", "position")
    return figure


def routing(
    churn: Mapping[str, Mapping[str, Point]],
    lir: Mapping[str, Mapping[str, Point]],
    by_span: Mapping[str, Mapping[int, Point]],
    caption: str,
) -> Figure:
    """Churn and LIR by run (a series per key), and LIR of each run by the span of a spell."""
    with matplotlib.rc_context(STYLE):
        figure = page(4.3, caption)
        first, second, third = figure.subplots(3, 1)
        for ax, table, scale in ((first, churn, 1), (second, lir, 100)):
            runs = list(dict.fromkeys(run for series in table.values() for run in series))
            for number, (name, points) in enumerate(table.items()):
                at = [runs.index(run) + 0.16 * (number - (len(table) - 1) / 2) for run in points]
                _draw_points(ax, at, list(points.values()), scale, number, name, joined=False)
            ax.set_xticks(range(len(runs)), runs)
            ax.set_xlim(-0.5, len(runs) - 0.5)
        spans = sorted({span for points in by_span.values() for span in points})
        for number, (name, spells) in enumerate(by_span.items()):
            at = [spans.index(span) + 0.07 * (number - (len(by_span) - 1) / 2) for span in spells]
            _draw_points(third, at, list(spells.values()), 100, number, name, joined=True)
        third.set_xticks(range(len(spans)), [str(span) for span in spans])
        third.set_xlabel("shortest spell that counts, events")
        first.set_ylabel("selection churn")
        second.set_ylabel("LIR (spells of 4), %")
        third.set_ylabel("LIR deployed, %")
        for ax in (first, second, third):
            _from_zero(ax)
            _legend_beside(ax)
    return figure


def ledger(runs: Mapping[str, Ledger], worst: Ledger | None, caption: str) -> Figure:
    """Bytes and share of the ledger over decoded tokens, and its share against churn, a point per stream."""
    with matplotlib.rc_context(STYLE):
        figure = page(4.5, caption)
        size, share, against = figure.subplots(3, 1)
        series = [(name, run, style_of(number)) for number, (name, run) in enumerate(runs.items())]
        if worst is not None:
            series.append(("oscillation", worst, _WORST))
        for name, run, style in series:
            for ax in (size, share):
                _tokens(ax, max(run.bytes.at, default=0))
            line = {"color": style["color"], "linestyle": style["linestyle"], "label": name}
            _draw_band(size, run.bytes, 1 / 1024, **line)
            _draw_band(share, run.share, 100, **line)
            xs, ys = [x for x, _ in run.streams], [100 * y for _, y in run.streams]
            against.scatter(
                xs,
                ys,
                s=26 if run is worst else 11,
                color=style["color"],
                marker=style["marker"],
                linewidths=0,
                label=name,
            )
        for ax, label in ((size, "ledger, KiB"), (share, "ledger, % of bytes"), (against, "ledger, % of bytes")):
            ax.set_ylabel(label)
            _from_zero(ax)
            _legend_beside(ax)
        size.set_xlabel("decoded tokens")
        share.set_xlabel("decoded tokens")
        against.set_xlabel("churn of Full")
        against.set_xlim(left=-0.02)
    return figure


def heatmaps(
    panels: Mapping[str, Sequence[Sequence[float | None]]],
    lines: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str],
    caption: str,
) -> Figure:
    """A panel per family, value[line][column], light where it is low in its panel; None is hatched."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _panels(len(panels), 0.35 + 0.2 * len(lines), caption)
        for ax, (name, table) in zip(axes, panels.items(), strict=True):
            known = [value for line in table for value in line if value is not None]
            low, high = min(known, default=0.0), max(known, default=0.0)
            for y, line in enumerate(table):
                for x, value in enumerate(line):
                    deep = 0.0 if value is None or high == low else (value - low) / (high - low)
                    color = "#FFFFFF" if value is None else matplotlib.colormaps["cividis_r"](deep)
                    hatch = "////" if value is None else None
                    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="#BBBBBB", lw=0.4, hatch=hatch))
                    if value is not None:
                        ink = "white" if deep > 0.5 else "black"
                        ax.text(x + 0.5, y + 0.5, f"{value:.2f}", color=ink, ha="center", va="center", fontsize=5.5)
            ax.set(xlim=(0, len(columns)), ylim=(len(lines), 0), title=name)
            ax.set_xticks([x + 0.5 for x in range(len(columns))], columns)
            ax.set_yticks([y + 0.5 for y in range(len(lines))], lines)
            ax.tick_params(length=0)
        _label_outside(axes, *labels)
    return figure


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png and NAME.pdf, without the time in them; the paths."""
    paths = [folder / f"{name}.{kind}" for kind in ("png", "pdf")]
    with matplotlib.rc_context(STYLE):
        figure.savefig(paths[0], metadata={"Software": None})
        figure.savefig(paths[1], metadata={"CreationDate": None})
    return paths


def page(height: float, caption: str, width: float = WIDTH) -> Figure:
    """An empty figure with its caption below; `height` in inches, without the caption."""
    text = fill(drawable(caption), int(92 * width / WIDTH))
    lines = text.count("\n") + 1
    share = (0.1 * lines + 0.03) / (height + 0.1 * lines)
    layout = ConstrainedLayoutEngine(rect=(0, share, 1, 1 - share))
    figure = Figure(figsize=(width, height + 0.1 * lines), layout=layout)
    left = 0.01 * WIDTH / width
    figure.text(left, 0.005, text, fontsize=4.8, color="#555555", va="bottom", ha="left", linespacing=1.25)
    return figure


def drawable(text: str) -> str:
    """`text` with "?" for signs that the font lacks."""
    return "".join(sign if ord(sign) in _glyphs() else "?" for sign in text)


@cache
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(STYLE["font.family"])).get_charmap())


def _panels(num: int, height: float, caption: str) -> tuple[Figure, list[Axes]]:
    """Panels in two columns with common axes."""
    with matplotlib.rc_context(STYLE):
        columns = min(2, num)
        rows = ceil(num / columns)
        figure = page(0.55 + height * rows * (1 if columns == 2 else 1.4), caption)
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        axes = [ax for line in grid for ax in line]
        for ax in axes[num:]:
            ax.set_visible(False)
        for ax in axes:
            ax.tick_params(labelbottom=True)
        return figure, axes[:num]


def _label_outside(axes: Sequence[Axes], x: str, y: str) -> None:
    """Labels below the last row of two columns, and left of the first column."""
    for ax in axes[(len(axes) - 1) // 2 * 2 :]:
        ax.set_xlabel(x)
    for ax in axes[::2]:
        ax.set_ylabel(y)


def _legend_beside(ax: Axes) -> None:
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.03), borderpad=0)


def _from_zero(ax: Axes) -> None:
    """An axis that begins a little below 0, so that points there are seen whole."""
    top = max(ax.get_ylim()[1], 1e-6)
    ax.set_ylim(-0.05 * top, top)
    ax.axhline(0, color="#BBBBBB", linewidth=0.5, zorder=0)


def _tokens(ax: Axes, last: float) -> None:
    """Ticks of an axis of tokens: a power of two apart."""
    ax.xaxis.set_major_locator(MultipleLocator(2 ** max(0, ceil(log2(max(last, 1) / 4)))))


def _legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, columnspacing=1.0, handletextpad=0.5)


def style_of(number: int) -> dict[str, Any]:
    """Colour, marker and dash of the number-th of several."""
    dashes = ("-", "--", ":", (0, (5, 1, 1, 1)))
    kind = number % len(SERIES)
    return {"color": SERIES[kind], "marker": MARKERS[kind], "linestyle": dashes[number % len(dashes)]}


def _draw_band(ax: Axes, band: Band, scale: float, *, color: str, linestyle: Any, label: str) -> None:
    value, low, high = ([scale * x for x in part] for part in band[1:])
    ax.plot(band.at, value, color=color, linestyle=linestyle, label=label)
    ax.fill_between(band.at, low, high, color=color, alpha=0.18, linewidth=0)


def _draw_points(
    ax: Axes, at: Sequence[float], points: Sequence[Point], scale: float, number: int, name: str, joined: bool
) -> None:
    value, low, high = ([scale * x for x in part] for part in zip(*points, strict=True))
    reach = [[v - x for v, x in zip(value, low, strict=True)], [x - v for v, x in zip(value, high, strict=True)]]
    style = style_of(number)
    ax.errorbar(
        at,
        value,
        yerr=[[max(0.0, x) for x in side] for side in reach],
        color=style["color"],
        marker=style["marker"],
        linestyle=style["linestyle"] if joined else "none",
        elinewidth=0.8,
        capsize=1.5,
        label=name,
    )
