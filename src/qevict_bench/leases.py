"""Leases: the right of one process to write a folder, which every host that sees the folder can judge.

A lease is a file lease.<n> that names its owner and whose modification time the owner renews every BEAT_S seconds. The
highest number counts. It has ended when it was not renewed for EXPIRES_S seconds, or when its owner's process on this
machine is dead. Whoever takes over from an ended lease creates number n + 1, which only one can, and removes the older
ones; an owner that was merely asleep then finds its file gone and writes no more. Where the file system has file locks,
`lock` is locked as well: that frees the folder at once when a process of this machine dies.

A file lock lasts as long as a process has the file open, so it can outlive the heartbeat: while the owner is stopped
(kill -STOP, Ctrl-Z, a suspended machine) or hangs, and while a process that it forked lives on after its death. Nobody
can take over from such an owner: it may wake up between its last look at the lease and a write. It has to be continued
or killed, and `Held` says so; `Sighting.stalled` tells it from one that is gone, on the owner's machine.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from io import FileIO
from pathlib import Path

BEAT_S = 10.0
EXPIRES_S = 60.0

log = logging.getLogger(__name__)


class Held(Exception):
    """Another live process holds the folder; the message describes it."""


class LeaseLost(RuntimeError):
    """The lease has ended or is another process's now."""


@dataclass(frozen=True)
class Owner:
    """Who made a lease. `machine` tells machines and containers of one host name apart; `token` is the lease's own.

    `born` is when the process started, in clock ticks since the machine did (0 if unknown): process ids are reused.
    """

    pid: int
    host: str
    since: str
    machine: str
    token: str
    born: int = 0

    @property
    def here(self) -> bool:
        """Whether it is (or was) a process of this machine, so that its death shows."""
        return self.machine == _machine()

    @property
    def dead(self) -> bool:
        """Whether it is known to have ended; of another machine's process that is never known."""
        return self.here and not _runs(self.pid, self.born)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}, since {self.since}"


@dataclass(frozen=True)
class Sighting:
    """A lease as found: its number, its owner (None if nothing is written yet), seconds since its last renewal."""

    number: int
    owner: Owner | None
    age_s: float

    @property
    def alive(self) -> bool:
        return abs(self.age_s) <= EXPIRES_S and not (self.owner and self.owner.dead)

    @property
    def stalled(self) -> bool:
        """The owner's process exists on this machine, but has not renewed its lease for long."""
        return self.age_s > EXPIRES_S and self.owner is not None and self.owner.here and not self.owner.dead

    @property
    def ahead(self) -> bool:
        """Renewed in the future: the clocks of owner and reader differ, so nobody can tell when."""
        return self.age_s < -EXPIRES_S and not (self.owner and self.owner.dead)

    @property
    def locking(self) -> str:
        """Describes the owner where `lock` is known to be locked, with a remedy if it does not come to its end."""
        if self.owner is None or self.alive or self.ahead:
            return str(self)
        if self.owner.dead:
            return f"a process that {self.owner} left behind, or by one that is just taking over from it"
        pid, where = self.owner.pid, "" if self.owner.here else f" on {self.owner.host}"
        return f"{self} (it stands still: continue it with kill -CONT {pid}{where}, or end it with kill -9 {pid})"

    def __str__(self) -> str:
        return f"{self.owner or 'another process'}, heartbeat {max(self.age_s, 0):.0f} s ago"


class Lease:
    """A lease that this process owns, renewed by a thread until `release`. Made by `acquire`."""

    def __init__(self, path: Path, descriptor: int, text: bytes, lock: FileIO | None):
        self._path, self._descriptor, self._text, self._lock = path, descriptor, text, lock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=f"lease {path}", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        """Of two owners of a folder, the later one has the higher number, as long as somebody holds it."""
        return int(self._path.name.removeprefix("lease."))

    def check(self) -> None:
        """Raise LeaseLost if this process must not write any more."""
        with suppress(OSError):
            os.utime(self._descriptor)  # first: after a long sleep a contender should see us before we look
        if not self.mine():
            seen = look(self._path.parent)
            raise LeaseLost(f"it is held by {seen} now" if seen else "its lease is gone")

    def release(self) -> None:
        self._stop.set()
        self._thread.join()
        with suppress(OSError):
            if self._path.read_bytes() == self._text:
                self._path.unlink()
        os.close(self._descriptor)
        if self._lock is not None:
            self._lock.close()

    def mine(self) -> bool:
        """Whether the file is still there, and the newest."""
        try:
            unchanged = self._path.read_bytes() == self._text  # opening asks the server, where there is one
            return unchanged and self._path.name == f"lease.{max(_numbers(self._path.parent), default=0)}"
        except OSError:
            return False

    def _renew(self) -> None:
        while not self._stop.wait(BEAT_S):
            with suppress(OSError):  # a lease that cannot be renewed ends, and `check` finds out
                os.utime(self._descriptor)


