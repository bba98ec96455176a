"""Tables over revisit distance of all runs of task=drift in a folder, as Markdown.

    python scripts/drift_table.py results/runs [--model smollm2_135m]

First table: share of right answers in percent, by the number of turns since the topic was last asked about, and for
revisits that ask for the same needle as then, or for another; last the difference from FullKV on the same turns. Second
table, where scripts/drift_lockstep.py measured it: KL(p_full || p_method) in nats per token of the gold answers, and
FullKV's attention on what was evicted, in percent. Brackets are 95 % intervals of a bootstrap over conversations.
Exit codes: 0; 2 for a mistake in the input.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / "src"),
    str(ROOT),
    str(ROOT / "scripts"),
]  # runs from a clone where nothing of ours is installed

from drift_lockstep import FOLDER  # noqa: E402

from qevict_bench.results import Damaged, read_rows  # noqa: E402
from qevict_bench.rows import Row  # noqa: E402
from qevict_bench.statistics import bootstrap  # noqa: E402
from qevict_bench.tables import Cell, Missing, Number, grid  # noqa: E402

SAME = ("dtype", "seed", "split", "basis", "batch_size", "answer_prefix_at", "instruction_at", "first_token")
"""Fields in which runs of one table agree."""


class Turn(NamedTuple):
    """What one turn gave."""

    group: str
    distance: int
    reasked: bool
    values: dict[str, float]


class Run(NamedTuple):
    """A run's rows that are ok, and the same turns measured in lockstep (none if nobody did)."""

    rows: dict[str, Row]
    forced: dict[str, Turn]

    @property
    def label(self) -> str:
        row = next(iter(self.rows.values()))
        return f"{row.method} {row.variant}".strip()

    @property
    def budget(self) -> str:
        return next(iter(self.rows.values())).budget

    @property
    def turns(self) -> dict[str, Turn]:
        found = {}
        for name, row in self.rows.items():
            labels = row.metrics or {}
            values = {"score": 100 * (row.score or 0.0)}
            found[name] = Turn(row.group, int(labels["distance"]), bool(labels["reasked"]), values)
        return found


def runs_of(folder: Path, model: str) -> list[Run]:
    """Runs of task drift on a growing cache, in order of budget and method. Raises ValueError if there is none."""
    runs = []
    for path in sorted(folder.glob("*/rows.jsonl")):
        rows = {name: row for name, row in read_rows(path)[0].items() if row.status == "ok"}
        if not rows:
            continue
        first = next(iter(rows.values()))
        if (first.task, first.mode, first.model) == ("drift", "continue", model):
            runs.append(Run(rows, forced_turns(folder / FOLDER / f"{first.run_id}.csv", rows)))
    if not runs:
        raise ValueError(f"{folder} has no run of task=drift protocol.mode=continue with model={model}")
    return sorted(runs, key=lambda run: (run.budget, run.label), reverse=True)


def forced_turns(path: Path, rows: dict[str, Row]) -> dict[str, Turn]:
    """The lockstep measurement of a run; nothing if there is none. Raises ValueError if it is not of these turns."""
    try:
        with path.open(encoding="utf-8") as stream:
            found = {
                line["example_id"]: Turn(
                    line["group"],
                    int(line["distance"]),
                    line["reasked"] == "1",
                    {name: float(line[name]) for name in ("kl", "missed", "fraction")},
                )
                for line in csv.DictReader(stream)
            }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}); measure it anew with drift_lockstep.py") from None
    if {*found} != {*rows}:
        raise ValueError(f"{path} is of other turns than its run; measure it anew with drift_lockstep.py")
    return found


def cell(turns: Sequence[Turn], value: str, digits: int) -> Cell:
    """Mean with its interval over conversations."""
    if not turns:
        return Missing("")
    found = bootstrap([turn.values[value] for turn in turns], [turn.group for turn in turns]).interval()
    return Number.of(found, digits)


def differences(run: Run, full: Run) -> list[Turn]:
    """Run minus FullKV on the turns that both answered."""
    known, others = run.turns, full.turns
    return [
        turn._replace(values={"score": turn.values["score"] - others[name].values["score"]})
        for name, turn in known.items()
        if name in others
    ]


def check(runs: Sequence[Run]) -> None:
    """Raise ValueError unless the runs differ in method and budget only."""
    first = runs[0]
    for run in runs[1:]:
        for field in SAME:
            mine, its = (getattr(next(iter(each.rows.values())), field) for each in (first, run))
            if mine != its:
                raise ValueError(f"{first.label} has {field}={mine}, {run.label} {field}={its}: use a folder for each")
        for name in sorted({*first.rows} & {*run.rows}):
            if _asked(first.rows[name]) != _asked(run.rows[name]):
                raise ValueError(
                    f"{name} is another question in {first.label} than in {run.label}: use a folder for each"
                )


def _asked(row: Row) -> tuple[object, ...]:
    return row.answers, row.prompt_tokens


def shown(runs: Sequence[Run]) -> str:
    """Both tables."""
    full = next((run for run in runs if run.label == "full_kv"), None)
    distances = sorted({turn.distance for run in runs for turn in run.turns.values()})
    groups: dict[str, Callable[[Turn], bool]] = {
        "first visit" if d == 0 else f"{d} turn{'s' * (d > 1)} ago": (lambda turn, d=d: turn.distance == d)  # type: ignore[misc]
        for d in distances
    }
    kinds: dict[str, Callable[[Turn], bool]] = {
        "same needle": lambda turn: turn.reasked,
        "another": lambda turn: turn.distance > 0 and not turn.reasked,
    }
    scored: list[list[Cell]] = []
    forced: list[list[Cell]] = []
    for run in runs:
        turns, memory = list(run.turns.values()), fmean((row.fractions or {})["mean"] for row in run.rows.values())
        start: list[Cell] = [run.label, run.budget, Number(memory, 3), str(len(turns))]
        against: Cell = cell(differences(run, full), "score", 0) if full and run is not full else ""
        cells = [
            cell([turn for turn in turns if keep(turn)], "score", 0) for keep in (*groups.values(), *kinds.values())
        ]
        scored.append([*start, *cells, against])
        if run.forced:
            known = list(run.forced.values())
            memory = fmean(turn.values["fraction"] for turn in known)
            known = [turn._replace(values={**turn.values, "missed": 100 * turn.values["missed"]}) for turn in known]
            for value, digits, name in (("kl", 3, "KL"), ("missed", 1, "attention on evicted tokens, %")):
                cells = [cell([turn for turn in known if keep(turn)], value, digits) for keep in groups.values()]
                forced.append([run.label, run.budget, Number(memory, 3), str(len(known)), name, *cells])
    first = grid(["method", "budget", "memory", "turns", *groups, *kinds, "minus FullKV"], scored)
    second = grid(["method", "budget", "memory", "turns", "measure", *groups], forced)
    return f"{first}\n\n{second}" if forced else first


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="results_dir of the runs")
    parser.add_argument("--model", default="smollm2_135m")
    args = parser.parse_args(argv)
    try:
        runs = runs_of(args.folder, args.model)
        check(runs)
        print(shown(runs))
    except (ValueError, Damaged) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
