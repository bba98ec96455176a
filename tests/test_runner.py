"""The runner on stand-ins (fakes.py): identity, blocks, resuming after kill -9, references, errors, the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
from omegaconf import DictConfig

from qevict_bench import closing, runner
from qevict_bench.jobs import RunFailed
from qevict_bench.results import read_rows
from qevict_bench.summary import Summary

ROOT = Path(__file__).parents[1]
Start = Callable[..., subprocess.Popen[str]]
VOLATILE = ("ttft_s", "decode_s")


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "describe", fakes.describe)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Summary]:
    return lambda **changes: runner.run(fakes.config(tmp_path, **changes), fakes.generate)


@pytest.fixture
def calls(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The calls of the engine since the last time it was asked."""
    path = tmp_path_factory.mktemp("calls") / "calls"
    monkeypatch.setenv("FAKE_CALLS", str(path))

    def read() -> list[str]:
        text = path.read_text() if path.exists() else ""
        path.unlink(missing_ok=True)
        return text.splitlines()

    return read


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Rows as on disk, in example order, without what differs from run to run."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name not in VOLATILE} for row in rows]
    return sorted(kept, key=lambda row: str(row["example_id"]))


def ids_of(cfg: DictConfig) -> tuple[str, str]:
    plan = runner.make_plan(cfg)
    return plan.job.run_id, plan.reference.run_id


CHANGES: list[dict[str, Any]] = [
    {"model__weights": "w2"},
    {"model__chat": "plain"},
    {"model__dtype": "bfloat16"},
    {"method__strength": 2},
    {"method__name": "other"},
    {"task__context_length": 65},
    {"task__subsets": ["easy"]},
    {"task__data": "v2"},
    {"protocol__name": "query_agnostic"},
    {"first_token": "full"},
    {"budget": "0.3"},
    {"budget": "1024t"},
    {"budget": "native"},
    {"basis": "total"},
    {"enforce": "prefill"},
    {"small_budget": "refuse"},
    {"seed": 1},
    {"split": "dev"},
    {"batch_size": 2},
]


def test_every_setting_that_can_change_a_row_changes_the_run_id(tmp_path: Path) -> None:
    ids = [ids_of(fakes.config(tmp_path, **change))[0] for change in [{}, *CHANGES]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 9},
        {"results_dir": "elsewhere"},
        {"resume": "restart"},
        {"profile__name": "paper"},
        {"budget": "0.20"},
        {"budget": "1/5"},
        {"model__name": "alias"},
    ],
)
def test_settings_that_cannot_change_a_row_keep_the_run_id(tmp_path: Path, change: dict[str, Any]) -> None:
    assert ids_of(fakes.config(tmp_path, **change)) == ids_of(fakes.config(tmp_path))


@pytest.mark.parametrize(
    "change", [{"budget": 0.5}, {"basis": "prompt"}, {"enforce": "prefill"}, {"small_budget": "refuse"}]
)
def test_the_reference_is_shared_by_all_budgets(tmp_path: Path, change: dict[str, Any]) -> None:
    assert ids_of(fakes.config(tmp_path, **change))[1] == ids_of(fakes.config(tmp_path))[1]


def test_the_reference_as_method_is_the_reference_run_at_budget_1(tmp_path: Path) -> None:
    own = fakes.config(tmp_path, method={"name": "full_kv", "_target_": "fakes.FakePolicy", "strength": 0})
    assert ids_of(own) == (ids_of(fakes.config(tmp_path))[1],) * 2
    summary = runner.run(own, fakes.generate)
    assert (summary.budget, summary.macro, summary.overall and summary.overall.diff.value) == ("1.0", 100.0, 0.0)
    assert len(list(tmp_path.iterdir())) == 1