def acquire(folder: Path, *, locks: bool = True, above: int = 0) -> Lease:
    """Own the existing `folder`. Raises Held, FileNotFoundError if it vanishes, and other OSErrors if not writable.

    An OSError leaves no file in a folder that was empty. Without `locks` an owner that stands still loses the folder
    like one that is gone: it must be harmless if it wakes up between its last look and a write. The lease's number is
    above `above`.
    """
    lock = _lock(folder, locks)
    try:
        while True:
            seen = look(folder, clock=_clock)
            if seen is not None and seen.alive and not (lock and seen.owner and seen.owner.here):
                raise Held(str(seen))
            number = max(seen.number if seen else 0, above) + 1
            try:
                lease = _create(folder / f"lease.{number}", lock)
            except FileExistsError:  # somebody was faster, or our listing is an old one
                time.sleep(0.05)
                continue
            for older in _numbers(folder):
                if older < number:
                    (folder / f"lease.{older}").unlink(missing_ok=True)
            if lease.mine():
                if seen is not None:
                    log.info("%s: took over from %s", folder, seen)
                return lease
            lease.release()  # a newer one was made since we looked
            lock = _lock(folder, locks)
    except BaseException as error:
        with suppress(OSError):
            full = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)  # the disk, that is
            if full and os.listdir(folder) == ["lock"]:
                (folder / "lock").unlink()
        if lock is not None:
            lock.close()
        raise


def _create(path: Path, lock: FileIO | None) -> Lease:
    since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    pid = os.getpid()
    owner = Owner(pid, socket.gethostname(), since, _machine(), secrets.token_hex(8), _born(pid)[0])
    text = json.dumps(asdict(owner)).encode()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, text)
        os.fsync(descriptor)  # other hosts see it now
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return Lease(path, descriptor, text, lock)


def look(folder: Path, clock: Callable[[Path], float] = lambda folder: time.time()) -> Sighting | None:
    """The lease that counts in `folder`, or None. Writes nothing unless `clock`, which gives the time now, does."""
    while True:
        try:
            number = max(_numbers(folder), default=0)
            if not number:
                return None
            with open(folder / f"lease.{number}", "rb") as stream:
                renewed = os.fstat(stream.fileno()).st_mtime
                text = stream.read()
        except FileNotFoundError:
            if not folder.exists():
                return None
            time.sleep(0.01)  # released or taken over since it was listed
            continue
        try:
            made = Owner(**json.loads(text))
            kinds = [type(value) for value in asdict(made).values()]
            owner = made if kinds == [int, str, str, str, str, int] and made.pid > 0 else None
        except (ValueError, TypeError, RecursionError):
            owner = None
        return Sighting(number, owner, clock(folder) - renewed)


def look_closely(folder: Path) -> Sighting | None:
    """As `look`, by the clock of the file system, which all hosts share: it stamps `lock`."""
    try:
        return look(folder, clock=_clock)
    except FileNotFoundError:
        return None  # the folder has been removed since


def _numbers(folder: Path) -> list[int]:
    suffixes = [name.removeprefix("lease.") for name in os.listdir(folder) if name.startswith("lease.")]
    return [int(suffix) for suffix in suffixes if suffix.isascii() and suffix.isdecimal() and len(suffix) < 10]


def _lock(folder: Path, locks: bool) -> FileIO | None:
    """The locked lock file, which the system frees when the process dies; None without `locks`, which not all file
    systems have."""
    while True:
        stream = FileIO(folder / "lock", "ab")
        if not locks:
            stream.close()
            return None
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            stream.close()
            seen = look(folder)
            raise Held(seen.locking if seen else "another process") from None
        except OSError:
            stream.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), os.stat(folder / "lock")):
                return stream
        stream.close()  # the file was removed before it was locked: this lock protects nothing


def _clock(folder: Path) -> float:
    """Time now as the file system stamps it, so that the clocks of hosts need not agree."""
    os.utime(folder / "lock")
    return (folder / "lock").stat().st_mtime


def _runs(pid: int, born: int) -> bool:
    """Whether the process exists that got this id at `born` (0: whichever has it now)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    now_born, ended = _born(pid)
    return not ended and (not born or not now_born or born == now_born)


def _born(pid: int) -> tuple[int, bool]:
    """Start of a process in ticks since boot (0 if unknown), and whether it has ended and waits to be collected."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return int(after_name[19]), after_name[0] in (b"Z", b"X")
    except (OSError, ValueError, IndexError):
        return 0, False


@cache
def _machine() -> str:
    """Host name, boot and process-id namespace: within it, process ids can be compared."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
