"""Leases among processes of this machine, of another one, and of a file system without locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qevict_bench import leases
from qevict_bench.leases import EXPIRES_S, Held, Lease, LeaseLost, acquire, look


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS without a lock service."""

    def refuse(stream: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def plant(folder: Path, number: int = 1, age_s: float = 0.0, **changes: object) -> Path:
    """The lease of another machine, renewed `age_s` ago."""
    owner = {"pid": 77, "host": "elsewhere", "since": "2026-01-01 00:00:00", "machine": "other", "token": "t"}
    path = folder / f"lease.{number}"
    path.write_text(json.dumps(owner | changes))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_lease_names_its_owner_and_is_gone_when_released(tmp_path: Path) -> None:
    assert look(tmp_path) is None
    lease = acquire(tmp_path)
    seen = look(tmp_path)
    assert seen is not None
    assert seen.alive
    assert str(seen).startswith(f"pid {os.getpid()} on {socket.gethostname()}, since 20")
    lease.check()
    lease.release()
    assert {path.name for path in tmp_path.iterdir()} == {"lock"}
    with pytest.raises(LeaseLost):
        lease.check()


@pytest.mark.parametrize("locks", [True, False])
def test_a_second_owner_is_refused(tmp_path: Path, locks: bool, request: pytest.FixtureRequest) -> None:
    if not locks:
        request.getfixturevalue("no_locks")
    lease = acquire(tmp_path)
    with pytest.raises(Held, match=rf"pid {os.getpid()} on .*, heartbeat 0 s ago"):
        acquire(tmp_path)
    lease.check()
    lease.release()
    acquire(tmp_path).release()


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize(
    ("age_s", "changes", "alive"),
    [
        (0, {}, True),
        (EXPIRES_S - 15, {}, True),
        (EXPIRES_S + 5, {}, False),
        (-EXPIRES_S - 5, {}, False),  # a clock that was set back
        (EXPIRES_S + 5, {"pid": None}, False),
        (0, {"pid": "x"}, True),  # not readable: only time tells
        (0, {"surplus": 1}, True),
    ],
)
def test_another_machine_s_lease_counts_until_it_expires(
    tmp_path: Path, age_s: float, changes: dict[str, object], alive: bool, locks: bool, request: pytest.FixtureRequest
) -> None:
    if not locks:
        request.getfixturevalue("no_locks")
    plant(tmp_path, 3, age_s, **changes)
    if alive:
        owner = "another process" if changes else "pid 77 on elsewhere"
        with pytest.raises(Held, match=owner):
            acquire(tmp_path)
        assert [path.name for path in tmp_path.glob("lease.*")] == ["lease.3"]
        return
    lease = acquire(tmp_path)
    assert [path.name for path in tmp_path.glob("lease.*")] == ["lease.4"]
    lease.check()
    lease.release()


@pytest.mark.parametrize("locks", [True, False])
def test_a_dead_process_of_this_machine_is_replaced_at_once(
    tmp_path: Path, locks: bool, request: pytest.FixtureRequest
) -> None:
    if not locks:
        request.getfixturevalue("no_locks")
    plant(tmp_path, machine=leases._machine(), pid=dead_pid())
    seen = look(tmp_path)
    assert seen is not None
    assert not seen.alive
    acquire(tmp_path).release()


def test_where_there_are_locks_a_reused_process_id_protects_nothing(tmp_path: Path) -> None:
    plant(tmp_path, machine=leases._machine(), pid=os.getpid())
    acquire(tmp_path).release()


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", "[" * 100_000, "\udcff"])
def test_an_unreadable_lease_protects_until_it_expires(tmp_path: Path, text: str) -> None:
    path = plant(tmp_path)
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(Held, match="another process"):
        acquire(tmp_path)
    os.utime(path, (1, 1))
    acquire(tmp_path).release()


def test_other_files_are_no_leases(tmp_path: Path) -> None:
    for name in ("lease.", "lease.x", "lease.1.bak", "lease.١", "lease.99999999999", "lease.-1"):
        (tmp_path / name).write_text("")
    assert look(tmp_path) is None
    assert look(tmp_path / "absent" if (tmp_path / "absent").mkdir() else tmp_path) is None


def test_the_owner_renews_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 0.01)
    lease = acquire(tmp_path)
    os.utime(tmp_path / "lease.1", (1, 1))
    deadline = time.monotonic() + 60
    while (tmp_path / "lease.1").stat().st_mtime < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lease.release()


@pytest.mark.usefixtures("no_locks")
def test_an_owner_that_slept_too_long_loses_its_lease(tmp_path: Path) -> None:
    first = acquire(tmp_path)
    os.utime(tmp_path / "lease.1", (1, 1))
    second = acquire(tmp_path)
    with pytest.raises(LeaseLost, match=f"it is held by pid {os.getpid()}"):
        first.check()
    first.release()
    second.check()
    assert (tmp_path / "lease.2").exists()
    second.release()
    with pytest.raises(LeaseLost, match="its lease is gone"):
        first.check()


@pytest.mark.usefixtures("no_locks")
def test_an_owner_that_slept_and_was_not_replaced_goes_on(tmp_path: Path) -> None:
    lease = acquire(tmp_path)
    os.utime(tmp_path / "lease.1", (1, 1))
    lease.check()
    with pytest.raises(Held):
        acquire(tmp_path)
    lease.release()


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("expired", [False, True])
def test_of_many_contenders_one_wins(tmp_path: Path, expired: bool) -> None:
    """Without file locks, for a free folder and for one whose owner is gone."""

    def contend(folder: Path) -> Lease | None:
        try:
            return acquire(folder)
        except Held:
            return None

    for round_ in range(30):
        folder = tmp_path / str(round_)
        folder.mkdir()
        if expired:
            plant(folder, 5, age_s=1000)
        with ThreadPoolExecutor(8) as pool:
            won = [lease for lease in pool.map(contend, [folder] * 8) if lease]
        assert len(won) == 1
        won[0].check()
        assert len(list(folder.glob("lease.*"))) == 1
        won[0].release()


@pytest.mark.parametrize("locks", [True, False])
def test_a_newer_lease_wins_over_an_old_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool, request: pytest.FixtureRequest
) -> None:
    """One contender sees the folder free, another one has taken over meanwhile."""
    if not locks:
        request.getfixturevalue("no_locks")
    looks = [None]
    real = leases.look
    monkeypatch.setattr(leases, "look", lambda *how, **clock: looks.pop() if looks else real(*how, **clock))
    plant(tmp_path, 2)
    with pytest.raises(Held, match="pid 77 on elsewhere"):
        acquire(tmp_path)
    assert [path.name for path in tmp_path.glob("lease.*")] == ["lease.2"]
    os.utime(tmp_path / "lease.2", (1, 1))
    lease = acquire(tmp_path)
    plant(tmp_path, 4)
    with pytest.raises(LeaseLost, match="it is held by pid 77 on elsewhere"):
        lease.check()
    lease.release()
    assert [path.name for path in tmp_path.glob("lease.*")] == ["lease.4"]


