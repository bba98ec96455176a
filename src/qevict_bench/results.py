"""Rows on disk: run ids, one folder per run, one writer at a time, and continuing after a crash.

A run's folder results_dir/<id>/ holds config.yaml and env.json (what was run, by what), wanted.json (what the newest
command asked for: limit and subsets), rows.jsonl (one line per example, appended and synced as examples finish; the
newest line of an example counts), summary.json (written when all are done), lock and, while a process works on the run,
its lease (leases.py). Several processes can share a run (sharing.py): their rows are merged into rows.jsonl whenever
the run is opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from qevict_bench.environment import Environment
from qevict_bench.leases import Held, Lease, LeaseLost, acquire
from qevict_bench.rowfiles import Damaged, damaged_line, lengthen, read_rows
from qevict_bench.rows import Row, row_line
from qevict_bench.workers import CLAIMS, WORKERS, gone, in_use, living, sweep_up, unmerged

SCHEMA_VERSION = 3
"""Part of every run id; raise it when the meaning or the set of a row's fields changes."""

log = logging.getLogger(__name__)


_FILES = ("rows.jsonl", "summary.json", "env.json", "config.yaml", "wanted.json", "wandb.json")


class Different(ValueError):
    """Rows on disk come from other code, libraries or another device type; the message names both values."""


class RunFailed(RuntimeError):
    """A run has no result; the rows written so far are kept."""


