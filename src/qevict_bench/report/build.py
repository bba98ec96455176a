"""From runs to a report: which tables and figures there are, and what of them stands where on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qevict_bench import figures
from qevict_bench.report import drawing, memory, scores, sheet
from qevict_bench.report.drawing import Axis, Drawing
from qevict_bench.report.entries import Entry, alarm_lines, entries_of
from qevict_bench.report.files import Made, folders_in, write
from qevict_bench.report.groups import Group, apart, commits_of, grouped
from qevict_bench.report.memory import GOLD_KL, SCORE, Quality, Series
from qevict_bench.report.page import Drawn, Fold, Section, page
from qevict_bench.report.paper import Figure as PaperFigure
from qevict_bench.report.paper import beside, read_figures
from qevict_bench.report.sheet import Declare
from qevict_bench.runs import Run
from qevict_bench.tables import Table

Families = Mapping[str, Mapping[str, Sequence[str]]]
"""Task -> family -> subsets."""


@dataclass(frozen=True)
class Options:
    """Where to write, what may differ within a table (groups.ALLOW), the paper's csv files, a diagnosis ("" = none)."""

    output_dir: Path
    allow: tuple[str, ...]
    paper: Path
    diagnose: str


def build_report(
    runs: Sequence[Run],
    problems: Sequence[str],
    rescored: Sequence[str],
    options: Options,
    families: Families,
    declare: Declare,
) -> str:
    """Write all files, remove those that only an older report has, and say in a line what was written.

    Raises ValueError for mistakes in `options`.
    """
    folders = folders_in(options.output_dir)
    given = read_figures(options.paper)
    diagnosis = _diagnosis(options.diagnose)
    kept = any(line.partition(" ")[2].startswith("keeps its scores") for line in rescored)
    but = " Notes names the runs that keep their scores." * kept
    remark = f"Scored again from the stored predictions, with today's scorers.{but}" if rescored else ""
    groups = [replace(group, remark=remark) for group in grouped(runs, options.allow)]
    names = _unique([group.name for group in groups])
    made, sections, every = Made(), [], []
    for name, group in zip(names, groups, strict=True):
        entries = entries_of(group)
        every += entries
        known = families.get(group.first.task, {})
        sections.append(_section(name, group, entries, made, known, given, declare))
    properties = sheet.properties_table("table1_properties", "Methods", every, declare)
    if properties.rows:
        made.tables.append(properties)
        sections.append(Section("methods", properties.title, properties.setting, [properties], {}, []))
    if diagnosis:
        about = f"Figures of scripts/diagnose.py in {options.diagnose}."
        sections.append(
            Section("diagnosis", "Diagnosis", (about,), diagnosis[:1], {}, [Fold("All figures", diagnosis[1:])])
        )
    notes = {
        "Could not be read": problems,
        "Tables held apart": apart([(group.title, group) for group in groups]),
        "Scored again": rescored,
    }
    text = page(
        "qevict-bench: what was measured", list(_about(runs, groups)), sections, {k: v for k, v in notes.items() if v}
    )
    return write(folders, made, text)