OWNER = """
import sys
from pathlib import Path
from qevict_bench import leases
leases.BEAT_S = 0.05
lease = leases.acquire(Path(sys.argv[1]))
print("held", flush=True)
for line in sys.stdin:
    try:
        lease.check()
        print("mine", flush=True)
    except leases.LeaseLost as lost:
        print(f"lost: {lost}", flush=True)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    started = []

    def start() -> subprocess.Popen[str]:
        child = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdin=-1, stdout=-1, text=True)
        started.append(child)
        assert child.stdout
        assert child.stdout.readline() == "held\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def ask(child: subprocess.Popen[str]) -> str:
    assert child.stdin
    assert child.stdout
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline()


def test_death_by_kill_9_frees_the_folder_at_once(
    tmp_path: Path, owner: Callable[[], subprocess.Popen[str]], no_locks: None
) -> None:
    child = owner()
    with pytest.raises(Held, match=f"pid {child.pid} on "):
        acquire(tmp_path)
    child.kill()
    child.wait()
    acquire(tmp_path).release()


def stop(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)


def test_a_stopped_process_that_holds_the_file_lock_is_named_with_a_remedy(
    tmp_path: Path, owner: Callable[[], subprocess.Popen[str]]
) -> None:
    child = owner()
    stop(child)
    os.utime(tmp_path / "lease.1", (time.time() - 300,) * 2)
    seen = look(tmp_path)
    assert seen is not None
    assert (seen.alive, seen.stalled) == (False, True)
    remedy = f"it stands still: continue it with kill -CONT {child.pid}, or end it with kill -9 {child.pid}"
    with pytest.raises(Held, match=rf"pid {child.pid} on .*, heartbeat 30\d s ago \({remedy}\)"):
        acquire(tmp_path)
    child.send_signal(signal.SIGCONT)
    assert ask(child) == "mine\n"  # nobody could take it away
    stop(child)
    os.utime(tmp_path / "lease.1", (1, 1))
    child.kill()
    child.wait()
    acquire(tmp_path).release()


def test_a_lock_that_outlives_its_owner_is_not_blamed_on_the_dead(tmp_path: Path) -> None:
    """As when a process that it forked lives on."""
    pid = dead_pid()
    plant(tmp_path, machine=leases._machine(), pid=pid)
    with open(tmp_path / "lock", "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(
            Held, match=f"a process that pid {pid} on elsewhere, .* left behind, or by one that is just"
        ):
            acquire(tmp_path)
    acquire(tmp_path).release()


def test_another_machine_s_process_that_holds_the_lock_is_to_be_ended_there(tmp_path: Path) -> None:
    plant(tmp_path, age_s=300)
    with open(tmp_path / "lock", "ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(Held, match=r"continue it with kill -CONT 77 on elsewhere, or end it with kill -9 77"):
            acquire(tmp_path)


def test_a_reused_process_id_and_an_uncollected_child_are_no_owners(tmp_path: Path) -> None:
    me = {"machine": leases._machine(), "pid": os.getpid()}
    born, _ = leases._born(os.getpid())
    for changes, alive in (({"born": born}, True), ({"born": born + 1}, False), ({"born": 0}, True)):
        plant(tmp_path, **me | changes)
        seen = look(tmp_path)
        assert seen is not None
        assert (seen.alive, seen.stalled) == (alive, False)
    child = subprocess.Popen([sys.executable, "-c", ""])
    while Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "Z":
        time.sleep(0.01)
    plant(tmp_path, machine=leases._machine(), pid=child.pid)
    seen = look(tmp_path)
    assert seen is not None
    assert not seen.alive
    child.wait()


def test_a_full_disk_leaves_no_file_in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        acquire(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(OSError, match="No space left"):
        acquire(tmp_path)
    assert (tmp_path / "lock").exists()


def test_a_stopped_process_is_replaced_after_expiry_and_then_says_so(
    tmp_path: Path, owner: Callable[[], subprocess.Popen[str]], no_locks: None
) -> None:
    child = owner()
    assert ask(child) == "mine\n"
    stop(child)
    with pytest.raises(Held):
        acquire(tmp_path)
    os.utime(tmp_path / "lease.1", (1, 1))  # a minute later
    lease = acquire(tmp_path)
    child.send_signal(signal.SIGCONT)
    assert ask(child).startswith(f"lost: it is held by pid {os.getpid()}")
    lease.check()
    lease.release()