def test_rows_and_summary_say_what_was_run(run: Callable[..., Summary], tmp_path: Path) -> None:
    summary = run(limit=3)
    folder = tmp_path / summary.run_id
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "env.json", "rows.jsonl", "summary.json", "lock"}
    rows = rows_of(folder)
    assert [row["example_id"] for row in rows] == [f"{s}-{i:04}" for s in ("easy", "hard") for i in range(3)]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["prompt_source"] for row in rows} == {"own"}
    first = rows[0]
    assert (first["prompt_tokens"], first["answers"], first["new_tokens"]) == (
        len("test 0 easy 0 ") * 3 + 1,
        ["yes"],
        2,
    )
    assert first["fractions"]["allowed"] == pytest.approx(0.2)
    assert first["fractions"]["prefill_peak"] == pytest.approx(0.2)
    written = json.loads((folder / "summary.json").read_text())
    required = (
        "run_id model method task protocol first_token prompt_source budget basis enforce num_examples num_errors "
    )
    required += (
        "scores macro reference_macro diff memory bytes promotions demotions evictions needle_fate timings matched"
    )
    assert set(required.split()) <= written.keys()
    by_hand = {s: 100 * sum(r["score"] for r in rows if r["subset"] == s) / 3 for s in ("easy", "hard")}
    assert written["scores"] == pytest.approx(by_hand)
    assert written["macro"] == pytest.approx(sum(by_hand.values()) / 2)
    assert written["diff"]["value"] == pytest.approx(written["macro"] - 100)
    assert written["reference_macro"] == 100
    assert written["memory"]["mean"] == written["achieved"] == pytest.approx(0.2)


def test_a_finished_run_answers_without_loading_the_model(
    run: Callable[..., Summary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = tmp_path / "loads"
    monkeypatch.setenv("FAKE_LOADS", str(loads))
    first = run()
    assert loads.read_text() == "load\n"
    assert run() == first
    assert run(limit=2).num_examples == 4
    assert loads.read_text() == "load\n"


def test_a_larger_limit_runs_only_what_is_missing(run: Callable[..., Summary], calls: Callable[[], list[str]]) -> None:
    run(limit=2)
    calls()
    run(limit=3)
    assert calls() == ["0 easy-0002", "0 hard-0002", "1 easy-0002", "1 hard-0002"]


def test_blocks_do_not_depend_on_limit_or_on_what_is_done(
    run: Callable[..., Summary], calls: Callable[[], list[str]], tmp_path: Path
) -> None:
    summary = run(limit=6, batch_size=3)
    blocks = sorted(calls())
    undisturbed = rows_of(tmp_path / summary.run_id)
    again = runner.run(fakes.config(tmp_path / "2", limit=4, batch_size=3), fakes.generate)
    assert sorted(calls()) == blocks  # the block that limit 4 cuts runs whole
    assert rows_of(tmp_path / "2" / again.run_id) == undisturbed
    assert again.num_examples == 8
    file = tmp_path / summary.run_id / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:1] + lines[3:]))
    run(limit=6, batch_size=3)
    assert calls() == ["1 easy-0000 easy-0001 easy-0002"]
    assert rows_of(tmp_path / summary.run_id) == undisturbed


def test_a_subset_with_fewer_examples_than_limit_is_complete(
    run: Callable[..., Summary], calls: Callable[[], list[str]]
) -> None:
    summary = run(task__size=3, limit=5, batch_size=2)
    assert (summary.num_examples, summary.facts.available) == (6, {"easy": 3, "hard": 3})
    calls()
    assert run(task__size=3, limit=5, batch_size=2) == summary
    assert calls() == []
    assert "easy has 3 examples, fewer than limit=5" in closing.render(summary)


