"""scripts/status.py on folders as the runner leaves them, on damaged ones, and while others write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fakes
import pytest
from script_modules import script
from test_leases import dead_pid, plant

from qevict_bench import leases, runner
from qevict_bench.inspection import WIDTH
from qevict_bench.results import RunFailed, open_run, read_rows
from qevict_bench.terminal import columns, cut, fitted, plain, wrapped

ROOT = Path(__file__).parents[1]
status = script("status")
Show = Callable[..., tuple[int, list[str]]]


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "describe", fakes.describe)


@pytest.fixture
def show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Exit code and lines; checks on the way that nothing in the folder changed."""

    def call(*arguments: str) -> tuple[int, list[str]]:
        def files() -> dict[Path, tuple[int, bytes]]:
            return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file()}

        before = files()
        capsys.readouterr()
        code = status.main([str(tmp_path), *arguments])
        assert files() == before
        return code, capsys.readouterr().out.splitlines()

    return call


def run(folder: Path, **changes: object) -> str:
    summary = runner.run(fakes.config(folder, **changes), fakes.ENGINE)
    return summary.run_id


def line_of(lines: list[str], run_id: str) -> str:
    (line,) = [line for line in lines if line.startswith(run_id)]
    return " ".join(line.split())


def test_finished_runs(tmp_path: Path, show: Show) -> None:
    own = run(tmp_path, limit=3)
    run(tmp_path, limit=2)
    code, lines = show()
    assert code == 0
    assert lines[0].split() == ["run", "model", "method", "budget", "task", "done", "state"]
    assert line_of(lines, own) == f"{own} fake fake 0.2 fake 4/4 done"  # of what the newest command asked for
    assert lines[2].split()[2] == "full_kv"  # written last
    assert lines[-1] == "2 runs: 2 done"
    assert show("--failed") == (0, [])


def test_a_subset_with_fewer_examples_than_limit_is_done(tmp_path: Path, show: Show) -> None:
    own = run(tmp_path, limit=9, task__size=2)
    assert line_of(show()[1], own).endswith(" 4/4 done")


def test_failed_examples_are_counted_and_listed(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "hard")
    own = run(tmp_path)
    code, lines = show()
    assert code == 1
    assert line_of(lines, own).endswith(" 4/8 failed (4 error rows; RuntimeError: hard went wrong)")
    assert lines[-1] == "2 runs: 1 done, 1 failed"
    listed = [f"{own} fake hard-000{i}: RuntimeError: hard went wrong" for i in range(4)]
    assert show("--failed") == (1, listed)
    monkeypatch.delenv("FAKE_RUNTIMEERROR")
    run(tmp_path)
    assert show()[0] == 0


def test_infeasible_runs_are_no_failures(tmp_path: Path, show: Show) -> None:
    nowhere = run(tmp_path, method__longest=10)
    partly = run(tmp_path, method__longest=60, task__long=["easy-0000"])
    code, lines = show()
    assert code == 0
    assert "8/8 infeasible (budget=0.2 is too" in line_of(lines, nowhere)
    assert line_of(lines, partly).endswith("8/8 done (1 infeasible)")