def run_id(identity: Mapping[str, Any]) -> str:
    """12 hex digits that stand for everything that can change a row. Values are plain JSON types."""
    text = json.dumps({**identity, "schema": SCHEMA_VERSION}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class RunFolder:
    """An open run: its rows, and the right to append to them. Made by `open_run`.

    Whatever is written, the lease is checked first. Raises RunFailed if it is lost, or if the disk takes no more.
    """

    def __init__(self, path: Path, rows: dict[str, Row], stream: FileIO, lease: Lease):
        self.path = path
        self.rows = rows
        self._stream = stream
        self._lease = lease

    def append(self, row: Row) -> None:
        """Write one row so that it survives the death of this process and of the machine."""
        with self._writing():
            lengthen(self._stream, [row_line(row)])
        self.rows[row.example_id] = row

    def refresh(self) -> None:
        """Read what other processes have added to the run; there are none."""

    def free(self, subset: str, start: int) -> bool:
        """Whether the block that starts at this index of the subset is nobody else's now."""
        return True

    @contextmanager
    def claim(self, subset: str, start: int, stop: int) -> Iterator[bool]:
        """Own a block of examples: yields whether it is this process's for as long as the context lasts."""
        yield True

    def damaged(self, example_id: str, reason: str) -> Damaged:
        """What to raise if the row of that example is not one of this run; names its line."""
        path = self.path / "rows.jsonl"
        lines = path.read_bytes().splitlines()
        number = max(number for number, line in enumerate(lines, 1) if json.loads(line)["example_id"] == example_id)
        return damaged_line(path, number, reason)

    def want(self, limit: int, subsets: Sequence[str]) -> None:
        """Note for readers what this command asks for: `limit` examples of each subset."""
        with self._writing():
            write_atomic(self.path / "wanted.json", json.dumps({"limit": limit, "subsets": list(subsets)}) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        text = json.dumps(summary, indent=1, allow_nan=False)
        with self._writing():
            write_atomic(self.path / "summary.json", text + "\n")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            self._lease.check()
            yield
        except LeaseLost as lost:
            raise RunFailed(
                f"run {self.path.name} was taken over while this process stood still ({lost}); it writes no more rows "
                "here, and those written so far are kept"
            ) from None
        except OSError as error:
            raise RunFailed(
                f"{self.path} cannot be written ({error.strerror}); the rows so far are kept: mend that and re-issue "
                "the command"
            ) from None


@contextmanager
def open_run(
    path: Path,
    config: str,
    environment: Environment,
    *,
    restart: str = "never",
    wait: Callable[[str], None] | None = None,
    beside: bool = False,
) -> Iterator[RunFolder]:
    """Own the run at `path`, check that it may be continued, and yield it; a run that wrote no row leaves no folder.

    `config` is the text of config.yaml. With restart=`always` (or `unusable`: only if the rows cannot be continued) the
    old files move to `path`/replaced-<n>/ first. `wait` is called again and again, with a description of the owner,
    while another live process holds the run; without it that is an error. `beside` processes that share it, it is
    opened all the same: for a moment. Raises ValueError (Damaged, Different, a busy run, a folder that cannot be
    written) before anything is changed.
    """
    is_new = _is_empty(path / "rows.jsonl")
    lease = _acquire(path, wait, beside)
    try:
        rows, stream = _begin(path, config, environment, restart)
        with stream:
            yield RunFolder(path, rows, stream, lease)
    finally:
        with suppress(LeaseLost):
            lease.check()
            if is_new and _is_empty(path / "rows.jsonl") and not (path / WORKERS).exists():
                for name in (*_FILES, "lock"):
                    (path / name).unlink(missing_ok=True)
        lease.release()
        if is_new:
            with suppress(OSError):  # it has rows, or another process has begun the same run since
                path.rmdir()


def _begin(path: Path, config: str, environment: Environment, restart: str) -> tuple[dict[str, Row], FileIO]:
    try:
        try:
            rows, whole = _continue(path, environment)
        except (Damaged, Different):
            if restart == "never":
                raise
            rows, whole = _set_aside(path)
        if restart == "always" and (rows or in_use(path)):
            rows, whole = _set_aside(path)
        if not living(path):
            for left in [file for name in _FILES for file in path.glob(f".{name}.*")]:
                left.unlink()  # half a file, by a process that was killed
        if not rows and not in_use(path):
            write_atomic(path / "config.yaml", config)
            write_atomic(path / "env.json", json.dumps(environment.to_json(), indent=1) + "\n")
        stream = FileIO(path / "rows.jsonl", "ab")
        try:
            if stream.tell() > whole:
                log.warning("%s: dropped a torn last line; its example runs again", path / "rows.jsonl")
                stream.truncate(whole)
            dead = gone(path)  # first: they write nothing after their rows have been read
            if others := unmerged(path, rows):
                lengthen(stream, map(row_line, others))
        except BaseException:
            stream.close()
            raise
        rows.update((row.example_id, row) for row in others)
        sweep_up(path, dead)
    except OSError as error:
        raise unwritable(path, error) from None
    return rows, stream


def unwritable(path: Path, error: OSError) -> ValueError:
    """What to raise if the run's folder `path` cannot be written."""
    return ValueError(f"results_dir={path.parent} cannot be written ({error.strerror}); choose a writable folder")


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` in one step: readers see the old text or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _continue(path: Path, environment: Environment) -> tuple[dict[str, Row], int]:
    rows, whole = read_rows(path / "rows.jsonl")
    if not rows and not in_use(path):
        return rows, whole
    if strangers := {row.run_id for row in rows.values()} - {path.name}:
        raise Damaged(f"{path / 'rows.jsonl'} holds rows of run {min(strangers)}; start over with resume=restart")
    try:
        recorded = Environment.from_json(json.loads((path / "env.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path / 'env.json'} cannot be read ({error}); start over with resume=restart") from None
    differences = recorded.differences(environment)
    if differences:
        raise Different(
            f"run {path.name} was begun under other conditions ({'; '.join(differences)}), so its {len(rows)} rows "
            "cannot be continued; go back to those, or start over with resume=restart"
        )
    return rows, whole


def _set_aside(path: Path) -> tuple[dict[str, Row], int]:
    number = 1
    while (path / f"replaced-{number}").exists():
        number += 1
    target = path / f"replaced-{number}"
    target.mkdir()
    for name in (*_FILES, WORKERS, CLAIMS):
        if (path / name).exists():
            os.replace(path / name, target / name)
    log.info("run %s starts over; its old rows are in %s", path.name, target)
    return {}, 0


def _is_empty(path: Path) -> bool:
    return not path.exists() or (path.is_file() and not path.stat().st_size)


def _acquire(path: Path, wait: Callable[[str], None] | None, beside: bool) -> Lease:
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            lease = acquire(path)
            if beside or not (others := living(path)):
                return lease
            lease.release()
            raise Held(str(others[0]))
        except FileNotFoundError:
            continue  # the run's last owner wrote no row and has just removed the folder
        except OSError as error:
            with suppress(OSError):  # it is not empty
                path.rmdir()
            raise unwritable(path, error) from None
        except Held as held:
            if wait is None:
                raise ValueError(
                    f"run {path.name} is held by {held}; wait for it, or change a setting (results_dir, seed ...)"
                ) from None
            wait(str(held))