def test_an_error_row_is_kept_counted_and_retried(
    run: Callable[..., Summary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "easy-0001")
    broken = run()
    assert (broken.num_examples, broken.num_errors) == (7, 1)
    assert broken.problem == "RuntimeError: easy-0001 went wrong"
    assert "easy-0001" in caplog.text
    assert broken.overall is not None
    assert broken.overall.num_pairs == 7
    monkeypatch.delenv("FAKE_RUNTIMEERROR")
    mended = run()
    assert (mended.num_examples, mended.num_errors) == (8, 0)
    statuses = [row["status"] for row in rows_of(tmp_path / mended.run_id) if row["example_id"] == "easy-0001"]
    assert sorted(statuses) == ["error", "ok"]


def test_a_run_of_only_errors_fails_with_the_reason(
    run: Callable[..., Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "-")
    with pytest.raises(RunFailed, match=r"no example of run .* succeeded; .*RuntimeError: - went wrong"):
        run()


def test_infeasible_examples_are_no_errors_and_are_not_retried(
    run: Callable[..., Summary], calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_INFEASIBLE", "hard")
    summary = run()
    assert (summary.num_examples, summary.num_errors, summary.num_infeasible) == (4, 0, 4)
    assert list(summary.subsets) == ["easy"]
    calls()
    run()
    assert calls() == []


def test_going_over_the_budget_ends_the_run(
    run: Callable[..., Summary], calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BUDGETEXCEEDED", "easy-0002")
    with pytest.raises(RunFailed, match="BudgetExceeded: easy-0002 went wrong"):
        run()
    assert calls()[-1] == "1 easy-0002"


def test_an_interrupted_run_continues(
    run: Callable[..., Summary], calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_KEYBOARDINTERRUPT", "hard-0000")
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.delenv("FAKE_KEYBOARDINTERRUPT")
    calls()
    run()
    assert calls() == [f"1 hard-000{i}" for i in range(4)]


def test_prompts_longer_than_the_model_are_error_rows_that_say_so(run: Callable[..., Summary]) -> None:
    with pytest.raises(RunFailed, match=r"easy-0000 needs 5\d tokens, more than the context of fake \(50\)"):
        run(model__max_context=50, task__context_length=40)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"budget": "0"}, "budget=0 .*give a fraction"),
    ({"budget": "1.5"}, "budget=1.5 .*give a fraction"),
    ({"budget": "abc"}, "budget=abc .*give a fraction"),
    ({"basis": "x"}, "basis='x' .*choose one of sequence, prompt, total"),
    ({"enforce": "x"}, "enforce='x' .*choose one of"),
    ({"first_token": "x"}, "first_token=x .*choose one of compressed, full"),
    ({"split": "train"}, "split=train .*choose one of test, dev"),
    ({"resume": "x"}, "resume=x .*choose one of continue, restart"),
    ({"seed": -1}, "seed=-1 .*0 to"),
    ({"seed": "abc"}, "seed=abc .*an integer"),
    ({"seed": 1.5}, "seed=1.5 .*an integer"),
    ({"limit": 0}, "limit=0 .*at least 1"),
    ({"limit": True}, "limit=True .*an integer"),
    ({"batch_size": "x"}, "batch_size=x .*an integer"),
    ({"task__context_length": -1}, "task.context_length=-1 "),
    ({"task__context_length": "long"}, "task.context_length=long .*an integer"),
    ({"task__context_length": 513}, r"task.context_length=513 is longer than the context of fake \(512 tokens\)"),
    ({"task__subsets": "easy"}, "task.subsets=easy .*a list"),
    ({"task__nonsense": 1}, "task.nonsense=1 is no field of FakeTask; fields: .*subsets"),
    ({"method__nonsense": 1}, "method.nonsense=1 is no field of FakePolicy; fields: strength, note"),
    ({"method__strength": "strong"}, "method.strength=strong .*an integer"),
    ({"model__weights": "???"}, "weights has no value; set .*weights="),
    ({"model__weights": "broken"}, "model.weights=broken"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[str(change) for change, _ in MISTAKES])
def test_mistakes_are_named_and_leave_nothing_behind(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    target = tmp_path / "runs"
    with pytest.raises(ValueError, match=message) as caught:
        runner.run(fakes.config(target, **change), fakes.generate)
    assert "\n" not in str(caught.value)
    assert not target.exists() or not list(target.iterdir())


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the runner on the stand-ins in a process: results folder, options as in fakes.py, environment."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests")])
    started = []

    def start(results_dir: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "tests" / "fakes.py"), f"results_dir={results_dir}", *options]
        environment = {**os.environ, "PYTHONPATH": path, **environment}
        started.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.communicate()


