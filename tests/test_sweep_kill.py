"""24 cells killed with SIGKILL at random twenty times and issued again: the rows are those of an undisturbed sweep."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_kill import KILLS, ROOT, rows_of

CELLS = 24
COMMAND = [
    *("-m", "model=tiny", "model.dtype=bfloat16", "task=ruler", "task.context_length=1536", "batch_size=2", "limit=6"),
    *("task.subsets=[niah_single_1,niah_multivalue]", "method=snapkv,h2o,streaming_llm,tova,qevict,qevict_paper"),
    "budget=0.4,0.3,0.25,0.2",
]


def start(results_dir: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "run.py"), *COMMAND, f"results_dir={results_dir}"]
    with open(results_dir.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, cwd=results_dir.parent, env=environment, stdout=log, stderr=log)


def num_rows(results_dir: Path) -> int:
    """In the runs' files and in those that are not merged yet."""
    files = [*results_dir.glob("*/rows.jsonl"), *results_dir.glob("*/workers/*/rows.jsonl")]
    return sum(path.read_bytes().count(b"\n") for path in files if path.exists())


def wait_for_work(results_dir: Path, child: subprocess.Popen[bytes]) -> None:
    """Until `child` takes part in a run (its lease names it), or has ended."""
    pid = f'"pid": {child.pid},'
    while child.poll() is None and not any(pid in text(path) for path in results_dir.glob("*/workers/*/lease.*")):
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
    child = start(calm)
    wait_for_work(calm, child)
    loading_s = time.monotonic() - begun
    assert child.wait() == 0, calm.with_suffix(".log").read_text()
    work_s = time.monotonic() - begun - loading_s
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}, undisturbed {work_s:.1f} s of work after {loading_s:.1f} s")
    draws = random.Random(seed)
    for number in range(KILLS):
        child = start(stormy)
        if draws.random() < 0.9:  # else at any moment, imports included
            wait_for_work(stormy, child)
        left_s = work_s * (1 - num_rows(stormy) / num_rows(calm))
        time.sleep(draws.uniform(0, left_s * 1.5 / (KILLS + 3 - number)))
        assert child.poll() is None, stormy.with_suffix(".log").read_text()
        child.send_signal(signal.SIGKILL)
        child.wait()
        print(f"kill {number + 1}: {num_rows(stormy)} of {num_rows(calm)} rows")
    child = start(stormy)
    assert child.wait() == 0, stormy.with_suffix(".log").read_text()
    expected, found = sorted_rows(calm), sorted_rows(stormy)
    assert len(expected) == CELLS + 1  # with FullKV's
    assert found == expected  # no example twice
    assert not [path for name in ("workers", "claims") for path in stormy.glob(f"*/{name}")]