def test_stopped_and_running_runs(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_BUDGETEXCEEDED", "easy-0002")
    with pytest.raises(RunFailed):
        run(tmp_path)
    monkeypatch.setenv("FAKE_BUDGETEXCEEDED", "none")
    monkeypatch.setenv("FAKE_KEYBOARDINTERRUPT", "hard-0001")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert line_of(show()[1], folder.name).endswith("5/8 stopped (partial)")
    lease = plant(folder)
    assert line_of(show()[1], folder.name).endswith("5/8 running (pid 77 on elsewhere, 0 s ago)")
    os.utime(lease, (time.time() - 300,) * 2)
    assert line_of(show()[1], folder.name).endswith("stopped (partial; stale: pid 77 on elsewhere, 300 s ago)")
    plant(folder, machine=leases._machine(), pid=dead_pid())
    code, lines = show()
    assert "stopped (partial; stale: pid" in line_of(lines, folder.name)
    assert code == 0


def test_a_stalled_run_names_the_process_and_the_remedy(tmp_path: Path, show: Show) -> None:
    """The owner lives on this machine but has not renewed its lease: nobody can take the run from it."""
    folder = tmp_path / run(tmp_path)
    mine = {"machine": leases._machine(), "pid": os.getpid(), "born": leases._born(os.getpid())[0]}
    plant(folder, age_s=300, **mine)
    stalled = f"stalled (pid {os.getpid()} still holds it: continue or kill it)"
    code, lines = show()
    assert (code, lines[-1]) == (0, "2 runs: 1 done, 1 stalled")
    assert line_of(lines, folder.name).endswith(stalled)
    plant(folder, age_s=300, **mine | {"born": 1})  # the process id is another process's now: nothing to kill
    assert line_of(show()[1], folder.name).endswith(" 8/8 done")
    (folder / "summary.json").unlink()
    assert "stopped (no summary; stale: pid" in line_of(show()[1], folder.name)


def test_a_lease_from_the_future_says_that_clocks_differ(tmp_path: Path, show: Show) -> None:
    folder = tmp_path / run(tmp_path)
    plant(folder, age_s=-30)
    assert line_of(show()[1], folder.name).endswith("running (pid 77 on elsewhere, 0 s ago)")
    plant(folder, age_s=-400)
    _, lines = show()
    assert "running? (clocks differ; pid 77 on elsewhere, " in line_of(lines, folder.name)
    assert lines[-1] == "2 runs: 1 done, 1 running"
    plant(folder, age_s=-400, machine=leases._machine(), pid=dead_pid())
    assert line_of(show()[1], folder.name).endswith(" 8/8 done")


def test_a_summary_of_another_limit_is_none(tmp_path: Path, show: Show) -> None:
    """As after a crash between the last example of a larger limit and its summary."""
    own = run(tmp_path)
    summary = tmp_path / own / "summary.json"
    summary.write_text(summary.read_text().replace('"limit": 4', '"limit": 2'))
    assert line_of(show()[1], own).endswith("8/8 stopped (no summary)")


def test_a_run_that_has_just_begun(tmp_path: Path, show: Show) -> None:
    plan = runner.make_plan(fakes.config(tmp_path))
    name = plan.job.run_id
    with open_run(tmp_path / name, plan.job.config, plan.job.environment) as folder:
        assert f"{name} fake fake 0.2 fakes 0/? running (pid {os.getpid()} on " in line_of(show()[1], name)
        folder.want(4, ["easy", "hard"])
        assert f"{name} fake fake 0.2 fakes 0/8 running (pid {os.getpid()} on " in line_of(show()[1], name)


def test_a_run_without_its_summary_says_so(tmp_path: Path, show: Show) -> None:
    own = run(tmp_path)
    (tmp_path / own / "summary.json").unlink()
    assert line_of(show()[1], own).endswith("8/8 stopped (no summary)")


@pytest.mark.parametrize("name", ["rows.jsonl", "summary.json", "wanted.json"])
@pytest.mark.parametrize("text", ["[", "[]", "\0", "[" * 100_000, '{"limit": "x"}', '{"facts": 1, "subsets": [1]}'])
def test_damaged_files_are_named_and_hide_no_other_run(tmp_path: Path, show: Show, name: str, text: str) -> None:
    own = run(tmp_path)
    (tmp_path / own / name).write_text(text + "\n")
    if name == "summary.json" and '"limit"' in text:
        return  # it says nothing wrong
    code, lines = show()
    assert code == 1
    assert f"damaged: {name}" in line_of(lines, own)
    assert lines[-1] == "2 runs: 1 done, 1 damaged"
    code, lines = show("--failed")
    assert len(lines) == 1
    assert lines[0].startswith(f"{own} damaged: {name}")


@pytest.mark.parametrize("text", ["", "[", "a: b: c", "- 1", "task: 3", "task: {_target_: x}", "!!python/name:x", "\0"])
def test_a_damaged_configuration_is_named(tmp_path: Path, show: Show, text: str) -> None:
    (tmp_path / "0123").mkdir()
    (tmp_path / "0123" / "config.yaml").write_text(text)
    code, lines = show()
    assert (code, lines[1].split()[:1]) == (1, ["0123"])
    assert "damaged: config.yaml is damaged" in lines[1]


def test_other_things_in_the_folder_are_no_runs(tmp_path: Path, show: Show) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "multirun.yaml").write_text("")
    assert show() == (0, [f"no runs in {tmp_path}"])


