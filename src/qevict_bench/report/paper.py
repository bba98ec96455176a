"""The paper's figures beside a run's: in its row where every condition is the same, else apart, without differences."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from qevict_bench.report.entries import Entry
from qevict_bench.report.groups import Group
from qevict_bench.tables import Cell, Missing, Number, Table

SOURCE = "arXiv 2608.05326"
_UNSAID = "not said"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, in points, as its csv has it. "" = the paper does not say. `subset` "": macro average."""

    task: str
    model: str
    context_length: str
    budget: str
    protocol: str
    prompt_source: str
    n: str
    method: str
    subset: str
    value: str
    mark: str
    note: str

    def differing(self, group: Group, entry: Entry) -> list[str]:
        """Conditions in which a run is another than the paper's, or of which the paper says nothing."""
        rows = entry.good if not self.subset else entry.by_subset.get(self.subset, [])
        counts = {len(rows) for rows in entry.by_subset.values()} if not self.subset else {len(rows)}
        row = entry.run.first
        here = {
            "model": row.model,
            "context_length": str(group.context_length),
            "budget": row.budget,
            "protocol": row.protocol,
            "prompt_source": row.prompt_source,
            "n": "/".join(map(str, sorted(counts))),
        }
        return [name.replace("_", " ") for name, value in here.items() if getattr(self, name) != value]


def read_figures(folder: Path) -> list[Figure]:
    """Figures in all csv files of a folder that have these columns. Raises ValueError if one cannot be read."""
    names = [field.name for field in fields(Figure)]
    found: list[Figure] = []
    for path in sorted(folder.glob("*.csv")):
        try:
            with open(path, encoding="utf-8", newline="") as stream:
                reader = csv.DictReader(line for line in stream if not line.startswith("#"))
                if reader.fieldnames != names:
                    continue
                rows = [Figure(**row) for row in reader]
                for row in rows:
                    float(row.value)
        except (OSError, UnicodeError, TypeError, ValueError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read ({error}); its columns are {','.join(names)}") from None
        found += rows
    return found


def beside(group: Group, name: str, entries: Sequence[Entry], figures: Sequence[Figure]) -> Table | None:
    """The paper's figures of this task's methods; None where it gives none.

    A run of the same method stands in the same row, with its difference, only if nothing differs.
    """
    given = [figure for figure in figures if figure.task == group.first.task]
    if not given:
        return None
    rows: list[tuple[Cell, ...]] = []
    for figure in given:
        alike = [entry for entry in entries if entry.run.first.method == figure.method and entry.good]
        same = next((entry for entry in alike if not figure.differing(group, entry)), None)
        paper = Number(float(figure.value), len(figure.value.partition(".")[2]), mark=figure.mark)
        about = (figure.method, figure.subset or "macro", figure.model, figure.context_length, figure.budget)
        said = [about[0], about[1], *(text or _UNSAID for text in (*about[2:], figure.protocol, figure.n))]
        here = _here(same, figure.subset) if same else Missing("")
        if same:
            rows.append((*said, paper, here, _minus(here, paper), "same setting"))
        else:
            rows.append(
                (*said, paper, Missing(""), Missing(""), f"different setting: {_reasons(group, alike, figure)}")
            )
    head = (
        "method",
        "subset",
        "model",
        "context",
        "budget",
        "protocol",
        "n",
        "paper",
        "here",
        "here − paper",
        "setting",
    )
    notes = dict.fromkeys(figure.note for figure in given if figure.note)
    how = (
        "A difference is given only where model, context, budget, protocol, prompt source and n are the same. "
        f"~: derived from the text. {_UNSAID}: the main text does not say it, so it cannot be the same."
    )
    return Table(name, group.title, head, tuple(rows), group.setting, (how, *notes), f"beside the paper ({SOURCE})")


def _here(entry: Entry, subset: str) -> Cell:
    if subset:
        return Number(entry.subset_score(subset))
    return Missing("") if entry.score is None else Number(entry.score)


def _minus(here: Cell, paper: Number) -> Cell:
    return Number(here.value - paper.value, signed=True) if isinstance(here, Number) else Missing("")


def _reasons(group: Group, alike: Sequence[Entry], figure: Figure) -> str:
    if not alike:
        return "method not run"
    nearest = min((figure.differing(group, entry) for entry in alike), key=len)
    return ", ".join(nearest)
