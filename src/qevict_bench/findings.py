"""The closing report of a diagnosis: plain text, at most 100 columns (names longer than 40 characters excepted)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import NamedTuple

from qevict_bench.comparison import MIN_DIFFERING
from qevict_bench.diagnostics import SHARES
from qevict_bench.measures import MOVES, SPANS, WHO, Spread
from qevict_bench.terminal import cut, fitted, wrapped

WIDTH = 100
_LABEL, _CELL = 32, 13
_AT_ONCE = (WIDTH - _LABEL) // _CELL
"""Runs side by side; more follow below."""
_NAMES = {"deployed": "deployed", "by_score": "oracle, Eq. 1", "by_next_mass": "oracle, next mass"}
_EVENTS = {"after_prefill": "after the prefill", "before_answer": "before the answer", "end": "at the end"}


class Line(NamedTuple):
    """A row of a table: what it says, which scalar, times how much, with how many decimals."""

    label: str
    key: str
    scale: float = 100.0
    decimals: int = 2


class Section(NamedTuple):
    title: str
    lines: tuple[Line, ...]


class PaperFigure(NamedTuple):
    """A figure of the paper, in the unit of the scalar it stands beside. `mark` "~": derived, not printed there."""

    run: str
    key: str
    text: str
    mark: str
    note: str


@dataclass(frozen=True)
class Findings:
    """What a diagnosis found. `runs` holds every scalar over streams by run, `errors` the mean output error per layer
    by run, `kl_change` the KL of a pair's second run minus the first's, `worst` the scalars of the oscillating workload
    on one stream (empty if there was none).
    """

    title: Sequence[str]
    num_streams: int
    num_looping: int
    runs: Mapping[str, Mapping[str, Spread]]
    errors: Mapping[str, Sequence[float]]
    kl_change: Mapping[tuple[str, str], Spread]
    worst: Mapping[str, float]
    paper: Sequence[PaperFigure]
    files: Sequence[Path]


def _lir_lines(suffix: str) -> tuple[Line, ...]:
    spans = {span: f"{span} event{'s' * (span > 1)}" for span in SPANS}
    lines = [Line(f"{spans[span]}, {_NAMES[who]}", f"lir.{who}.{span}{suffix}") for who in WHO for span in SPANS]
    return (
        *lines,
        *(Line(f"{spans[span]}, number deployed", f"spells.deployed.{span}{suffix}", 1, 0) for span in SPANS),
    )


def _agreement_lines(mode: str) -> tuple[Line, ...]:
    return tuple(
        Line(f"{metric}, {of}", f"agreement.{mode}.{of}.{metric}", 1, 3)
        for metric in ("cosine", "spearman", "overlap")
        for of in ("measured", "uniform", "shuffled")
    )


SECTIONS = (
    Section(
        "Future missed mass: FullKV's later attention on what is evicted at an event, in %",
        (
            Line("FMM, mean over events", "fmm.mean"),
            Line("FMM at the last event", "fmm.end"),
            Line("dashed: quantized lost, mean", "fmm.lost.mean"),
            Line("dashed: quantized lost, last", "fmm.lost.end"),
            Line("hindsight at equal bytes, mean", "fmm.hindsight.mean"),
            Line("regret, mean", "regret.mean"),
            Line("regret at the last event", "regret.end"),
        ),
    ),
    Section(
        "Missed: attention of each decoded step on what was evicted before it, in %",
        (Line("missed", "missed"), Line("per-step oracle, equal bytes", "missed.oracle")),
    ),
    Section("Attention by tier, in %", tuple(Line(name, f"mass.{name}") for name in SHARES)),
    Section(
        "Attention by tier as shares of what is not on sinks, in %",
        (
            *(Line(name, f"mass_no_sinks.{name}") for name in SHARES[1:]),
            Line("full and recent together", "mass_no_sinks.exact"),
        ),
    ),
    Section(
        "Selection churn between events, in %",
        (Line("Full + Quantized", "churn.held"), Line("Full", "churn.full")),
    ),
    Section("LIR: spells outside Full, of at least so many events, that end with entry to it, in %", _lir_lines("")),
    Section("LIR, strict: only of units that were in Full before, in %", _lir_lines(".strict")),
    Section(
        "Score increments against FullKV's over quantized units, deployed: the method's own scores",
        _agreement_lines("deployed"),
    ),
    Section(
        "Score increments against FullKV's over quantized units, codec: FullKV's queries on coded keys",
        _agreement_lines("codec"),
    ),
    Section(
        "Standing of the method's own scores at the last event",
        (
            Line("given by the prompt's queries, %", "score.prefill_share"),
            Line("tokens to promote, median unit", "score.tokens_to_promote", 1, 0),
        ),
    ),
    Section(
        "Beside FullKV's predictions and attention outputs, decoded steps",
        (
            Line("KL(FullKV || method), nats", "kl", 1, 3),
            Line("same most probable token, %", "same_token"),
            Line("output error, all layers, %", "output_error"),
        ),
    ),
    Section(
        "Units moved, summed over layers and table heads",
        tuple(
            Line(f"{name} {when}", f"{part}.{name}", 1, 1)
            for part, when in (("first", "after the prefill"), ("moves", "per later event"))
            for name in MOVES
            if (part, name) != ("first", "promotions")
        ),
    ),
    Section(
        "Ledger (codes of promoted units, without their parameters), beside the churn of Full",
        (
            Line("KiB, mean over events", "ledger.bytes", 1 / 1024),
            Line("% of bytes held, mean", "ledger.share"),
            Line("% of bytes held, highest", "ledger.peak"),
            Line("churn of Full, %", "churn.full"),
        ),
    ),
    Section(
        "Needle fate: tokens of the answer by tier, in %",
        tuple(
            Line(f"{tier} {text}", f"needle.{when}.{tier}", 100, 1)
            for when, text in _EVENTS.items()
            for tier in ("full", "quantized", "evicted")
        ),
    ),
)


def render(found: Findings) -> str:
    """The whole report."""
    parts = [list(found.title), *([*_section(section, found)] for section in SECTIONS)]
    parts += [list(_layers(found)), list(_pairs(found)), list(_worst(found)), list(_paper(found)), list(_notes(found))]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def read_paper(path: Path) -> list[PaperFigure]:
    """The figures in a csv with the columns run, key, value, mark, note. Raises ValueError if it cannot be read."""
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            lines = [line for line in stream if not line.startswith("#")]
            rows = list(csv.DictReader(lines))
        return [PaperFigure(row["run"], row["key"], row["value"], row["mark"], row["note"]) for row in rows]
    except (OSError, UnicodeError, KeyError) as error:
        raise ValueError(
            f"paper={path} cannot be read ({error}); give a csv such as results/paper/figure1.csv"
        ) from None


def _section(section: Section, found: Findings) -> Iterator[str]:
    none = Spread(nan, nan, nan, 0)
    lines = [line for line in section.lines if any(run.get(line.key, none).num for run in found.runs.values())]
    if not lines:
        return
    yield section.title
    names = list(found.runs)
    for begin in range(0, len(names), _AT_ONCE):
        some = {name: found.runs[name] for name in names[begin : begin + _AT_ONCE]}
        yield _row("", [cut(name, _CELL - 1) for name in some])
        yield _row("K_f / K_q", [f"{_short(run['k_full'])}/{_short(run['k_quantized'])}" for run in some.values()])
        held = [f"{_share(run['protected'])} {_share(run['fraction'])}" for run in some.values()]
        yield _row("protected, achieved", held)
        for line in lines:
            yield _row(line.label, [_cell(run.get(line.key, none), line, found) for run in some.values()])


def _row(label: str, cells: Sequence[str]) -> str:
    return (" " * 2 + fitted(label, _LABEL - 2) + "".join(f" {cell:>{_CELL - 1}}" for cell in cells)).rstrip()


def _cell(spread: Spread, line: Line, found: Findings) -> str:
    if not spread.num:
        return "n/a"
    text = f"{line.scale * spread.value:.{line.decimals}f}"
    if found.num_streams > 1:
        reach = line.scale * max(spread.high - spread.value, spread.value - spread.low)
        text += f" ±{reach:.{line.decimals}f}"
    return text if spread.num == found.num_streams else f"{text}*"


def _short(spread: Spread) -> str:
    return f"{spread.value:.3g}"


def _share(spread: Spread) -> str:
    return f"{spread.value:.3f}".removeprefix("0")


def _layers(found: Findings) -> Iterator[str]:
    yield "Output error per layer in %, from the first compressible layer on"
    for name, errors in found.errors.items():
        each = " ".join(f"{100 * error:.0f}" for error in errors)
        yield from wrapped(f"{name}: {each}", WIDTH, "  ", "    ")


def _pairs(found: Findings) -> Iterator[str]:
    known = {pair: spread for pair, spread in found.kl_change.items() if spread.num}
    if not known:
        return
    yield "KL of one run minus that of another on the same streams, nats; * excludes 0 (each pair by itself)"
    for (first, second), spread in known.items():
        shown = spread.num >= MIN_DIFFERING and (spread.low > 0 or spread.high < 0)
        name, star = f"{cut(second, 30)} - {cut(first, 30)}", "*" if shown else ""
        yield f"  {fitted(name, 64)} {spread.value:+.3f} [{spread.low:+.3f}, {spread.high:+.3f}]{star}"


def _worst(found: Findings) -> Iterator[str]:
    if not found.worst:
        return
    worst = found.worst
    yield "Worst case for the ledger: scores by which full and quantized units change places at every event"
    yield (
        f"  K_f / K_q {worst['k_full']:.3g}/{worst['k_quantized']:.3g}, "
        f"churn of Full {100 * worst['churn.full']:.1f} %, achieved {worst['fraction']:.3f}"
    )
    yield (
        f"  ledger {worst['ledger.bytes'] / 1024:.1f} KiB, {100 * worst['ledger.share']:.2f} % of bytes held (mean), "
        f"{100 * worst['ledger.peak']:.2f} % (highest); one stream"
    )


def _paper(found: Findings) -> Iterator[str]:
    rows = [row for row in found.paper if row.run in found.runs and found.runs[row.run].get(row.key)]
    if not rows:
        return
    yield "Different setting: the paper's figures (arXiv 2608.05326, Llama-3.1-8B) beside these; shares"
    yield f"  {'run':10}{'measure':36}{'paper':>8}  {'here, 95 % interval':26}"
    for row in rows:
        spread = found.runs[row.run][row.key]
        here = f"{spread.value:.4f} [{spread.low:.4f}, {spread.high:.4f}]" if spread.num else "n/a"
        yield f"  {fitted(row.run, 9)} {row.key:36}{row.mark + row.text:>8}  {here}"
    for note in dict.fromkeys(row.note for row in rows if row.note):
        yield from wrapped(note, WIDTH, "  ", "    ")
    yield "  Causes of differences: untested."


def _notes(found: Findings) -> Iterator[str]:
    for note in _remarks(found):
        yield from wrapped(note, WIDTH, "", "  ")


def _remarks(found: Findings) -> Iterator[str]:
    if found.num_looping:
        yield (
            f"{found.num_looping} of {found.num_streams} continuations loop: the second half repeats itself with a "
            "period of at most 8 tokens."
        )
    else:
        yield f"None of the {found.num_streams} continuations loops."
    if bound := [name for name, run in found.runs.items() if run["protected"].value > 0.5]:
        yield f"protected-bound (more than half of the bytes allowed are protected): {', '.join(bound)}"
    yield "K_f, K_q: full and quantized units per layer and table head, mean over events."
    yield (
        "protected: bytes of full-precision tokens that do not compete / bytes allowed, mean over events; achieved: "
        "bytes held / FullKV's, mean over steps."
    )
    yield (
        "oracle, Eq. 1: the K_f units of the highest score on FullKV without eviction; oracle, next mass: those with "
        "the most attention in the next interval."
    )
    if found.num_streams > 1:
        yield f"±: the farther end of the 95 % interval of the mean over {found.num_streams} streams (bootstrap)."
    if any(0 < each.num < found.num_streams for run in found.runs.values() for each in run.values()):
        yield "*: undefined in some streams, which are left out; summary.csv says how many are in."
    yield f"Written: {', '.join(map(str, found.files))}"
