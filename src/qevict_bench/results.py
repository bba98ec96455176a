"""Rows on disk: run ids, one folder per run, locking, and continuing after a crash.

A run's folder results_dir/<id>/ holds config.yaml and env.json (what was run, by what), rows.jsonl (one line per
example, appended and synced as examples finish; the newest line of an example counts), summary.json (written when all
are done) and lock (held while a process works on the run; names its owner).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from qevict_bench.environment import Environment

SCHEMA_VERSION = 2
"""Part of every run id; raise it when the meaning or the set of a row's fields changes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One example of one run; what the rows of a run share comes first. `index` counts within the subset.

    status: `ok`, `infeasible` (the budget admits no setting; `error` names the nearest) or `error` (`error` says why;
    retried by the next run). `group` and `data_source` as in task.Example; `overflow_tokens`: by how much prompt and
    answer exceed the task's context_length. Only `ok` rows carry a score. `bytes` and `fractions` are those of engine.Generation:
    bytes, and shares of FullKV's bytes at the same step. `tier_units` are mean units per tier at the end; moves are
    summed over layers; `needle_fate` are shares in [0, 1]; `ttft_s` and `decode_s` seconds.
    """

    run_id: str
    model: str
    method: str
    variant: str
    task: str
    seed: int
    split: str
    budget: str
    basis: str
    enforce: str
    small_budget: str
    batch_size: int
    protocol: str
    first_token: str
    prompt_source: str
    device: str
    dtype: str
    git_sha: str
    subset: str = ""
    example_id: str = ""
    index: int = 0
    group: str = ""
    data_source: str = ""
    status: str = "error"
    error: str = ""
    prompt_tokens: int = 0
    truncated_tokens: int = 0
    overflow_tokens: int = 0
    answers: tuple[str, ...] = ()
    prediction: str = ""
    stop: str = ""
    new_tokens: int = 0
    score: float | None = None
    metrics: Mapping[str, float] | None = None
    bytes: Mapping[str, float] | None = None
    fractions: Mapping[str, float] | None = None
    matched: bool = False
    tier_units: Mapping[str, float] | None = None
    events: int = 0
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0
    needle_fate: Mapping[str, float] | None = None
    knobs: Mapping[str, Any] | None = None
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def done(self) -> bool:
        """False if the example has to run again."""
        return self.status != "error"


_FILES = ("rows.jsonl", "summary.json", "env.json", "config.yaml")
_ROW_FIELDS = {field.name for field in fields(Row)}


class Damaged(ValueError):
    """A result file that cannot be read; the message names file and line."""


class Different(ValueError):
    """Rows on disk come from other code, libraries or another device type; the message names both values."""


def run_id(identity: Mapping[str, Any]) -> str:
    """12 hex digits that stand for everything that can change a row. Values are plain JSON types."""
    text = json.dumps({**identity, "schema": SCHEMA_VERSION}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read_rows(path: Path) -> tuple[dict[str, Row], int]:
    """The newest row per example id, and the length in bytes of the file without its torn last line (if it has one).

    Raises Damaged for any other line that is not a row. A missing file has no rows.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}, 0
    whole = data.rfind(b"\n") + 1
    rows: dict[str, Row] = {}
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            values = json.loads(line)
            if not isinstance(values, dict) or values.keys() != _ROW_FIELDS:
                raise ValueError("it is not an object with the fields of a row")
            row = Row(**{**values, "answers": tuple(values["answers"])})
            _check(row)
        except (ValueError, TypeError) as error:
            raise Damaged(
                f"{path}:{number} is damaged ({error}); repair or delete that line, or start over with resume=restart"
            ) from None
        rows[row.example_id] = row
    return rows, whole


def _check(row: Row) -> None:
    """Raise ValueError for a row that this code cannot have written."""
    if not all(isinstance(x, str) for x in (row.example_id, row.subset)) or not isinstance(row.index, int):
        raise ValueError("example_id, subset or index has another type")
    if row.status == "ok" and not (isinstance(row.score, int | float) and 0 <= row.score <= 1):
        raise ValueError(f"score {row.score} is not in [0, 1]")


