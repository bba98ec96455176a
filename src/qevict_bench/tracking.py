"""Where a run can be watched: nowhere, or as a run of Weights & Biases. Rows are on disk first, always.

Sending happens in a thread of its own, so that a slow or broken service neither slows a run nor fails it: what goes
wrong is one warning. wandb.json in the run's folder says how many lines of rows.jsonl were sent; what is missing is
sent when the command is issued again, under the same id (the run's; after resume=restart with a number behind it), each
line at its own step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from tempfile import TemporaryFile
from threading import Thread
from typing import Any, Literal, NamedTuple, NoReturn

import yaml

from qevict_bench.results import RunFolder, write_atomic
from qevict_bench.rows import Row, parse_row
from qevict_bench.summary import Summary

SENT = "wandb.json"
log = logging.getLogger(__name__)


class Watch:
    """Is told what a run has written. This one tells nobody."""

    def row(self, row: Row) -> None:
        """One more row is on disk."""

    def summary(self, rows: Sequence[Row], summary: Summary) -> None:
        """All rows are there, and this is their summary."""


@dataclass(frozen=True)
class Off:
    """No tracker."""

    @contextmanager
    def watch(self, folder: RunFolder, config: str) -> Iterator[Watch]:
        yield Watch()


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases, one of its runs per run; `group` "" = the name of model and task.

    `mode` offline writes to `dir`/wandb, for `wandb sync`; online needs a login. `predictions`: rows of each subset in
    the table of predictions. At the end a run waits at most `timeout_s` seconds for what is still to be sent.
    """

    project: str = "qevict-bench"
    mode: Literal["offline", "online"] = "offline"
    group: str = ""
    dir: Path = Path("results")
    predictions: int = 50
    timeout_s: float = 15.0

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online"):
            raise ValueError(f"mode={self.mode!r} is unknown; use offline or online")
        if self.predictions < 0 or self.timeout_s <= 0:
            raise ValueError(f"predictions={self.predictions} must be 0 or more, timeout_s={self.timeout_s} positive")

    @contextmanager
    def watch(self, folder: RunFolder, config: str) -> Iterator[Watch]:
        sender = _Sender(self, folder, config)
        try:
            yield sender
        except BaseException:
            sender.close(exit_code=1)
            raise
        sender.close(exit_code=0)


PENDING: list[Thread] = []
"""Threads that were not done in time."""


def leave(status: int) -> NoReturn:
    """End the process; without waiting for a service that was late."""
    if any(thread.is_alive() for thread in PENDING):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


class _Sent(NamedTuple):
    """What W&B has: so many lines of rows.jsonl, and a summary with this hash."""

    lines: int = 0
    summary: str = ""


