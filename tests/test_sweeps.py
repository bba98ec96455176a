"""python run.py -m on the tiny model: what is skipped, what goes on, what is reported; status.py over a sweep."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from script_modules import script
from test_leases import plant

import run as cli
from qevict_bench import engine as engine_module
from qevict_bench import local_workers
from qevict_bench.models import ModelSpec
from qevict_bench.progress import Waiting
from qevict_bench.results import run_id, write_atomic
from qevict_bench.rowfiles import Damaged
from qevict_bench.sweeps import Cell, Sweep, labels, read_sweeps, stand, table

status = script("status")
SWEEP = (
    *("-m", "model=tiny", "task=ruler", "task.subsets=[niah_single_1]", "task.context_length=1536", "limit=1"),
    *("batch_size=1", "method=snapkv,streaming_llm", "budget=0.4,0.3"),
)
Call = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs SWEEP and more arguments in this process; exit code, lines of stdout and stderr. Rows go to runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        with warnings.catch_warnings():
            code = cli.command_line([*SWEEP, "results_dir=runs", *arguments])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    def call(*arguments: str) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = status.main(["runs", *arguments])
        return code, capsys.readouterr().out.splitlines()

    return call


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that were asked for an answer, in order; those in `broken` raise."""
    asked: list[str] = []
    generate = engine_module.generate

    def counted(loaded: Any, policy: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(type(policy).__name__)
        if f"broken {type(policy).__name__}" in asked:
            raise RuntimeError("no more memory")
        return generate(loaded, policy, *arguments, **options)

    monkeypatch.setattr("qevict_bench.engine.generate", counted)
    return asked


def cells_of(lines: list[str]) -> dict[str, str]:
    """State of each cell in the closing table."""
    at = next(i for i, line in enumerate(lines) if line.startswith("cell "))
    found = [re.split(r"\s{2,}", line) for line in lines[at + 1 :]]
    return {cell: state for cell, *_, state in found}


def test_a_sweep_loads_the_model_once_and_not_at_all_when_it_is_finished(
    sweep: Call, answered: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads, load = [], ModelSpec.load

    def counted(spec: ModelSpec, *attention: str, **named: str) -> Any:
        loads.extend([*attention, *named.values()])  # without: only to be described
        return load(spec, *attention, **named)

    monkeypatch.setattr(ModelSpec, "load", counted)
    code, out, err = sweep()
    assert code == 0, err
    names = [f"method={method} budget={budget}" for method in ("snapkv", "streaming_llm") for budget in (0.4, 0.3)]
    assert cells_of(out) == dict.fromkeys(names, "done")
    assert len(loads) == 1
    assert sorted(answered) == ["FullKV", *["SnapKV"] * 2, *["StreamingLLM"] * 2]
    files = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    caplog.clear()
    caplog.set_level("INFO")
    assert sweep()[1] == out[4:]  # the table; no cell reports again
    assert len(loads) == 1
    assert len(answered) == 5
    assert {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()} == files
    assert caplog.text.count("is finished: run ") == 4


def test_a_failed_cell_stops_no_other_and_is_retried(
    sweep: Call, answered: list[str], show: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered.append("broken SnapKV")
    code, out, err = sweep()
    assert code == 1
    assert re.match(r"error: 2 of 4 cells of sweep \w+ have no .* `python scripts/status.py runs --retry`", err[-1])
    assert "failed (1 error rows; RuntimeError: no more memory)" in cells_of(out)["method=snapkv budget=0.4"]
    assert cells_of(out)["method=streaming_llm budget=0.3"] == "done"
    code, lines = show("--sweep", "last")
    assert (code, lines[-1]) == (1, "4 runs: 2 done, 2 failed")
    assert len(show("--failed")[1]) == 2
    answered[:] = []
    again = []
    monkeypatch.setattr("subprocess.run", lambda command, **how: again.append((command, how)) or done)
    done = type("Done", (), {"returncode": 0})
    assert show("--retry") == (0, [])
    [(command, how)] = again
    assert command[2:4] == ["-m", "model=tiny"]
    assert how["cwd"] == os.getcwd()
    assert cli.command_line(command[2:]) == 0
    assert answered == ["SnapKV", "SnapKV"]
    assert show("--retry", "--sweep", "last") == (0, [])
    assert len(again) == 1


def test_a_cell_without_a_single_row_says_why(
    sweep: Call, show: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(spec: ModelSpec, **attention: str) -> None:
        raise RuntimeError("no more\nmemory")

    with monkeypatch.context() as patch:
        patch.setattr("qevict_bench.jobs.Bench._loaded", property(explode))
        code, out, _ = sweep("budget=0.4")
    assert code == 1
    assert set(cells_of(out).values()) == {"failed (no more memory)"}
    assert show()[1][-1] == "2 runs: 2 failed"
    assert [line.split(" ", 1)[1] for line in show("--failed")[1]] == ["failed (no more memory)"] * 2
    assert sweep("budget=0.4")[0] == 0
    assert not list(Path("runs").rglob("failed/*"))


def test_an_infeasible_cell_is_no_failure(sweep: Call) -> None:
    code, out, err = sweep("budget=0.001,0.4", "small_budget=refuse", "method=snapkv")
    assert code == 0, err
    assert cells_of(out)["budget=0.001"].startswith("infeasible (")


def test_a_cell_that_no_run_can_be_made_of_fails_alone(sweep: Call, show: Callable[..., tuple[int, list[str]]]) -> None:
    code, out, _ = sweep("budget=native", "method=snapkv,defensivekv")
    assert code == 1
    assert {name: state.split(":")[0] for name, state in cells_of(out).items()} == {
        "method=snapkv": "done",
        "method=defensivekv": "failed (budget=native",
    }
    assert show()[1][-1] == "3 runs: 2 done, 1 failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("seed=abc",), "seed=abc has the wrong type"),
        (("method=snapkv,quantum",), "'method/quantum'"),
        (("sweep.only=some",), "sweep.only=some is unknown; choose one of all, failed"),
        (("results_dir=/proc/runs",), "results_dir=/proc/runs cannot be written"),
        (("launcher=local_gpus",), "launcher=local_gpus: torch sees no GPU here; launcher.workers=N"),
        (("launcher=local_gpus", "launcher.workers=-1"), "launcher.workers=-1 is no number of processes"),
        (("launcher=local_gpus", "resume=restart"), "resume=restart with launcher=local_gpus"),
        (("launcher.name=slurm",), "launcher.name is a label, not a setting"),
    ],
)
def test_a_mistake_in_all_cells_is_one_line(
    sweep: Call, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, out, err = sweep(*arguments)
    assert (code, out, len(err)) == (2, [], 1), err
    assert re.match(f"error: .*{message}", err[0])
    assert not [path for path in Path("runs").glob("*") if path.name != ".sweeps"]


def test_a_cell_that_others_work_on_comes_last(
    sweep: Call, answered: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert sweep("method=snapkv", "budget=0.4")[0] == 0
    [other] = read_sweeps(Path("runs"))
    path = Path("runs") / other.cells[0].run_id
    (path / "rows.jsonl").write_text("")
    (path / "workers" / "other").mkdir(parents=True)
    lease = plant(path / "workers" / "other")
    (path / "workers" / "other" / "lock").touch()
    answered.clear()
    caplog.set_level("INFO")
    code, out, err = sweep("budget=0.4")
    assert code == 0, err
    assert answered == ["StreamingLLM", "SnapKV"]
    assert "cell 1 of 2 (method=snapkv) is running elsewhere: pid 77 on elsewhere" in caplog.text
    assert cells_of(out)["method=snapkv"].startswith("running (pid 77 on elsewhere")
    lease.unlink()


def test_a_cell_that_others_hold_is_awaited(sweep: Call, answered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only block is claimed by another process, until that is waited for."""
    assert sweep("method=snapkv", "budget=0.4")[0] == 0
    [other] = read_sweeps(Path("runs"))
    path = Path("runs") / other.cells[0].run_id
    (path / "rows.jsonl").write_text("")
    places = [path / "workers" / "other", path / "claims" / "niah_single_1.0"]
    for place in places:
        place.mkdir(parents=True)
        (place / "lock").touch()
        plant(place)
    waited: list[str] = []

    def wait(waiting: Waiting, owner: str) -> None:
        waited.append(owner)
        for lease in path.glob("*/*/lease.1"):
            lease.unlink()

    monkeypatch.setattr(Waiting, "__call__", wait)
    answered.clear()
    code, _, err = sweep("method=snapkv", "budget=0.4")
    assert code == 0, err
    assert waited == ["other processes (1 examples)"]
    assert answered == ["SnapKV"]


def test_an_interrupted_sweep_goes_on_where_it_was(
    sweep: Call, answered: list[str], show: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("qevict_bench.engine.generate", interrupt)
        code, _, err = sweep("budget=0.4")
    assert (code, err[-1]) == (130, "error: interrupted; re-issue the command to continue")
    code, lines = show("--sweep", "last")
    assert (code, lines[-1]) == (0, "2 runs: 2 missing")
    assert "missing (method=snapkv)" in " ".join(lines)
    assert sweep("budget=0.4")[0] == 0
    assert len(answered) == 3


def test_a_sweep_of_another_limit_is_not_finished(sweep: Call, answered: list[str]) -> None:
    arguments = ("method=snapkv", "budget=0.4")
    assert sweep(*arguments)[0] == 0
    assert sweep(*arguments, "limit=2")[0] == 0
    assert answered.count("SnapKV") == 2
    assert len(read_sweeps(Path("runs"))) == 1
    assert sweep(*arguments, "resume=restart")[0] == 0
    assert answered.count("SnapKV") == 3


def test_shards_of_one_run_are_one_cell(sweep: Call, answered: list[str]) -> None:
    code, out, err = sweep("method=snapkv", "budget=0.4", "limit=3", "shard.count=2", "shard.index=0,1")
    assert code == 0, err
    assert len(cells_of(out)) == 1
    assert answered.count("SnapKV") == 3


def test_each_local_process_has_its_gpu_its_threads_and_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(7))
    given = ["-m", "launcher=local_gpus", "launcher.workers=3", "shard.count=9", "budget=0.4,0.3", "method=snapkv"]
    found = list(local_workers.commands(given, ["4", "GPU-x"], 3))
    assert [command[2:] for command, _ in found] == [
        ["-m", "budget=0.4,0.3", "method=snapkv", "launcher=here", "shard.count=3", f"shard.index={i}"]
        for i in range(3)
    ]
    assert [environment["CUDA_VISIBLE_DEVICES"] for _, environment in found] == ["4", "GPU-x", "4"]
    assert {environment["OMP_NUM_THREADS"] for _, environment in found} == {"2"}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    [(_, environment)] = local_workers.commands(given, [], 1)
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.slow
def test_local_processes_carry_out_a_sweep_together(sweep: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two pretended GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, out, err = sweep("launcher=local_gpus", "limit=3")
    assert code == 0, err
    assert set(cells_of(out).values()) == {"done"}
    rows = [json.loads(line) for path in Path("runs").glob("*/rows.jsonl") for line in path.read_text().splitlines()]
    assert len(rows) == 5 * 3
    [folder] = [path for path in Path("runs/.sweeps").iterdir() if path.is_dir()]
    assert sorted(path.name for path in folder.iterdir()) == ["worker-0.log", "worker-1.log"]


def test_a_dry_run_says_what_a_sweep_takes_and_runs_nothing(sweep: Call, answered: list[str]) -> None:
    code, out, err = sweep("budget=0.4,0.001", "small_budget=refuse", "limit=3", "sweep.dry_run=true")
    assert code == 0, err
    assert answered == []
    assert not Path("runs").exists()
    table = {line.split("  ")[0]: line.split() for line in out}
    assert re.search(r"infeasible: niah_single_1: .*nearest feasible fraction is 0\.\d+", " ".join(out))
    examples, tokens, cache, prefill = table["method=snapkv budget=0.4"][2:6]
    assert (examples, table["3 runs" if "3 runs" in table else "5 runs"][2]) == ("3", "9")
    assert int(tokens.replace(",", "")) > 3 * 1000
    assert 0.35 < float(cache.removesuffix("MiB")) / float(prefill.removesuffix("MiB")) < 0.45
    assert out[-2] == "3 runs without a time: no earlier run in results_dir is like them."
    assert sweep("budget=0.4", "method=snapkv")[0] == 0
    code, out, _ = sweep("budget=0.4,0.3", "method=snapkv", "sweep.dry_run=true")
    assert [re.split(r"\s{2,}", line)[1] for line in out[1:-1]] == ["0", "1", "0", "1"]
    assert "unknown" not in " ".join(out)
    assert len(answered) == 2


def test_labels_are_what_tells_cells_apart() -> None:
    assert labels([["a=1", "++b=2"], ["a=1", "++b=3"]]) == ["b=2", "b=3"]
    assert labels([["a=1", "b=2"]]) == ["a=1 b=2"]


def test_a_sweep_is_read_back_and_keeps_its_name(tmp_path: Path) -> None:
    cells = (Cell("budget=0.2", ("budget=0.2",), run_id({"x": 1})), Cell("budget=2", ("budget=2",), "", "too much"))
    sweep = Sweep(("-m", "budget=0.2,2"), "/somewhere", cells)
    sweep.write(tmp_path)
    assert read_sweeps(tmp_path) == [sweep]
    assert Sweep((), "/", cells[::-1]).name == sweep.name
    assert [stand(tmp_path, cell).kind for cell in cells] == ["missing", "failed"]
    lines = list(table(tmp_path, cells, [stand(tmp_path, cell) for cell in cells]))
    assert lines[2].split() == ["budget=2", "-", "failed", "(too", "much)"]
    for text in ("[]", "{}", '{"cells": [1], "arguments": [], "folder": ""}', '{"cells": [], "arguments": [1]}'):
        write_atomic(tmp_path / ".sweeps" / f"{sweep.name}.json", text)
        with pytest.raises(Damaged, match=f"{sweep.name}.json is damaged"):
            read_sweeps(tmp_path)
    assert status.main([str(tmp_path)]) == 2


def test_status_names_the_sweeps_there_are(sweep: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("method=snapkv", "budget=0.4")[0] == 0
    assert status.main(["runs", "--sweep", "nothing"]) == 2
    [only] = read_sweeps(Path("runs"))
    assert f"runs has no such sweep; choose of: {only.name}" in capsys.readouterr().err
