"""Sweeps on a real Slurm of one node (tests/slurm/up.sh): arrays, failures, preemption, time limits, cancelling."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SWEEP = (
    *("model=tiny", "task=ruler", "task.subsets=[niah_single_1]", "task.context_length=1536", "batch_size=1"),
    *("budget=0.4", "results_dir=runs", "launcher=slurm", "launcher.gpus=null", "launcher.cpus=1", "launcher.mem_gb=1"),
)
pytestmark = pytest.mark.slurm


@dataclass(frozen=True)
class Cluster:
    """What a user has: a folder, and commands."""

    folder: Path
    environment: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "run.py"), *SWEEP, *arguments]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=-1, stderr=-2, text=True)

    def sweep(self, *arguments: str) -> tuple[int, str]:
        child = self.start(*arguments)
        said, _ = child.communicate()
        return child.returncode, said

    def ask(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def jobs(self) -> list[str]:
        return self.ask("squeue", "-h", "-o", "%A %T").splitlines()

    def lines(self) -> list[dict[str, str]]:
        """Rows of all runs but FullKV's, merged or not."""
        files = [*self.folder.glob("runs/*/rows.jsonl"), *self.folder.glob("runs/*/workers/*/rows.jsonl")]
        found = [json.loads(line) for path in files for line in path.read_bytes().splitlines()]
        rows = [values.get("row", values) for values in found]
        return [row for row in rows if row["method"] != "full_kv"]

    def until(self, condition: Callable[[], object], child: subprocess.Popen[str]) -> None:
        while not condition():
            assert child.poll() is None, child.communicate()[0]
            time.sleep(0.2)


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find it."""
    if missing := [
        name for name in ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd") if not shutil.which(name)
    ]:
        pytest.skip(f"{missing[0]} is not installed: see .ci/run")
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("hydra-submitit-launcher is not installed: pip install -e '.[slurm]'")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # munged wants to get there through folders that all may enter
    environment = {**os.environ, "D": str(folder), "SLURM_CONF": str(folder / "etc" / "slurm.conf")}
    environment["OMP_NUM_THREADS"] = "1"
    subprocess.run([str(ROOT / "tests" / "slurm" / "up.sh")], env=environment, check=True)
    yield environment
    subprocess.run([str(ROOT / "tests" / "slurm" / "down.sh")], env=environment, check=False)
    shutil.rmtree(folder)


@pytest.fixture
def cluster(slurm: dict[str, str], tmp_path: Path) -> Iterator[Cluster]:
    yield Cluster(tmp_path, slurm)
    subprocess.run(["scancel", "--user=root"], env=slurm, check=True)
    while subprocess.run(["squeue", "-h"], env=slurm, capture_output=True, check=True).stdout:
        time.sleep(0.2)


def test_an_array_completes_and_a_failing_cell_makes_it_fail(cluster: Cluster) -> None:
    arguments = ("limit=1", "method=snapkv,streaming_llm")
    code, said = cluster.sweep(*arguments)
    assert code == 0, said
    assert sorted(row["method"] for row in cluster.lines()) == ["snapkv", "streaming_llm"]
    before = cluster.ask("sacct", "-n", "-X", "-o", "JobID")
    assert cluster.sweep(*arguments)[0] == 0
    assert cluster.ask("sacct", "-n", "-X", "-o", "JobID") == before  # nothing was submitted
    (file,) = [path for path in cluster.folder.glob("runs/*/rows.jsonl") if b'"snapkv"' in path.read_bytes()]
    file.write_bytes(b"{}\n" + file.read_bytes())
    code, said = cluster.sweep(*arguments)
    assert code == 1, said
    assert "error: 1 of 2 cells of sweep" in said
    assert "damaged: rows.jsonl:1 is damaged" in said


def test_a_preempted_job_is_requeued_and_goes_on(cluster: Cluster) -> None:
    child = cluster.start("limit=40", "method=snapkv")
    cluster.until(lambda: len(cluster.lines()) > 3, child)
    cluster.ask("sbatch", "-p", "high", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 2")
    (job,) = [line.split()[0] for line in cluster.jobs() if "RUNNING" in line][:1]
    cluster.until(lambda: "Restarts=1" in cluster.ask("scontrol", "show", "job", job), child)
    done = len(cluster.lines())
    said, _ = child.communicate()
    assert child.returncode == 0, said
    assert 3 < done < 40
    assert len(cluster.lines()) == len({row["example_id"] for row in cluster.lines()}) == 40


def test_a_job_at_its_time_limit_is_requeued_and_goes_on(cluster: Cluster) -> None:
    child = cluster.start("limit=400", "method=snapkv", "launcher.minutes=1", "hydra.launcher.signal_delay_s=30")
    cluster.until(lambda: len(cluster.lines()) > 3, child)
    (job,) = [line.split()[0] for line in cluster.jobs()]
    cluster.until(lambda: "Restarts=1" in cluster.ask("scontrol", "show", "job", job), child)
    done = len(cluster.lines())
    cluster.until(lambda: len(cluster.lines()) > done, child)
    child.terminate()
    child.communicate()


def test_a_cancelled_job_is_reported(cluster: Cluster) -> None:
    child = cluster.start("limit=400", "method=snapkv")
    cluster.until(lambda: len(cluster.lines()) > 3, child)
    cluster.ask("scancel", "--user=root")
    said, _ = child.communicate()
    assert child.returncode == 1, said
    assert "CANCELLED" in said
    assert "stopped (partial" in said