def test_long_names_and_steering_characters_do_not_break_the_table(
    tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "easy-0000")
    run(tmp_path, limit=1)
    model, method = "meta/" + "long-" * 30, "方法\x1b[31m\n方法" * 9
    own = run(tmp_path, model__name=model, method__name=method, budget="123456789t", limit=1)
    (tmp_path / own).rename(tmp_path / "a-folder-with-a-long-name")
    _, lines = show()
    assert {columns(line) <= WIDTH for line in lines} == {True}
    assert not any("\x1b" in line for line in lines)
    cells = [line for line in lines if line.startswith("a-folder-wi…")]
    assert "meta/long-lon…" in cells[0]
    assert "1234567" in cells[0]


def test_a_folder_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(tmp_path / "absent")]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path / 'absent'}\n"
    (tmp_path / "file").write_text("")
    assert status.main([str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_it_looks_on_while_a_run_is_written(tmp_path: Path) -> None:
    """A real process writes, another one looks, again and again: never a traceback, counts only grow."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "FAKE_SLEEP_S": "0.02"}
    command = [sys.executable, str(ROOT / "tests" / "fakes.py"), f"results_dir={tmp_path}", "limit=60"]
    writer = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    name = runner.make_plan(fakes.config(tmp_path)).job.run_id
    seen: list[tuple[str, int]] = []
    while writer.poll() is None:
        found = status.inspect(tmp_path / name) if (tmp_path / name).exists() else None
        if found is not None:
            seen.append((found.kind, found.num_done))
        time.sleep(0.02)
    assert writer.returncode == 0
    assert {kind for kind, _ in seen} <= {"running", "stopped", "done"}
    assert ("running", 120) in seen or len(seen) > 20
    assert [count for _, count in seen] == sorted(count for _, count in seen)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "status.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "120/120  done" in done.stdout


def test_the_newest_row_counts(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "easy-0000")
    own = run(tmp_path)
    monkeypatch.delenv("FAKE_RUNTIMEERROR")
    run(tmp_path)
    assert len((tmp_path / own / "rows.jsonl").read_text().splitlines()) == 9
    assert len(read_rows(tmp_path / own / "rows.jsonl")[0]) == 8
    assert json.loads((tmp_path / own / "summary.json").read_text())["num_errors"] == 0
    assert line_of(show()[1], own).endswith("8/8 done")


def test_widths_of_text() -> None:
    assert [columns(text) for text in ("", "abc", "方法", "e\u0301", "\ufe0f", "ก\u0e31")] == [0, 3, 4, 1, 0, 1]
    assert plain("a\x1b[31m\n b\ud83d") == "a?[31m b?"
    assert [fitted("方法方法", width) for width in (8, 7, 6, 10)] == ["方法方法", "方法方…", "方法… ", "方法方法  "]
    assert cut("方法方法", 6) == "方法…"
    lines = wrapped("方法 " * 30 + "x" * 50 + " end", 20, "- ", "  ")
    assert {columns(line) <= 20 for line in lines} == {True}
    assert "".join("".join(lines).split()) == "-" + "方法" * 30 + "x" * 50 + "end"
    assert lines[0].startswith("- 方法 方法")
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize("name", ["status", "compare"])
def test_the_scripts_run_from_a_clone_that_is_not_installed(tmp_path: Path, name: str) -> None:
    """The clone's own package is the one that they import, whatever is installed."""
    shutil.copytree(ROOT / "src" / "qevict_bench", tmp_path / "src" / "qevict_bench")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); import qevict_bench; print(qevict_bench.__file__)"
    command = [sys.executable, "-c", code, str(tmp_path / "scripts" / f"{name}.py")]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "src" / "qevict_bench" / "__init__.py")
