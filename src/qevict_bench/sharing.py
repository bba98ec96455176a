"""A run that several processes work on at once, on one machine or on several with a shared file system.

Each takes blocks of examples by lease (claims/<subset>.<start>/ in the run's folder, without file locks: one that
stands still loses its block) and writes a file of its own (workers.py). The run's own lease is held for moments only:
to join, to leave, to write the summary; whoever gets it adds the rows of all to rows.jsonl.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from urllib.parse import quote

from qevict_bench.environment import Environment
from qevict_bench.leases import Held, Lease, LeaseLost, acquire, look_closely
from qevict_bench.results import RunFailed, RunFolder, open_run, unwritable
from qevict_bench.rowfiles import Damaged, lengthen
from qevict_bench.rows import Row
from qevict_bench.workers import CLAIMS, MERGED, WORKERS, Claimed, Tail, claimed_line, folders, living

log = logging.getLogger(__name__)


class SharedFolder(RunFolder):
    """A shared run and this process's part in it. Made by `open_shared`.

    `rows` are all that count, of all processes, as of the last `refresh`. Rows are appended to the claimed block;
    LeaseLost if it is another process's by then, which writes nothing.
    """

    def __init__(self, path: Path, enter: Callable[[], AbstractContextManager[RunFolder]], first: bool) -> None:
        self.path, self._enter = path, enter
        self._claims: dict[tuple[str, int], int] = {}  # of the rows that count, by place
        self._tails: dict[str, Tail] = {}
        self._block: Lease | None = None
        with enter() as run:
            if first and (others := living(path)):
                raise Held(str(others[0]))
            super().__init__(path, {}, *self._part())
            self._merged = Tail(path / "rows.jsonl", path.name, (path / "rows.jsonl").stat().st_size)
            for row in run.rows.values():
                self._take(Claimed(MERGED if row.done else 0, row))

    def _part(self) -> tuple[FileIO, Lease]:
        """A new folder for this process's rows, and the lease that shows that it is alive."""
        own = self.path / WORKERS / secrets.token_hex(6)
        try:
            own.mkdir(parents=True)
            stream = FileIO(own / "rows.jsonl", "ab")
            try:
                lease = acquire(own, locks=False)
            except OSError:
                stream.close()
                raise
        except OSError as error:
            raise unwritable(self.path, error) from None
        self._name = own.name
        return stream, lease

    def _leave(self) -> None:
        self._stream.close()
        self._lease.release()

    def close(self) -> None:
        self._leave()
        with self._enter():  # which merges the rows
            pass

    def append(self, row: Row) -> None:
        assert self._block is not None
        for lease in (self._lease, self._block):
            lease.check()
        with self._writing():
            lengthen(self._stream, [claimed_line(self._block.number, row)])
        self._take(Claimed(self._block.number, row))
        self.rows[row.example_id] = row

    def damaged(self, example_id: str, reason: str) -> Damaged:
        with suppress(ValueError):  # it is in no line of rows.jsonl
            return super().damaged(example_id, reason)
        return Damaged(f"{self.path}: the row of {example_id} is damaged ({reason}); start over with resume=restart")

    def refresh(self) -> None:
        for folder in folders(self.path):
            if folder.name != self._name:
                self._tails.setdefault(folder.name, Tail(folder / "rows.jsonl", self.path.name))
        for tail in (*self._tails.values(), self._merged):  # last: rows move there
            for found in tail.read():
                self._take(found)

    def _take(self, found: Claimed) -> None:
        claim, row = found
        if claim >= self._claims.get(row.place, 0):
            self._claims[row.place] = claim
            if self.rows.get(row.example_id) != row:  # the same object as long as it says the same
                self.rows[row.example_id] = row

    def free(self, subset: str, start: int) -> bool:
        seen = look_closely(self._place(subset, start))
        return seen is None or not seen.alive

    @contextmanager
    def claim(self, subset: str, start: int, stop: int) -> Iterator[bool]:
        self._stay()
        numbers = (self._claims.get((subset, index), 0) for index in range(start, stop))
        lease = self._own(place := self._place(subset, start), max(number % MERGED for number in numbers))
        if lease is None:
            yield False
            return
        self._block = lease
        try:
            self.refresh()
            yield True
        finally:
            self._block = None
            lease.release()
            with suppress(OSError):  # somebody else is just trying to claim it
                (place / "lock").unlink()
                place.rmdir()

    def _stay(self) -> None:
        """Join again if the others have given this process up, as after a long sleep."""
        if not self._lease.mine():
            log.warning("run %s: this process stood still and was given up; it joins again", self.path.name)
            self._leave()
            with self._enter():
                self._stream, self._lease = self._part()

    def _place(self, subset: str, start: int) -> Path:
        return self.path / CLAIMS / f"{quote(subset, safe='')}.{start}"

    def _own(self, place: Path, above: int) -> Lease | None:
        while True:
            try:
                place.mkdir(parents=True, exist_ok=True)
                return acquire(place, locks=False, above=above)
            except Held:
                return None
            except FileNotFoundError:  # its last owner has just removed the folder
                continue
            except OSError as error:
                raise RunFailed(
                    f"{self.path} cannot be written ({os.strerror(error.errno or 0)}); the rows so far are kept: mend "
                    "that and re-issue the command"
                ) from None


@contextmanager
def open_shared(
    path: Path, config: str, environment: Environment, *, wait: Callable[[str], None], first: bool = False
) -> Iterator[SharedFolder]:
    """Take part in the run at `path`; arguments as in `open_run`. Raises Held if `first` and others take part already.

    `wait` is called while a process that shares it with nobody holds the run.
    """

    def enter() -> AbstractContextManager[RunFolder]:
        return open_run(path, config, environment, wait=wait, beside=True)

    folder = SharedFolder(path, enter, first)
    try:
        yield folder
    except BaseException:
        with suppress(ValueError, LeaseLost):  # its rows are merged when the run is opened again
            folder.close()
        raise
    folder.close()