def _section(
    name: str,
    group: Group,
    entries: Sequence[Entry],
    made: Made,
    families: Mapping[str, Sequence[str]],
    given: Sequence[PaperFigure],
    declare: Declare,
) -> Section:
    scored = any(entry.run.scored for entry in entries)
    kl = memory.series_of(entries, GOLD_KL)
    beside_full = [
        scores.fidelity(group, f"{name}_fidelity", entries),
        _drawn(f"{name}_kl", group, entries, kl, GOLD_KL, made),
        memory.needed_table(group, f"{name}_kl_bytes_needed", kl, GOLD_KL),
        memory.equal_bytes_table(group, f"{name}_kl_equal_bytes", kl, GOLD_KL),
    ]
    shown: list[Table | Drawn | None] = [*beside_full]
    folds: dict[str, list[Table | Drawn | None]] = {}
    if scored:
        points = memory.series_of(entries, SCORE)
        shown = [scores.by_budget(group, name, entries), _drawn(name, group, entries, points, SCORE, made)]
        folds["Bytes needed, and scores at equal bytes"] = [
            memory.needed_table(group, f"{name}_bytes_needed", points, SCORE),
            memory.equal_bytes_table(group, f"{name}_equal_bytes", points, SCORE),
        ]
        folds["Every run, every subset"] = [
            scores.by_run(group, f"{name}_runs", entries, families),
            scores.by_subset(group, f"{name}_differences", entries) if len(scores.subsets_of(entries)) > 1 else None,
        ]
        folds["Predictions beside FullKV's"] = beside_full
    folds["Beside the paper"] = [beside(group, f"{name}_paper", entries, given)]
    folds["Speed and bytes"] = [sheet.efficiency_table(group, f"{name}_efficiency", entries)]
    folds["How the methods were set"] = [sheet.settings_table(group, f"{name}_settings", entries, declare)]
    folds["Where it comes from"] = [sheet.provenance_table(group, f"{name}_provenance", entries)]
    kept = [Fold(title, _kept(content)) for title, content in folds.items() if _kept(content)]
    everything = [*_kept(shown), *(each for fold in kept for each in fold.content)]
    made.tables += [each for each in everything if isinstance(each, Table)]
    return Section(name, group.title, group.setting, _kept(shown), alarm_lines(entries), kept, group.count)


def _kept(content: Sequence[Table | Drawn | None]) -> list[Table | Drawn]:
    """What there is, without tables that have no row."""
    return [each for each in content if each is not None and (not isinstance(each, Table) or each.rows)]


def _drawn(
    name: str, group: Group, entries: Sequence[Entry], series: Sequence[Series], quality: Quality, made: Made
) -> Drawn | None:
    """The curves of a group, kept for the files too; None without a point."""
    if not any(s.published or len(s.points) > 1 for s in series):
        return None  # one budget makes no curve
    lower = quality.lower_is_better
    axis = Axis(
        "KL to FullKV on the gold text, nats" if lower else "score, macro over subsets",
        lower,
        None if lower else memory.full_value(entries),
    )
    caption = f"{group.title}. {group.setting[0]} {group.setting[-1]}."
    curves = [Drawing(s.method, s.published, s.points) for s in series]
    figure, narrow = (drawing.over_memory(curves, axis, caption, width) for width in (drawing.WIDE, figures.WIDTH))
    made.figures[name] = figure
    made.titles[name] = f"{group.title}: {axis.label} over bytes"
    best = max(series, key=lambda s: max((-1 if lower else 1) * p.value for p in s.points))
    alt = f"{axis.label} over achieved bytes, {len(series)} methods; best: {best.method}. Numbers: in the tables."
    return Drawn(drawing.svg(figure).encode(), "svg+xml", alt, drawing.svg(narrow).encode())


def _about(runs: Sequence[Run], groups: Sequence[Group]) -> Iterator[str]:
    newest = max(run.written for run in runs)
    models = sorted({run.first.model for run in runs})
    yield (
        f"{len(runs)} runs in {len(groups)} table{'s' * (len(groups) != 1)}; models {', '.join(models)}; newest run "
        f"{newest:%Y-%m-%d %H:%M} UTC; {commits_of(runs)}."
    )
    yield (
        "Differences are paired by example, with 95 % intervals. Nothing is bold inside the noise. Memory is what "
        "tensors held, all metadata counted. Click a column's head to sort."
    )


def _diagnosis(folder: str) -> list[Drawn]:
    """Its figures, residency first. Raises ValueError for a folder without any."""
    if not folder:
        return []
    paths = sorted(Path(folder).glob("*.png"), key=lambda path: (path.stem != "residency", path.stem))
    if not paths:
        raise ValueError(f"diagnose={folder} holds no figures; name an output_dir of scripts/diagnose.py")
    return [Drawn(path.read_bytes(), "png", f"{path.stem}, figure of scripts/diagnose.py") for path in paths]


def _unique(names: Sequence[str]) -> list[str]:
    """With -2, -3 ... behind names that come again."""
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name}-{counts[name]}")
    return found