class RunFolder:
    """An open run: its rows, and the right to append to them. Made by `open_run`."""

    def __init__(self, path: Path, rows: dict[str, Row], stream: IO[bytes]):
        self.path = path
        self.rows = rows
        self._stream = stream

    def append(self, row: Row) -> None:
        """Write one row so that it survives the death of this process and of the machine."""
        self._stream.write(json.dumps(asdict(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.rows[row.example_id] = row

    def read_summary(self) -> dict[str, Any]:
        """The summary of the last finished command, or {} if there is none."""
        try:
            values = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise Damaged(f"{self.path / 'summary.json'} is damaged ({error}); delete it and run again") from None
        return dict(values)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        text = json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(self.path / "summary.json", text + "\n")


@contextmanager
def open_run(
    path: Path,
    config: str,
    environment: Environment,
    *,
    restart: str = "never",
    wait: Callable[[str], None] | None = None,
) -> Iterator[RunFolder]:
    """Lock the run at `path`, check that it may be continued, and yield it; a run that wrote no row leaves no folder.

    `config` is the text of config.yaml. With restart=`always` (or `unusable`: only if the rows cannot be continued) the
    old files move to `path`/replaced-<n>/ first. `wait` is called again and again, with a description of the owner,
    while another live process holds the run; without it that is an error. Raises ValueError (Damaged, Different, a
    busy run, a folder that cannot be written) before anything is changed.
    """
    is_new = not path.exists()
    lock = _acquire(path, wait)
    try:
        try:
            rows, whole = _continue(path, environment)
        except (Damaged, Different):
            if restart == "never":
                raise
            rows, whole = _set_aside(path)
        if rows and restart == "always":
            rows, whole = _set_aside(path)
        if not rows:
            write_atomic(path / "config.yaml", config)
            write_atomic(path / "env.json", json.dumps(environment.to_json(), indent=1) + "\n")
        with open(path / "rows.jsonl", "ab") as stream:
            if stream.tell() > whole:
                log.warning("%s: dropped a torn last line; its example runs again", path / "rows.jsonl")
                stream.truncate(whole)
            yield RunFolder(path, rows, stream)
    finally:
        if is_new and not _size(path / "rows.jsonl"):
            for name in (*_FILES, "lock"):
                (path / name).unlink(missing_ok=True)
            with suppress(OSError):  # another process may have begun the same run since
                path.rmdir()
        lock.close()


def write_atomic(path: Path, text: str) -> None:
    """Replace `path` in one step: readers see the old text or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _continue(path: Path, environment: Environment) -> tuple[dict[str, Row], int]:
    rows, whole = read_rows(path / "rows.jsonl")
    if not rows:
        return rows, whole
    try:
        recorded = Environment(**json.loads((path / "env.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
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
    for name in _FILES:
        if (path / name).exists():
            os.replace(path / name, target / name)
    log.info("run %s starts over; its old rows are in %s", path.name, target)
    return {}, 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _acquire(path: Path, wait: Callable[[str], None] | None) -> IO[str]:
    """The open, locked lock file of the run. The lock dies with the process, however it ends."""
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            stream = _open_lock(path)
        except OSError as error:
            raise ValueError(
                f"results_dir={path.parent} cannot be written ({error.strerror}); choose a writable folder"
            ) from None
        if stream is None:
            continue
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.seek(0)
            owner = stream.read().strip() or "another process"
            stream.close()
            if wait is None:
                raise ValueError(
                    f"run {path.name} is held by {owner}; wait for it, or change a setting (results_dir, seed ...)"
                ) from None
            wait(owner)
            continue
        except OSError as error:
            stream.close()
            raise ValueError(f"{path} does not support file locks ({error.strerror}); choose a local folder") from None
        try:
            same = os.path.samestat(os.fstat(stream.fileno()), os.stat(path / "lock"))
        except FileNotFoundError:
            same = False
        if same:
            break
        stream.close()  # the file was removed before it was locked: the lock protects nothing
    stream.truncate(0)
    stream.write(f"pid {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
    stream.flush()
    return stream


def _open_lock(path: Path) -> IO[str] | None:
    """The open lock file, or None if the folder's last owner has just removed it."""
    try:
        return open(path / "lock", "a+", encoding="utf-8")
    except FileNotFoundError:
        return None
