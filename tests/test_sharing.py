"""Runs that several processes share: blocks by lease, one file each, late rows refused, on stand-ins (fakes.py)."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from test_runner import num_lines, rows_of

from qevict_bench import results, runner
from qevict_bench.leases import Held, LeaseLost
from qevict_bench.results import RunFailed, open_run, read_rows
from qevict_bench.rowfiles import Damaged
from qevict_bench.rows import Row
from qevict_bench.runner import Company
from qevict_bench.sharing import SharedFolder, open_shared
from qevict_bench.workers import claimed_line, living, unmerged


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "describe", fakes.describe)


class Child:
    """A process that carries out the default run on the stand-ins; it has all imports of this one."""

    def __init__(self, results_dir: Path, log: Path, changes: dict[str, Any]) -> None:
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                logging.basicConfig(filename=log, force=True)
                runner.run(fakes.config(results_dir, **changes), fakes.ENGINE)
                code = 0
            except BaseException:
                logging.exception("it failed")
            finally:
                os._exit(code)
        self.code: int | None = None
        self.log = log

    def poll(self) -> int | None:
        """Exit code, if it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.01)
        assert self.code is not None
        return self.code

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@pytest.fixture
def start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Child]]:
    """Starts a process with these changes of the settings."""
    logs = tmp_path_factory.mktemp("logs")
    started: list[Child] = []

    def call(**changes: Any) -> Child:
        started.append(Child(tmp_path, logs / str(len(started)), changes))
        return started[-1]

    yield call
    for child in started:
        if child.poll() is None:
            child.send(signal.SIGKILL)
            child.wait()


def until(condition: Callable[[], object], child: Child) -> None:
    while not condition():
        assert child.poll() is None, child.log.read_text()
        time.sleep(0.005)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    """Takes part in the run of the default settings."""
    job = runner.make_plan(fakes.config(tmp_path)).job

    def patient(owner: str) -> None:
        raise Held(owner)

    return lambda **how: open_shared(tmp_path / job.run_id, job.config, job.environment, wait=patient, **how)


def row_of(folder: SharedFolder, index: int, **changes: Any) -> Row:
    job = runner.make_plan(fakes.config(folder.path.parent)).job
    error = {"status": "infeasible", "error": "too small"} | changes
    return replace(job.row, subset="easy", example_id=f"easy-{index:04}", index=index, **error)


def left_over(path: Path) -> list[str]:
    return [name for name in ("workers", "claims") if (path / name).exists()]


def test_a_shared_run_is_that_of_one_process(tmp_path: Path) -> None:
    alone = runner.run(fakes.config(tmp_path / "alone", batch_size=2, limit=5), fakes.ENGINE)
    shared = runner.run(fakes.config(tmp_path / "shared", batch_size=2, limit=5), fakes.ENGINE, None, Company())
    assert replace(shared, timings=None) == replace(alone, timings=None)
    for name in (alone.run_id, alone.facts.reference_id):
        assert rows_of(tmp_path / "shared" / name) == rows_of(tmp_path / "alone" / name)
        assert {path.name for path in (tmp_path / "shared" / name).iterdir()} == {
            *("config.yaml", "env.json", "lock", "rows.jsonl", "summary.json", "wanted.json")
        }


def test_a_shared_subset_with_fewer_examples_than_limit_is_complete(tmp_path: Path) -> None:
    cfg = fakes.config(tmp_path, task__size=3, limit=5, batch_size=2)
    summary = runner.run(cfg, fakes.ENGINE, None, Company())
    assert (summary.num_examples, summary.facts.available) == (6, {"easy": 3, "hard": 3})


def test_four_processes_run_every_example_once(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., Child],
) -> None:
    """Of the method and of its reference."""
    calls = tmp_path_factory.mktemp("calls") / "calls"
    monkeypatch.setenv("FAKE_CALLS", str(calls))
    monkeypatch.setenv("FAKE_SLEEP_S", "0.05")
    options = {"batch_size": 2, "limit": 10}
    children = [start(**options, shard__count=4, shard__index=index) for index in range(4)]
    for child in children:
        assert child.wait() == 0, child.log.read_text()
    plan = runner.make_plan(fakes.config(tmp_path, **options))
    for job in (plan.job, plan.reference):
        rows = rows_of(tmp_path / job.run_id)
        assert Counter(row["example_id"] for row in rows) == Counter(
            f"{subset}-{i:04}" for subset in ("easy", "hard") for i in range(10)
        )
        assert left_over(tmp_path / job.run_id) == []
    assert max(Counter(calls.read_text().splitlines()).values()) == 1
    alone = runner.run(fakes.config(tmp_path / "alone", **options), fakes.ENGINE)
    assert rows_of(tmp_path / alone.run_id) == rows_of(tmp_path / "alone" / alone.run_id)


