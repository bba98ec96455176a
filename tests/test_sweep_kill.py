"""24 cells killed with SIGKILL at random twenty times and issued again: the rows are those of an undisturbed sweep."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_kill import KILLS, rows_of

import run as cli

CELLS = 24
COMMAND = [
    *("-m", "model=tiny", "model.dtype=bfloat16", "task=ruler", "task.context_length=1536", "batch_size=1", "limit=2"),
    *("task.subsets=[niah_single_1,niah_multivalue]", "method=snapkv,h2o,streaming_llm,tova,qevict,qevict_paper"),
    "budget=0.4,0.3,0.25,0.2",
]


class Child:
    """A process that carries out the sweep; it begins with all imports done."""

    def __init__(self, results_dir: Path) -> None:
        self.pid, self.results_dir = os.fork(), results_dir
        if not self.pid:
            code = 1
            try:
                os.chdir(results_dir.parent)
                log = os.open(results_dir.with_suffix(".log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
                for stream in (1, 2):
                    os.dup2(log, stream)
                sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
                code = cli.command_line([*COMMAND, f"results_dir={results_dir}"])
            finally:
                os._exit(code)

    def running(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def log(self) -> str:
        return self.results_dir.with_suffix(".log").read_text()


def num_rows(results_dir: Path) -> int:
    """In the runs' files and in those that are not merged yet."""
    files = [*results_dir.glob("*/rows.jsonl"), *results_dir.glob("*/workers/*/rows.jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in files if path.exists())


def wait_for_work(child: Child) -> None:
    """Until the process takes part in a run (its lease names it), or has ended."""
    pid = f'"pid": {child.pid},'
    while child.running() and not any(pid in text(path) for path in child.results_dir.glob("*/workers/*/lease.*")):
        time.sleep(0.01)


def text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def sorted_rows(results_dir: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: sorted(rows, key=lambda row: (row["subset"], row["index"])) for name, rows in rows_of(results_dir).items()
    }


@pytest.mark.slow
def test_twenty_kills_leave_the_rows_of_an_undisturbed_sweep(tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    begun = time.monotonic()
    child = Child(calm)
    wait_for_work(child)
    planning_s = time.monotonic() - begun
    assert child.wait() == 0, child.log
    work_s = time.monotonic() - begun - planning_s
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}, undisturbed {work_s:.1f} s of work after {planning_s:.1f} s")
    draws = random.Random(seed)
    for number in range(KILLS):
        child = Child(stormy)
        if draws.random() < 0.9:  # else while the cells are planned
            wait_for_work(child)
        left_s = work_s * (1 - num_rows(stormy) / num_rows(calm))
        time.sleep(draws.uniform(0, left_s * 1.5 / (KILLS + 3 - number)))
        assert child.running(), child.log
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        print(f"kill {number + 1}: {num_rows(stormy)} of {num_rows(calm)} rows")
    child = Child(stormy)
    assert child.wait() == 0, child.log
    expected, found = sorted_rows(calm), sorted_rows(stormy)
    assert len(expected) == CELLS + 1  # with FullKV's
    assert found == expected  # no example twice
    assert not [path for name in ("workers", "claims") for path in stormy.glob(f"*/{name}")]
