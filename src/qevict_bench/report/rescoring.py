"""Metrics computed anew from stored predictions, with today's scorers. Nothing is written into runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qevict_bench.rows import Row
from qevict_bench.runs import Run
from qevict_bench.task import Example, Task


@dataclass(frozen=True)
class Rescored:
    """A run with today's scores. `changes`: examples by metric that is another now, of `num_rows`."""

    run: Run
    changes: Mapping[str, int]
    num_rows: int

    @property
    def line(self) -> str:
        row = self.run.first
        said = ", ".join(f"{name} in {count}" for name, count in self.changes.items()) or "nothing changed"
        return f"{row.run_id} {row.method} at {row.budget} on {row.model}, {row.task}: {said} of {self.num_rows} rows"


def rescore(run: Run, task: Task) -> Rescored:
    """Judge every stored prediction of a run again. `score` is the headline metric; a metric that came or went counts.

    Raises ValueError if the task refuses a row, naming it.
    """
    changes: dict[str, int] = {}
    made: dict[str, Row] = {}
    for row in run.good:
        if not row.metrics:
            continue
        try:
            example = Example(row.example_id, row.subset, "", "", "", row.answers, 0, (), row.group, row.data_source)
            score, metrics = task.score(row.prediction, example), task.metrics(row.prediction, example)
        except Exception as error:  # whatever the scorer of another version raises
            raise ValueError(f"{run.path}: {row.example_id} cannot be scored ({error!r})") from error
        before, after = {"score": row.score, **row.metrics}, {"score": score, **metrics}
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                changes[name] = changes.get(name, 0) + 1
        made[row.example_id] = replace(row, score=score, metrics=metrics)
    rows, asked = (_replaced(each, made) for each in (run.rows, run.asked))
    return Rescored(replace(run, rows=rows, asked=asked), dict(sorted(changes.items())), len(made))


def _replaced(rows: Sequence[Row], made: Mapping[str, Row]) -> list[Row]:
    return [made.get(row.example_id, row) for row in rows]