def test_a_stopped_process_loses_its_block_and_its_late_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Child]
) -> None:
    """Its leases are dated back, as if a minute without heartbeats had gone by."""
    path = tmp_path / runner.make_plan(fakes.config(tmp_path)).job.run_id
    monkeypatch.setenv("FAKE_SLEEP_S", "0.5")
    child = start(shard__count=2)
    monkeypatch.delenv("FAKE_SLEEP_S")
    until(lambda: list(path.glob("claims/*/lease.*")), child)
    time.sleep(0.1)  # its engine sleeps
    child.send(signal.SIGSTOP)
    while Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    for lease in [*path.glob("claims/*/lease.*"), *path.glob("workers/*/lease.*")]:
        os.utime(lease, (1, 1))
    runner.run(fakes.config(tmp_path, shard__count=2, shard__index=1), fakes.ENGINE)
    assert num_lines(path / "rows.jsonl") == 8
    child.send(signal.SIGCONT)
    assert child.wait() == 0, child.log.read_text()
    assert "lost examples 0 to 0 of easy" in child.log.read_text()
    assert num_lines(path / "rows.jsonl") == len(read_rows(path / "rows.jsonl")[0]) == 8
    assert left_over(path) == []


def num_rows(path: Path) -> int:
    return sum(num_lines(file) for file in path.glob("workers/*/rows.jsonl"))


def test_a_killed_process_is_replaced_at_once_and_its_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Child]
) -> None:
    path = tmp_path / runner.make_plan(fakes.config(tmp_path)).job.run_id
    monkeypatch.setenv("FAKE_SLEEP_S", "0.2")
    child = start(shard__count=2)
    monkeypatch.delenv("FAKE_SLEEP_S")
    until(lambda: num_rows(path) > 1, child)
    child.send(signal.SIGKILL)
    child.wait()
    (file,) = path.glob("workers/*/rows.jsonl")
    kept = [json.loads(line)["row"] for line in file.read_bytes().splitlines()]
    with open(file, "ab") as stream:
        stream.write(b'{"claim": 1, "ro')  # torn
    runner.run(fakes.config(tmp_path, shard__count=2), fakes.ENGINE)
    rows = [json.loads(line) for line in (path / "rows.jsonl").read_bytes().splitlines()]
    assert len(rows) == 8
    assert all(row in rows for row in kept)  # with their timings
    assert left_over(path) == []


def test_rows_of_killed_processes_serve_a_run_of_one(
    tmp_path: Path, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SharedFolder, "close", SharedFolder._leave)  # without merging
        with opened() as folder, folder.claim("easy", 0, 1):
            folder.append(row_of(folder, 0))
    summary = runner.run(fakes.config(tmp_path), fakes.ENGINE)
    assert (summary.num_examples, summary.num_infeasible) == (7, 1)


def test_a_second_command_that_shares_with_nobody_stops(tmp_path: Path, opened: Callable[..., Any]) -> None:
    with opened() as folder:
        with pytest.raises(ValueError, match=rf"run {folder.path.name} is held by pid {os.getpid()} on .*; wait for"):
            runner.run(fakes.config(tmp_path), fakes.ENGINE)
        with pytest.raises(Held, match=f"pid {os.getpid()}"), opened(first=True):
            pass
        with pytest.raises(Held, match=f"pid {os.getpid()}"):
            runner.run(fakes.config(tmp_path), fakes.ENGINE, None, Company(first=True))
        assert len(living(folder.path)) == 1


def test_nobody_joins_a_run_that_is_not_shared(tmp_path: Path, opened: Callable[..., Any]) -> None:
    job = runner.make_plan(fakes.config(tmp_path)).job
    with open_run(tmp_path / job.run_id, job.config, job.environment), pytest.raises(Held), opened():
        pass


def test_a_run_in_which_nothing_was_done_leaves_no_folder(tmp_path: Path, opened: Callable[..., Any]) -> None:
    with opened() as folder, opened() as other:
        assert len(living(folder.path)) == 2
        assert other.rows == {}
    assert not list(tmp_path.iterdir())


def test_a_block_is_one_process_s_at_a_time(opened: Callable[..., Any]) -> None:
    with opened() as one, opened() as two:
        with one.claim("easy", 0, 2) as mine, two.claim("easy", 0, 2) as theirs:
            assert (mine, theirs) == (True, False)
            assert not two.free("easy", 0)
            one.append(row_of(one, 0))
        assert two.free("easy", 0)
        with two.claim("easy", 0, 2) as mine:
            assert mine
            assert set(two.rows) == {"easy-0000"}


def test_a_block_taken_over_takes_no_more_rows_of_its_old_owner(opened: Callable[..., Any]) -> None:
    with opened() as one, opened() as two:
        with one.claim("easy", 0, 2):
            one.append(row_of(one, 0))
            for lease in one.path.glob("claims/*/lease.*"):
                os.utime(lease, (1, 1))
            with two.claim("easy", 0, 2) as mine:
                assert mine
                with pytest.raises(LeaseLost):
                    one.append(row_of(one, 1))
                two.append(row_of(two, 1, error="mine"))
        one.refresh()
        assert [row.error for row in one.rows.values()] == ["too small", "mine"]