class _Sender(Watch):
    """Hands figures to a thread, which is started by the first thing that was not sent before."""

    def __init__(self, settings: Wandb, folder: RunFolder, config: str) -> None:
        self._settings, self._path = settings, folder.path
        self._config: dict[str, Any] = yaml.safe_load(config)
        self._queue: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._thread: Thread | None = None
        self._late = False
        self._sent = _read_sent(folder.path / SENT)
        self._lines, self._scores = 0, dict[str, dict[str, float]]()
        for line in (folder.path / "rows.jsonl").read_bytes().splitlines():
            self.row(parse_row(json.loads(line)))

    def row(self, row: Row) -> None:
        self._lines += 1
        if row.metrics:
            self._scores.setdefault(row.subset, {})[row.example_id] = 100 * (row.score or 0.0)
        if self._lines > self._sent.lines:
            running = {f"running/{subset}": fmean(scores.values()) for subset, scores in self._scores.items()}
            self._put("row", (self._lines, _flat("example", _figures(row)) | running))

    def summary(self, rows: Sequence[Row], summary: Summary) -> None:
        figures = _flat("", _condensed(summary))
        mark = hashlib.sha256(repr(figures).encode()).hexdigest()[:16]
        if self._thread is not None or mark != self._sent.summary:
            self._put("summary", (self._lines, mark, figures, _predictions(rows, self._settings)))

    def close(self, exit_code: int) -> None:
        if self._thread is None:
            return
        self._put("end", exit_code)
        self._thread.join(self._settings.timeout_s)
        if self._thread.is_alive():
            self._late = True
            PENDING.append(self._thread)
            self._warn(f"not done after {self._settings.timeout_s:g} s")

    def _put(self, kind: str, what: Any) -> None:
        self._queue.put((kind, what))
        if self._thread is None:
            self._thread = Thread(target=self._send, name=f"wandb {self._path.name}", daemon=True)
            self._thread.start()

    def _send(self) -> None:
        run = None
        try:
            import wandb  # half a second, and only here

            run = self._begin(wandb)
            sent = self._pump(run, wandb.Table)
            if not self._late:
                write_atomic(self._path / SENT, json.dumps(sent._asdict()) + "\n")
        except Exception as error:  # whatever it is, it is not the run's business
            if not self._late:
                self._warn(f"{type(error).__name__}: {' '.join(str(error).split())}")
            with suppress(Exception):  # else its id stays in use
                run.finish(exit_code=1)  # type: ignore[union-attr]

    def _pump(self, run: Any, table: Callable[..., Any]) -> _Sent:
        """Send until the end; what W&B has then."""
        sent = self._sent
        for kind, what in iter(self._queue.get, None):
            if kind == "row":
                step, figures = what
                run.log(figures, step=step)
                sent = sent._replace(lines=step)
            elif kind == "summary":
                step, mark, figures, predictions = what
                run.log({"predictions": table(columns=list(_COLUMNS), data=predictions)}, step=step)
                run.summary.update(figures)
                sent = sent._replace(summary=mark)
            else:
                run.finish(exit_code=what)
                break
        return sent

    def _begin(self, wandb: Any) -> Any:
        settings, config = self._settings, self._config
        settings.dir.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=settings.dir):  # W&B would quietly write elsewhere
            logging.raiseExceptions = False  # of a full disk its own log would print a traceback per line
        restarts = len(list(self._path.glob("replaced-*")))
        return wandb.init(
            project=settings.project,
            id=self._path.name + (f"-{restarts}" if restarts else ""),
            name=f"{config['method']['name']} {config['budget']}",
            group=settings.group or f"{config['model']['name']} {config['task']['_target_'].split('.')[1]}",
            mode=settings.mode,
            resume="allow",
            dir=str(settings.dir),
            config=config,
            settings=wandb.Settings(
                init_timeout=settings.timeout_s, silent=True, console="off", disable_git=True, reinit="create_new"
            ),
        )

    def _warn(self, what: str) -> None:
        log.warning(
            "W&B: run %s was not sent in full (%s); its rows are on disk, re-issue the command to send them",
            self._path.name,
            what,
        )


def _read_sent(path: Path) -> _Sent:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return _Sent(int(found["lines"]), str(found["summary"]))
    except (OSError, ValueError, TypeError, KeyError):
        return _Sent()


_LONGEST = 2000
"""Characters of a prediction in the table."""
_COLUMNS = ("example", "subset", "status", "score", "prediction", "answers", "memory")


def _predictions(rows: Sequence[Row], settings: Wandb) -> list[list[Any]]:
    """The first rows of each subset, for the table."""
    return [
        [
            row.example_id,
            row.subset,
            row.status,
            row.score,
            row.prediction[:_LONGEST],
            " | ".join(row.answers),
            (row.fractions or {}).get("mean"),
        ]
        for row in rows
        if row.index < settings.predictions
    ]


def _figures(row: Row) -> dict[str, Any]:
    """What is drawn over examples."""
    names = ("subset", "status", "fractions", "bytes", "promotions", "demotions", "evictions", "ttft_s", "decode_s")
    score = {"score": 100 * (row.score or 0.0)} if row.metrics else {}
    return score | {name: getattr(row, name) for name in names} | {"fidelity": row.fidelity or {}}


def _condensed(summary: Summary) -> dict[str, Any]:
    """What stands at the end of a run: scores, differences, memory, moves, alarms."""
    values = summary.to_json()
    kept = [
        *("num_examples", "num_errors", "num_infeasible", "macro", "reference_macro", "diff", "scores", "fidelity"),
        *("memory", "bytes", "matched", "achieved", "needle_fate", "timings"),
        *("events", "promotions", "demotions", "evictions"),
    ]
    return {name: values[name] for name in kept} | {"alarms": [alarm.text for alarm in summary.alarms]}


def _flat(where: str, value: Any) -> dict[str, Any]:
    """Nested mappings by one name each: {"memory": {"mean": 0.2}} -> {"memory/mean": 0.2}."""
    if not isinstance(value, Mapping):
        return {where: value}
    parts = [_flat(f"{where}/{name}" if where else str(name), each) for name, each in value.items()]
    return {name: each for part in parts for name, each in part.items()}
