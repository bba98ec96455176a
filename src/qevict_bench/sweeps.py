"""Sweeps on disk: which cells a sweep wants, which of them failed and why, and how each stands.

results_dir/.sweeps/<name>.json is written before the first cell runs; the name hangs on the cells alone, so that a
command issued again, by whatever worker, is the same sweep. results_dir/.sweeps/failed/<run id>.json says why the last
attempt at a run ended without a result; the rows of a run say the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from qevict_bench.inspection import Run, inspect
from qevict_bench.results import write_atomic
from qevict_bench.rowfiles import Damaged
from qevict_bench.standing import read_json
from qevict_bench.terminal import columns, fitted, plain

SWEEPS = ".sweeps"
OVER = ("done", "infeasible")
"""Kinds of runs that need nothing more."""
FAILED = ("failed", "damaged")
"""Kinds of runs that will have no result unless they are issued again."""
WIDTH = 120
_LABEL = 60


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: the fields that tell it from the others, all its fields, its run id.

    A cell that no run can be made of has no run id but a `problem`.
    """

    label: str
    overrides: tuple[str, ...]
    run_id: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Sweep:
    """`arguments` of run.py, issued in `folder`, give these cells."""

    arguments: tuple[str, ...]
    folder: str
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        keys = sorted({cell.run_id or " ".join(sorted(cell.overrides)) for cell in self.cells})
        return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:8]

    def write(self, results_dir: Path) -> None:
        """Raises ValueError if the folder cannot be written."""
        path = results_dir / SWEEPS / f"{self.name}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            raise ValueError(
                f"results_dir={results_dir} cannot be written ({error.strerror}); choose a writable folder"
            ) from None


def read_sweeps(results_dir: Path) -> list[Sweep]:
    """All sweeps whose results are in that folder, the newest last. Raises Damaged."""
    paths = sorted((results_dir / SWEEPS).glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [_parsed(path) for path in paths]


def _parsed(path: Path) -> Sweep:
    values = read_json(path)
    try:
        cells = [Cell(**{**cell, "overrides": tuple(cell["overrides"])}) for cell in values["cells"]]
        texts = [text for cell in cells for text in (cell.label, cell.run_id, cell.problem, *cell.overrides)]
        if not all(isinstance(text, str) for text in [*texts, *values["arguments"], values["folder"]]):
            raise ValueError
        return Sweep(tuple(values["arguments"]), values["folder"], tuple(cells))
    except (KeyError, TypeError, ValueError):
        raise Damaged(f"{path} is damaged; delete it and issue the sweep again") from None


def labels(cells: Sequence[Sequence[str]]) -> list[str]:
    """Of each cell, given by its fields, those that not all cells have."""
    common = set.intersection(*map(set, cells)) if len(cells) > 1 else set()
    return [" ".join(text.lstrip("+") for text in cell if text not in common) for cell in cells]


def note_failure(results_dir: Path, run_id: str, error: BaseException) -> None:
    """Write down why a run has no result; a disk that takes nothing more takes this neither."""
    path = _failure(results_dir, run_id)
    noted = {"error": plain(str(error)) or type(error).__name__, "pid": os.getpid(), "host": socket.gethostname()}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({**noted, "when": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}) + "\n")


def forget_failure(results_dir: Path, run_id: str) -> None:
    with suppress(OSError):
        _failure(results_dir, run_id).unlink()


def _failure(results_dir: Path, run_id: str) -> Path:
    return results_dir / SWEEPS / "failed" / f"{run_id}.json"


def stand(results_dir: Path, cell: Cell) -> Run:
    """How a cell stands."""
    if not cell.run_id:
        return Run("-", "failed", f"failed ({cell.problem})", 0.0)
    found = inspect(results_dir / cell.run_id) or Run(cell.run_id, "missing", f"missing ({cell.label})", 0.0)
    if found.kind in ("missing", "stopped"):
        noted = read_json(_failure(results_dir, cell.run_id))
        if "error" in noted:
            return replace(found, kind="failed", state=f"failed ({noted['error']})")
    return found


def score(results_dir: Path, run_id: str) -> str:
    """The mean score of a run and FullKV's, in points, as its summary has them."""
    try:
        values: dict[str, Any] = read_json(results_dir / run_id / "summary.json")
    except Damaged:
        return "n/a"
    own, full = values.get("macro"), values.get("reference_macro")
    return " of ".join(f"{x:.1f}" if isinstance(x, float) else "n/a" for x in (own, full)) if values else ""


def table(results_dir: Path, cells: Sequence[Cell], stands: Sequence[Run]) -> Iterator[str]:
    """One line per cell: what it is, how it stands, its score beside FullKV's, and the folder of its rows."""
    scores = [score(results_dir, run.name) if run.kind == "done" else "" for run in stands]
    rows = [("cell", "score of FullKV's", "run", "state")]
    rows += [(c.label, s, run.name, run.state) for c, s, run in zip(cells, scores, stands, strict=True)]
    widths = [min(_LABEL, max(columns(row[at]) for row in rows)) for at in range(3)]
    rest = max(20, WIDTH - sum(widths) - 2 * len(widths))
    for row in rows:
        yield "  ".join(fitted(text, width) for text, width in zip(row, [*widths, rest], strict=True)).rstrip()