def wait_for(condition: Callable[[], object], child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < deadline, "the child got nowhere in two minutes"
        time.sleep(0.01)


def num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def test_rows_after_kill_9_equal_those_of_an_undisturbed_run(tmp_path: Path, process: Start) -> None:
    cfg = fakes.config(tmp_path / "calm", batch_size=2, limit=5)
    plan = runner.make_plan(cfg)
    runner.run(cfg, fakes.generate)
    folders = (plan.reference.run_id, plan.job.run_id)
    stormy = tmp_path / "stormy"
    for folder, lines in [(folders[0], 1), (folders[0], 9), (folders[1], 1), (folders[1], 6)]:
        child = process(stormy, "batch_size=2", "limit=5", FAKE_SLEEP_S="0.05")
        file = stormy / folder / "rows.jsonl"
        wait_for(lambda file=file, lines=lines: num_lines(file) >= lines, child)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    runner.run(fakes.config(stormy, batch_size=2, limit=5), fakes.generate)
    for folder in folders:
        calm_rows = rows_of(tmp_path / "calm" / folder)
        assert len(calm_rows) == 12  # limit 5 runs three whole blocks of 2 per subset
        assert rows_of(stormy / folder) == calm_rows


def test_of_two_identical_commands_one_names_the_other_and_stops(tmp_path: Path, process: Start) -> None:
    plan = runner.make_plan(fakes.config(tmp_path))
    first = process(tmp_path, FAKE_SLEEP_S="0.3")
    wait_for(lambda: num_lines(tmp_path / plan.reference.run_id / "rows.jsonl"), first)
    with pytest.raises(ValueError, match=rf"run {plan.job.run_id} is held by pid {first.pid} on "):
        runner.run(fakes.config(tmp_path), fakes.generate)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    assert num_lines(tmp_path / plan.job.run_id / "rows.jsonl") == 8


def test_two_methods_at_once_share_one_reference_run(
    tmp_path: Path, process: Start, calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = runner.make_plan(fakes.config(tmp_path))
    first = process(tmp_path, FAKE_SLEEP_S="0.3")
    wait_for(lambda: num_lines(tmp_path / plan.reference.run_id / "rows.jsonl"), first)
    summary = runner.run(fakes.config(tmp_path, method__strength=2), fakes.generate)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    waited = capsys.readouterr().err
    assert f"waiting for the reference run {plan.reference.run_id} (full_kv), held by pid {first.pid}" in waited
    assert summary.overall is not None
    assert summary.overall.num_pairs == 8
    reference_calls = [line for line in calls() if line.startswith("0 ")]
    assert len(reference_calls) == len(set(reference_calls)) == 8


def test_restart_runs_the_method_again_but_keeps_a_usable_reference(
    run: Callable[..., Summary], calls: Callable[[], list[str]], tmp_path: Path
) -> None:
    summary = run()
    calls()
    run(resume="restart")
    assert {line[0] for line in calls()} == {"1"}
    assert len(read_rows(tmp_path / summary.run_id / "replaced-1" / "rows.jsonl")[0]) == 8


def test_the_report_says_what_is_needed_to_read_it(run: Callable[..., Summary]) -> None:
    summary = run(limit=12)
    text = closing.render(summary)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "fake on fake (float32, cpu), 3 of 4 layers compressible"
    for part in (
        "FAKE-style (own wording), protocol query_aware, first_token compressed",
        "small model: not a reproduction",
        "points are noise at this n",
        "allowed 0.200, after prefill 0.200, peak 0.200, mean 0.200",
        "workspace (dequantized copies, buffered queries) 1.00MiB",
        "3.0 routing events, 1.0 promotions, 2.0 demotions, 4.0 evictions",
        "full 50.0 %, INT2 25.0 %, evicted 25.0 %",
        "x FullKV's",
        "The paper's setting: model=llama31_8b profile=paper",
    ):
        assert part in text
    assert "n < 10" not in text
    assert summary.overall is not None
    diff = summary.overall.diff
    assert lines[-1] == (
        f"run {summary.run_id}: score={summary.macro:.1f} full_kv=100.0 diff=[{diff.low:.1f},{diff.high:.1f}] "
        "memory=0.200 workspace=1.00MiB"
    )
    assert "n < 10" in closing.render(run(limit=4))


def test_the_report_marks_subsets_on_which_the_reference_fails(tmp_path: Path) -> None:
    cfg = fakes.config(tmp_path, limit=10)

    def generate(loaded: Any, policy: Any, *arguments: Any, **options: Any) -> Any:
        made = fakes.generate(loaded, policy, *arguments, **options)
        hard = options["example_ids"][0].startswith("hard")
        return [fakes.FakeGeneration(**{**vars(g), "text": "no"}) if hard else g for g in made]

    summary = runner.run(cfg, generate)
    text = closing.render(summary)
    hard = next(line for line in text.splitlines() if line.startswith("hard"))
    assert hard.endswith("floor")
    assert summary.above_floor is not None
    assert summary.above_floor.reference == 100.0
    assert summary.overall is not None
    assert summary.overall.reference == 50.0
    assert "macro, not at floor" in text
