"""Runs on Weights & Biases, offline and read back by its own tool; and trackers that do not work."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fakes
import pytest

from qevict_bench import runner
from qevict_bench.summary import Summary
from qevict_bench.tracking import Wandb

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model, and W&B's files nowhere but in tmp_path."""
    monkeypatch.setattr(runner, "describe", fakes.describe)
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-home"))
    monkeypatch.delenv("WANDB_MODE", raising=False)


def tracked(tmp_path: Path, **changes: Any) -> Summary:
    time.sleep(1.02 - time.time() % 1)  # W&B names folders by the second
    tracker = {"_target_": "qevict_bench.tracking.Wandb", "dir": str(tmp_path)}
    return runner.run(fakes.config(tmp_path / "runs", tracker=tracker, **changes), fakes.ENGINE)


def files_of(tmp_path: Path, run_id: str) -> list[Path]:
    """What W&B wrote of a run, in order."""
    return sorted(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))


def records(path: Path) -> list[dict[str, Any]]:
    """By W&B's own reader."""
    tool = Path(sys.executable).with_name("wandb")
    text = subprocess.run([tool, "leet", "inspect", "--json", path], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in text.splitlines()]


def logged(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Everything by step."""
    steps: dict[int, dict[str, Any]] = {}
    for record in found:
        if record["type"] == "history":
            steps.setdefault(record["history"]["item"]["_step"], {}).update(record["history"]["item"])
    return steps


def final(found: list[dict[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for record in found:
        if record["type"] == "summary":
            values |= record["summary"]["update"]
    return values


def rows_of(tmp_path: Path, run_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "runs" / run_id / "rows.jsonl").read_text().splitlines()]


def test_a_run_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    summary = tracked(tmp_path, metrics__fidelity=True)
    [path] = files_of(tmp_path, summary.run_id)
    found, rows = records(path), rows_of(tmp_path, summary.run_id)
    steps, values = logged(found), final(found)
    assert sorted(steps) == list(range(1, len(rows) + 1))
    for number, row in enumerate(rows, 1):
        assert steps[number]["example/score"] == 100 * row["score"]
        assert steps[number]["example/bytes/payload.full"] == row["bytes"]["payload.full"]
        assert steps[number]["example/fidelity/gold.kl"] == row["fidelity"]["gold.kl"]
    hard = [100 * row["score"] for row in rows if row["subset"] == "hard"]
    assert steps[len(rows)]["running/hard"] == sum(hard) / len(hard)
    assert values["macro"] == summary.macro
    assert values["scores/hard"] == summary.scores["hard"]
    assert summary.memory is not None
    assert values["memory/mean"] == summary.memory.mean
    assert values["bytes/payload.full"] == summary.bytes["payload.full"]
    [about] = [record["run"] for record in found if record["type"] == "run"]
    assert (about["run_id"], about["project"]) == (summary.run_id, "qevict-bench")
    assert about["config"]["update"]["budget"] == "0.2"
    assert found[-1]["exit"]["exit_code"] == 0
    [table] = path.parent.glob("files/media/table/*.json")
    assert [line[0] for line in json.loads(table.read_text())["data"]] == [row["example_id"] for row in rows]


def test_what_was_sent_is_not_sent_again(tmp_path: Path) -> None:
    run_id = tracked(tmp_path, limit=2).run_id
    tracked(tmp_path, limit=2)
    assert len(files_of(tmp_path, run_id)) == 1
    tracked(tmp_path, limit=3)
    first, second = files_of(tmp_path, run_id)
    assert sorted(logged(records(first))) == [1, 2, 3, 4]
    assert sorted(logged(records(second))) == [5, 6]
    assert final(records(second))["num_examples"] == 6


def test_a_finished_run_is_sent_later(tmp_path: Path) -> None:
    run_id = runner.run(fakes.config(tmp_path / "runs"), fakes.ENGINE).run_id
    assert not files_of(tmp_path, run_id)
    tracked(tmp_path)
    [path] = files_of(tmp_path, run_id)
    assert sorted(logged(records(path))) == list(range(1, 9))


def test_mended_errors_and_what_follows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "easy-0001")
    run_id = tracked(tmp_path, limit=2).run_id
    monkeypatch.delenv("FAKE_RUNTIMEERROR")
    tracked(tmp_path, limit=3)
    first, second = files_of(tmp_path, run_id)
    assert sorted(logged(records(first))) == [1, 2, 3, 4]
    steps = logged(records(second))
    assert sorted(steps) == [5, 6, 7]
    assert [steps[5][f"example/{name}"] for name in ("subset", "status")] == ["easy", "ok"]


def test_a_summary_of_other_examples_is_sent(tmp_path: Path) -> None:
    """A block is run whole: a larger limit may need no new row."""
    run_id = tracked(tmp_path, limit=2, batch_size=4).run_id
    tracked(tmp_path, limit=4, batch_size=4)
    assert [final(records(path))["num_examples"] for path in files_of(tmp_path, run_id)] == [4, 8]


def test_a_run_that_starts_over_is_another_run(tmp_path: Path) -> None:
    run_id = tracked(tmp_path, limit=2).run_id
    tracked(tmp_path, limit=2, resume="restart")
    assert len(files_of(tmp_path, run_id)) == 1
    [again] = tmp_path.glob(f"wandb/offline-run-*-{run_id}-1/run-{run_id}-1.wandb")
    assert sorted(logged(records(again))) == [1, 2, 3, 4]


def test_a_tracker_that_fails_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "wandb").write_text("in the way")
    summary = tracked(tmp_path)
    assert len(rows_of(tmp_path, summary.run_id)) == 8
    assert any(f"W&B: run {summary.run_id} was not sent in full" in text for text in caplog.messages)
    assert not (tmp_path / "runs" / summary.run_id / "wandb.json").exists()


def test_a_service_that_never_answers(tmp_path: Path) -> None:
    """Something accepts, and says nothing: the run is done, says so, and ends soon after its time."""
    script = (
        "import os, sys, fakes; from qevict_bench import runner, tracking; runner.describe = fakes.describe; "
        "tracker = {'_target_': 'qevict_bench.tracking.Wandb', 'mode': 'online', 'timeout_s': 2.0}; "
        "tracker['dir'] = sys.argv[1]; "
        "runner.run(fakes.config(sys.argv[1] + '/runs', tracker=tracker), fakes.ENGINE); "
        "print(len(tracking.PENDING)); tracking.leave(0)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests")]),
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "WANDB_API_KEY": "0" * 40,
        }
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    [path] = [path for path in tmp_path.glob("runs/*/rows.jsonl") if "full_kv" not in path.read_text()]
    assert len(path.read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "disabled"}, "tracker.mode='disabled'|mode='disabled' is unknown; use offline or online"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 positive"),
        ({"predictions": -1}, "predictions=-1 must be 0 or more"),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Wandb(**changes)


def test_a_terminated_run_closes_its_tracker_first(tmp_path: Path) -> None:
    """SIGTERM in the middle: exit code 143, what was written was sent, and the command goes on from there."""
    fields = ["model=tiny", "task=needle", "task.lengths=[640]", "task.depths=[0.5]", "budget=0.5", "limit=400"]
    fields += ["batch_size=1", f"results_dir={tmp_path}/runs", "tracker=wandb", f"tracker.dir={tmp_path}"]
    environment = {**os.environ, "QEVICT_BENCH_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, ROOT / "run.py", *fields], env=environment, stderr=-1, stdout=-1, text=True
    )
    try:
        deadline = time.monotonic() + 240
        while not (found := [p for p in tmp_path.glob("runs/*/rows.jsonl") if p.read_text().count("\n") >= 3]):
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < deadline, "no rows in four minutes"
            time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == 143, errors
    assert errors.rstrip().endswith("error: interrupted by SIGTERM; re-issue the command to continue")
    run_id = found[0].parent.name
    [path] = files_of(tmp_path, run_id)
    read = records(path)
    assert read[-1]["exit"]["exit_code"] == 1
    sent = json.loads((found[0].parent / "wandb.json").read_text())
    assert sorted(logged(read)) == list(range(1, sent["lines"] + 1))
    assert not sent["summary"]
    num = len(rows_of(tmp_path, run_id))
    assert sent["lines"] in (num, num - 1)  # the signal may come between the disk and the tracker