def test_a_row_written_between_losing_the_block_and_noticing_does_not_count(opened: Callable[..., Any]) -> None:
    with opened() as one, opened() as two:
        with one.claim("easy", 0, 2):
            for lease in one.path.glob("claims/*/lease.*"):
                os.utime(lease, (1, 1))
            with two.claim("easy", 0, 2):
                two.append(row_of(two, 0, error="mine"))
            one._stream.write(claimed_line(1, row_of(one, 0, error="late")))
        assert [row.error for row in unmerged(one.path, {})] == ["mine"]
        two.refresh()
        assert two.rows["easy-0000"].error == "mine"
    assert [row.error for row in read_rows(one.path / "rows.jsonl")[0].values()] == ["mine"]


def test_a_retried_example_counts_although_its_block_was_free(opened: Callable[..., Any]) -> None:
    with opened() as one, opened() as two:
        for folder, status in ((one, "error"), (two, "infeasible")):
            folder.refresh()
            with folder.claim("easy", 0, 1):
                folder.append(row_of(folder, 0, status=status))
        one.refresh()
        assert one.rows["easy-0000"].status == "infeasible"
    assert read_rows(one.path / "rows.jsonl")[0]["easy-0000"].status == "infeasible"


def test_a_process_that_was_given_up_joins_again(opened: Callable[..., Any]) -> None:
    with opened() as one:
        for lease in one.path.glob("workers/*/lease.*"):
            os.utime(lease, (1, 1))
        with opened() as two:
            assert len(living(two.path)) == 1
            with one.claim("easy", 0, 1):
                one.append(row_of(one, 0))
            assert len(living(two.path)) == 2
    assert len(read_rows(one.path / "rows.jsonl")[0]) == 1


def test_rows_that_a_process_writes_while_another_one_merges_are_not_lost(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes, and leaves, between the reading of its file and the removal of what those that are gone have left."""

    def and_then(path: Path, merged: Any) -> list[Row]:
        found = unmerged(path, merged)
        if not folder._stream.closed:
            with folder.claim("easy", 0, 1):
                folder.append(row_of(folder, 0))
            folder._leave()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(SharedFolder, "close", lambda folder: None)
        with opened() as folder:
            pass
    with opened():
        monkeypatch.setattr(results, "unmerged", and_then)
    with opened() as other:
        assert set(other.rows) == {"easy-0000"}


def test_damage_in_a_file_of_a_process_is_named(tmp_path: Path, opened: Callable[..., Any]) -> None:
    with opened() as folder:
        other = folder.path / "workers" / "other"
        other.mkdir()
        line = json.loads(claimed_line(1, row_of(folder, 0)))
        for values in ([], {"claim": 1}, {**line, "claim": "x"}, {**line, "row": {**line["row"], "run_id": "x"}}):
            (other / "rows.jsonl").write_text(json.dumps(values) + "\n")
            folder._tails.clear()
            with pytest.raises(Damaged, match=r"workers/other/rows.jsonl:1 is damaged .*repair or delete that line"):
                folder.refresh()
        (other / "rows.jsonl").unlink()


def test_an_error_is_tried_once_per_command(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path_factory.mktemp("calls") / "calls"
    monkeypatch.setenv("FAKE_CALLS", str(calls))
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "easy-0001")
    for times in (1, 2):
        assert runner.run(fakes.config(tmp_path), fakes.ENGINE, None, Company()).num_errors == 1
        assert calls.read_text().splitlines().count("1 easy-0001") == times
    monkeypatch.delenv("FAKE_RUNTIMEERROR")
    assert runner.run(fakes.config(tmp_path), fakes.ENGINE, None, Company()).num_errors == 0


def test_a_shared_run_goes_on_under_the_same_conditions_only(tmp_path: Path, opened: Callable[..., Any]) -> None:
    job = runner.make_plan(fakes.config(tmp_path)).job
    other = replace(job.environment, code_hash="other")
    with (
        opened() as folder,
        pytest.raises(ValueError, match="begun under other conditions .code .* -> other"),
        open_shared(folder.path, job.config, other, wait=lambda owner: None),
    ):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard__count": 0}, "shard.count=0 is not positive"),
        ({"shard__count": 2, "shard__index": 2}, "shard.index=2 is out of range; give 0 to 1"),
        ({"shard__count": 2, "resume": "restart"}, "resume=restart with shard.count > 1"),
        ({"shard__size": 2}, "shard.size=2 is no field"),
    ],
)
def test_mistakes_in_a_shard_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner.run(fakes.config(tmp_path, **change), fakes.ENGINE)


def test_a_full_disk_leaves_earlier_rows_intact(
    tmp_path: Path, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left")

    with opened() as folder, folder.claim("easy", 0, 2):
        folder.append(row_of(folder, 0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(RunFailed, match=r"cannot be written .No space left.; the rows so far are kept"):
                folder.append(row_of(folder, 1))
    assert len(read_rows(folder.path / "rows.jsonl")[0]) == 1
