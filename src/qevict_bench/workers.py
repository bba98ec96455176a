"""Rows of several processes that share a run: a file of each, and which of them become lines of the run's rows.jsonl.

workers/<name>/ in a run's folder holds a process's lease, alive while it takes part, and its rows.jsonl, each line
{"claim": n, "row": {...}}. n is the number of its lease on the row's block. Of two rows of an example the one with the
higher claim counts, so that rows written late, under a lease that was lost meanwhile, do not; and none counts where
rows.jsonl of the run has the example already.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qevict_bench.leases import Sighting, look_closely
from qevict_bench.rowfiles import Damaged
from qevict_bench.rows import Row, parse_row, row_line

WORKERS = "workers"
CLAIMS = "claims"
"""Folders in a run's folder: of the processes that take part, and of the blocks they hold."""


MERGED = 2**63
"""Stands for the claim of a row that is done and in the run's rows.jsonl: none is higher."""


class Claimed(NamedTuple):
    """A row, and the number of the lease under which it was written."""

    claim: int
    row: Row


def claimed_line(claim: int, row: Row) -> bytes:
    return b'{"claim": %d, "row": %s}\n' % (claim, row_line(row).rstrip())


class Tail:
    """Reads the whole lines that were added to a worker's file, or to the run's own, since the last time.

    A row in the run's own file has the claim MERGED if it is done, else 0.
    """

    def __init__(self, path: Path, run_id: str, offset: int = 0) -> None:
        self._path, self._run_id, self._offset, self._lines = path, run_id, offset, 0

    def read(self) -> Iterator[Claimed]:
        """Raises Damaged for a line that is not a row of this run."""
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].splitlines():
            self._lines += 1
            try:
                yield self._parsed(json.loads(line))
            except (ValueError, TypeError, RecursionError) as error:
                raise Damaged(f"{self._path}:{self._lines} is damaged ({error}); repair or delete that line") from None

    def _parsed(self, values: Any) -> Claimed:
        if not isinstance(values, dict):
            raise ValueError("it is no object")
        row = parse_row(values.get("row", values))
        claim = values.get("claim", MERGED if row.done else 0)
        if type(claim) is not int or row.run_id != self._run_id:
            raise ValueError(f"it is no row of run {self._run_id}")
        return Claimed(claim, row)


def folders(path: Path) -> list[Path]:
    """The folders of the processes that share or shared the run at `path`."""
    try:
        return sorted((path / WORKERS).iterdir())
    except FileNotFoundError:
        return []


def living(path: Path) -> list[Sighting]:
    """The live processes that share the run at `path`."""
    return [seen for folder in folders(path) if (seen := _alive(folder))]


def gone(path: Path) -> list[Path]:
    """The folders of processes that share the run at `path` no more."""
    return [folder for folder in folders(path) if not _alive(folder)]


def _alive(folder: Path) -> Sighting | None:
    seen = look_closely(folder)
    return seen if seen is not None and seen.alive else None


def in_use(path: Path) -> bool:
    """Whether processes share the run at `path`, or have left rows that are still to be merged."""
    sizes = (file.stat().st_size for folder in folders(path) if (file := folder / "rows.jsonl").exists())
    return any(sizes) or bool(living(path))


def unmerged(path: Path, merged: Mapping[str, Row]) -> list[Row]:
    """The rows of workers that count and that rows.jsonl, with the rows `merged`, does not have; ordered by place."""
    best: dict[str, Claimed] = {}
    for folder in folders(path):
        for found in Tail(folder / "rows.jsonl", path.name).read():
            if found.claim >= best.get(found.row.example_id, found).claim:
                best[found.row.example_id] = found
    old = merged.get
    rows = [row for _, row in best.values() if not (known := old(row.example_id)) or not (known.done or known == row)]
    return sorted(rows, key=lambda row: row.place)


def sweep_up(path: Path, left: Iterable[Path]) -> None:
    """Remove the folders `left`, which were `gone` before their rows were merged, and claims if there are no others."""
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    if not folders(path):
        for name in (CLAIMS, WORKERS):
            shutil.rmtree(path / name, ignore_errors=True)
