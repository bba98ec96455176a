"""SIGKILL at random moments, twenty times, on the real runner and engine: the rows are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KILLS = 20
VOLATILE = ("ttft_s", "decode_s", "git_sha")
COMMAND = [
    "model=tiny",
    "model.dtype=bfloat16",  # batches matter to the answers
    "method=qevict",
    "budget=0.3",
    "batch_size=2",
    "task.subsets=[niah_single_1,niah_multivalue]",
    "task.context_length=1536",
]


def start(results_dir: Path, limit: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "run.py"), *COMMAND, f"limit={limit}", f"results_dir={results_dir}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    with open(results_dir.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, cwd=results_dir.parent, env=environment, stdout=log, stderr=log)


def wait_for_lease(results_dir: Path, child: subprocess.Popen[bytes]) -> None:
    """Until `child` works on a run (its lease names it), or has ended."""
    pid = f'"pid": {child.pid},'
    while child.poll() is None and not any(pid in path.read_text() for path in results_dir.glob("*/lease.*")):
        time.sleep(0.005)


def num_lines(results_dir: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in results_dir.glob("*/rows.jsonl"))


def rows_of(results_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows per run, as they stand in the files."""
    return {
        path.parent.name: [
            {name: value for name, value in json.loads(line).items() if name not in VOLATILE}
            for line in path.read_text().splitlines()
        ]
        for path in results_dir.glob("*/rows.jsonl")
    }


@pytest.mark.slow
def test_twenty_kills_leave_the_rows_of_an_undisturbed_run(tmp_path: Path) -> None:
    calm, stormy = tmp_path / "calm", tmp_path / "stormy"
    limit = 40
    child = start(calm, limit)
    wait_for_lease(calm, child)
    begun = time.monotonic()
    while not num_lines(calm) and child.poll() is None:
        time.sleep(0.005)
    loading_s = time.monotonic() - begun
    assert child.wait() == 0, calm.with_suffix(".log").read_text()
    work_s = time.monotonic() - begun - loading_s
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}, undisturbed {work_s:.1f} s of work after {loading_s:.1f} s")
    draws = random.Random(seed)
    for number in range(KILLS):
        left_s = work_s * (1 - num_lines(stormy) / num_lines(calm))
        child = start(stormy, limit)
        if draws.random() < 0.9:  # else at any moment, imports included
            wait_for_lease(stormy, child)
        moment = draws.uniform(0, loading_s + left_s * 1.5 / (KILLS + 3 - number))  # a fifth is left at the end
        time.sleep(moment)
        assert child.poll() is None, stormy.with_suffix(".log").read_text()
        child.send_signal(signal.SIGKILL)
        child.wait()
        print(f"kill {number + 1} after {moment:.2f} s: {num_lines(stormy)} of {num_lines(calm)} rows")
    child = start(stormy, limit)
    assert child.wait() == 0, stormy.with_suffix(".log").read_text()
    expected, found = rows_of(calm), rows_of(stormy)
    assert found == expected  # the same lines in the same order, so no example twice
    assert [len(rows) for rows in found.values()] == [2 * limit] * 2
    for rows in found.values():
        assert len({row["example_id"] for row in rows}) == len(rows)
    summaries = [
        {path.parent.name: json.loads(path.read_text())["scores"] for path in folder.glob("*/summary.json")}
        for folder in (calm, stormy)
    ]
    assert summaries[0] == summaries[1]
