"""The runner on stand-ins (fakes.py): identity, blocks, resuming after kill -9, references, errors, the report."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from omegaconf import DictConfig
from test_leases import plant

from qevict_bench import closing, runner
from qevict_bench.results import RunFailed, open_run, read_rows
from qevict_bench.summary import Summary
from qevict_bench.task import Example

ROOT = Path(__file__).parents[1]
Start = Callable[..., subprocess.Popen[str]]
VOLATILE = ("ttft_s", "decode_s", "git_sha")


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "describe", fakes.describe)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Summary]:
    return lambda **changes: runner.run(fakes.config(tmp_path, **changes), fakes.ENGINE)


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
    summary = runner.run(own, fakes.ENGINE)
    assert (summary.budget, summary.macro, summary.overall and summary.overall.diff.value) == ("1.0", 100.0, 0.0)
    assert len(list(tmp_path.iterdir())) == 1


def test_rows_and_summary_say_what_was_run(run: Callable[..., Summary], tmp_path: Path) -> None:
    summary = run(limit=3)
    folder = tmp_path / summary.run_id
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml",
        "env.json",
        "lock",
        "rows.jsonl",
        "summary.json",
        "wanted.json",
    }
    assert json.loads((folder / "wanted.json").read_text()) == {"limit": 3, "subsets": ["easy", "hard"]}
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
    assert calls() == ["1 easy-0002", "1 hard-0002", "0 easy-0002", "0 hard-0002"]


def test_blocks_do_not_depend_on_limit_or_on_what_is_done(
    run: Callable[..., Summary], calls: Callable[[], list[str]], tmp_path: Path
) -> None:
    summary = run(limit=6, batch_size=3)
    blocks = sorted(calls())
    undisturbed = rows_of(tmp_path / summary.run_id)
    again = runner.run(fakes.config(tmp_path / "2", limit=4, batch_size=3), fakes.ENGINE)
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


def statuses(folder: Path) -> dict[str, str]:
    return {row["example_id"]: row["status"] for row in rows_of(folder)}


def test_infeasible_examples_are_no_errors_and_are_not_retried(
    run: Callable[..., Summary], calls: Callable[[], list[str]]
) -> None:
    options = {"task__long": ["hard-0000", "hard-0002"], "task__context_length": 200, "method__longest": 60}
    summary = run(**options)
    assert (summary.num_examples, summary.num_errors, summary.num_infeasible) == (6, 0, 2)
    assert "budget=0.2 is too small for 126 tokens (nearest fraction 0.5)" in summary.problem
    assert summary.overall is not None
    assert summary.overall.num_pairs == 6
    calls()
    run(**options)
    assert calls() == []


def test_a_method_that_fits_nowhere_is_reported_without_running_its_reference(
    run: Callable[..., Summary], calls: Callable[[], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    summary = run(method__longest=10)
    assert (summary.num_examples, summary.num_errors, summary.num_infeasible) == (0, 0, 8)
    assert (summary.overall, summary.macro) == (None, None)
    assert calls() == []
    assert [path.name for path in tmp_path.iterdir()] == [summary.run_id]
    assert "nearest fraction 0.5" in closing.render(summary)
    assert "easy-0000 infeasible: budget=0.2 is too small for 42 tokens" in caplog.text
    assert "8 examples have status infeasible" in caplog.text
    assert caplog.text.count("too small") == 1


def test_a_method_that_always_fails_does_not_run_its_reference(
    run: Callable[..., Summary], calls: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "-")
    with pytest.raises(RunFailed, match="no example of run"):
        run()
    assert {line[0] for line in calls()} == {"1"}


@pytest.mark.parametrize(
    ("options", "status", "error"),
    [
        ({"task__broken": ["easy-0001"]}, "error", "ValueError: this text has no tokens"),
        ({"task__unscored": ["easy-0001"]}, "error", "KeyError: 'no rule for this answer'"),
        ({"task__long": ["easy-0001"], "method__longest": 60}, "infeasible", "too small for 126 tokens"),
        (
            {"task__long": ["easy-0001"], "model__max_context": 100},
            "infeasible",
            r"easy-0001 needs 135 tokens \(127 \+ 8 new ones\), more than the context of fake \(100\)",
        ),
    ],
)
def test_what_is_wrong_with_one_example_leaves_its_batch_alone(
    run: Callable[..., Summary], calls: Callable[[], list[str]], tmp_path: Path, options: Any, status: str, error: str
) -> None:
    summary = run(batch_size=4, **options)
    found = statuses(tmp_path / summary.run_id)
    assert found.pop("easy-0001") == status
    assert set(found.values()) == {"ok"}
    assert re.search(error, summary.problem)
    batch = [line for line in calls() if line.startswith("1 easy")]
    others = [f"easy-000{i}" for i in (0, 1, 2, 3) if i != 1 or "task__unscored" in options]
    assert batch == [f"1 {' '.join(others)}"]


def test_an_exception_of_the_engine_marks_whom_it_ran_together_and_says_so(
    run: Callable[..., Summary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole block is marked, and runs again whole."""
    options = {"batch_size": 4, "task__new_tokens": [8, 8, 4, 4]}
    monkeypatch.setenv("FAKE_RUNTIMEERROR", "easy-0001")
    summary = run(**options)
    found = statuses(tmp_path / summary.run_id)
    assert [name for name, status in found.items() if status == "error"] == [f"easy-000{i}" for i in range(4)]
    assert summary.problem == "RuntimeError: easy-0001 went wrong (batch easy-0000 .. easy-0003)"
    monkeypatch.delenv("FAKE_RUNTIMEERROR")
    assert run(**options).num_examples == 8


def test_overflow_is_counted_and_nothing_is_cut(run: Callable[..., Summary], tmp_path: Path) -> None:
    summary = run(task__context_length=100, task__long=["easy-0001"])
    rows = {row["example_id"]: row for row in rows_of(tmp_path / summary.run_id)}
    long = rows.pop("easy-0001")
    assert (long["status"], long["prompt_tokens"], long["overflow_tokens"]) == ("ok", 127, 127 + 8 - 100)
    assert {(row["overflow_tokens"], row["truncated_tokens"]) for row in rows.values()} == {(0, 0)}


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
    assert [line for line in calls() if line.startswith("1")] == [f"1 hard-000{i}" for i in range(4)]


def test_prompts_longer_than_the_model_are_infeasible_and_say_so(run: Callable[..., Summary]) -> None:
    summary = run(model__max_context=50, task__context_length=40)
    assert (summary.num_examples, summary.num_infeasible) == (0, 8)
    assert re.match(r"easy-0000 needs 51 tokens .43 . 8 new ones., more than the context of fake .50.", summary.problem)


@pytest.mark.parametrize("name", ["summary.json", "env.json", "rows.jsonl"])
@pytest.mark.parametrize("text", ["[", "[]\n", "null\n", '{"facts": {"available": 3}}\n', "[" * 100_000 + "\n"])
def test_a_tampered_file_is_one_line(run: Callable[..., Summary], tmp_path: Path, name: str, text: str) -> None:
    summary = run(limit=1)
    file = tmp_path / summary.run_id / name
    file.write_text(text if name != "rows.jsonl" else file.read_text() + text + file.read_text())
    with pytest.raises(ValueError, match=name) as caught:
        run(limit=2)
    assert "\n" not in str(caught.value)
    assert run(limit=2, resume="restart").num_examples == 4


def test_a_file_that_became_a_folder_is_one_line(run: Callable[..., Summary], tmp_path: Path) -> None:
    summary = run(limit=1)
    for name in ("summary.json", "env.json", "rows.jsonl"):
        file = tmp_path / summary.run_id / name
        content = file.read_bytes()
        file.unlink()
        file.mkdir()
        with pytest.raises(ValueError, match=name):
            run(limit=2)
        file.rmdir()
        file.write_bytes(content)


def test_a_split_the_task_lacks_is_refused_before_the_model_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "describe", None)
    with pytest.raises(ValueError, match="split=dev: fake .*; choose one of test"):
        runner.make_plan(fakes.config(tmp_path, split="dev", task__only=["test"]))


def test_a_run_held_by_another_machine_is_refused_until_its_lease_expires(
    run: Callable[..., Summary], tmp_path: Path
) -> None:
    folder = tmp_path / run(limit=1).run_id
    lease = plant(folder, age_s=20)
    with pytest.raises(ValueError, match=rf"run {folder.name} is held by pid 77 on elsewhere, .*heartbeat 2\d s ago; "):
        run(limit=2)
    os.utime(lease, (1, 1))
    assert run(limit=2).num_examples == 4
    assert not list(folder.glob("lease.*"))


def test_a_run_without_file_locks(run: Callable[..., Summary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system without a lock service: the lease alone protects, and nothing is left of it."""

    def refuse(stream: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    folder = tmp_path / run(limit=1).run_id
    environment = runner.make_plan(fakes.config(tmp_path)).job.environment
    owner = f"run {folder.name} is held by pid {os.getpid()} on "
    with open_run(folder, "", environment), pytest.raises(ValueError, match=owner):
        run(limit=2)
    assert run(limit=2).num_examples == 4
    assert not list(tmp_path.glob("*/lease.*"))


def edit(folder: Path, **changes: Any) -> None:
    """Change the first line of a run's rows."""
    file = folder / "rows.jsonl"
    first, *rest = file.read_text().splitlines()
    file.write_text("".join(f"{line}\n" for line in [json.dumps(json.loads(first) | changes), *rest]))


@pytest.mark.parametrize("limit", [1, 4])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index": 7}, "easy-0000 is index 0 of easy in the task"),
        ({"index": 10**30}, "index has another type"),
        ({"example_id": "foreign"}, ""),
        ({"subset": "harsh"}, "(harsh is no subset of the task|easy-0000 is index 0 of easy in the task)"),
        ({"subset": "hard", "index": 9}, "easy-0000 is index 0 of easy in the task"),
    ],
)
@pytest.mark.parametrize("of_reference", [False, True])
def test_a_row_that_is_none_of_the_task_s_examples_is_one_line(
    run: Callable[..., Summary], tmp_path: Path, changes: Any, reason: str, limit: int, of_reference: bool
) -> None:
    """Whether the run is finished or goes on: never a traceback, and never figures from such a row."""
    summary = run(limit=1)
    folder = tmp_path / (summary.facts.reference_id if of_reference else summary.run_id)
    edit(folder, **changes)
    with pytest.raises(ValueError, match=rf"rows.jsonl:1 is damaged .*{reason}") as caught:
        run(limit=limit)
    assert folder.name in str(caught.value)
    assert "\n" not in str(caught.value)
    mended = run(limit=limit, resume="restart")
    assert (mended.num_examples, mended.overall and mended.overall.num_pairs) == (2 * limit, 2 * limit)


def test_the_only_row_beyond_the_limit_is_one_line(tmp_path: Path) -> None:
    """As the reviewer found it, and with a summary that says there are no examples."""
    reference = {"name": "full_kv", "_target_": "fakes.FakePolicy", "strength": 0}
    cfg = fakes.config(tmp_path, method=reference, limit=1, task__subsets=["easy"])
    folder = tmp_path / runner.run(cfg, fakes.ENGINE).run_id
    edit(folder, index=7)
    with pytest.raises(ValueError, match=r"rows.jsonl:1 is damaged .easy-0000 is index 0 of easy"):
        runner.run(cfg, fakes.ENGINE)
    (folder / "summary.json").write_text('{"facts": {"available": {"easy": 0}}}')
    with pytest.raises(ValueError, match=r"has rows, but none of the first limit=1 examples .*resume=restart"):
        runner.run(cfg, fakes.ENGINE)


@dataclass(frozen=True)
class AwkwardTask(fakes.FakeTask):
    """Ends with an exception at one place, or yields what no file can hold as it is."""

    at: str = ""
    kind: str = "ValueError"
    odd: str = ""

    def examples(self, *arguments: Any) -> Iterator[Example]:
        for example in super().examples(*arguments):
            if example.id == self.at:
                raise {"ValueError": ValueError, "KeyError": KeyError}[self.kind]("an awkward\narticle")
            if self.odd == "surrogates":
                odd = "\ud83d"
                yield replace(example, answers=(odd, f"yes {odd}"), group=f"g{odd}", data_source=odd)
            elif self.odd == "twice":
                yield replace(example, id="easy-0000")
            elif self.odd == "numbers" and example.id == "easy-0001":
                yield replace(example, answers=(3,))  # type: ignore[arg-type]
            else:
                yield example


AWKWARD = {"_target_": "test_runner.AwkwardTask"}


@pytest.mark.parametrize(
    ("kind", "raised", "at", "where", "num_rows"),
    [
        ("ValueError", ValueError, "easy-0002", r"the example after easy-0001 .index 1 of easy.", 2),
        ("KeyError", RunFailed, "easy-0002", r"the example after easy-0001 .index 1 of easy.", 2),
        ("KeyError", RunFailed, "hard-0001", r"the example after hard-0000 .index 0 of hard.", 5),
        ("KeyError", RunFailed, "easy-0000", r"its first example .index 0 of easy.", 0),
    ],
)
def test_an_example_that_cannot_be_made_ends_the_run_with_its_place(
    run: Callable[..., Summary], tmp_path: Path, kind: str, raised: type, at: str, where: str, num_rows: int
) -> None:
    with pytest.raises(raised, match=rf"fake cannot make {where}: {kind}: .*an awkward.*; the rows so far") as caught:
        run(task={**AWKWARD, "at": at, "kind": kind})
    assert "\n" not in str(caught.value)
    folders = list(tmp_path.iterdir())
    assert [len(rows_of(folder)) for folder in folders] == ([num_rows] if num_rows else [])


def test_a_setting_that_yields_no_example_keeps_its_message(run: Callable[..., Summary], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^an awkward\narticle$"):
        run(task={**AWKWARD, "at": "easy-0000"})
    assert not list(tmp_path.iterdir())


def test_two_examples_with_one_id_are_the_task_s_mistake(run: Callable[..., Summary]) -> None:
    with pytest.raises(ValueError, match="fake yields two examples with the id easy-0000"):
        run(task={**AWKWARD, "odd": "twice"})


def test_half_a_surrogate_pair_in_examples_and_answers_sticks_no_run(tmp_path: Path) -> None:
    def generate(*arguments: Any, **options: Any) -> Any:
        return [
            fakes.FakeGeneration(**{**vars(made), "text": "yes \udcff", "knobs": {"\ud83d": "\ud83d"}})
            for made in fakes.generate(*arguments, **options)
        ]

    cfg = fakes.config(tmp_path, task={**AWKWARD, "odd": "surrogates"})
    engine = replace(fakes.ENGINE, generate=generate)
    summary = runner.run(cfg, engine)
    assert (summary.num_examples, summary.num_errors) == (8, 0)
    row = rows_of(tmp_path / summary.run_id)[0]
    assert (row["answers"], row["prediction"]) == (["\ud83d", "yes \ud83d"], "yes \udcff")
    assert runner.run(cfg, engine) == summary
    closing.render(summary)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"knobs": {"x": {1}}}, "TypeError: Object of type set is not JSON serializable"),
        ({"tier_units": {"full": float("inf")}}, "ValueError: Out of range float values"),
        ({"text": 3}, "ValueError: prediction has another type"),
        ({"fractions": {}}, "KeyError: 'final'"),
    ],
)
def test_an_answer_that_no_row_can_hold_marks_its_example(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    def generate(loaded: Any, policy: Any, *arguments: Any, **options: Any) -> Any:
        found = fakes.generate(loaded, policy, *arguments, **options)
        hit = options["example_ids"] == ["easy-0001"] and policy.strength
        return [fakes.FakeGeneration(**{**vars(made), **(change if hit else {})}) for made in found]

    summary = runner.run(fakes.config(tmp_path), replace(fakes.ENGINE, generate=generate))
    assert (summary.num_examples, summary.num_errors) == (7, 1)
    assert error in summary.problem
    assert statuses(tmp_path / summary.run_id)["easy-0001"] == "error"


def test_an_example_that_no_row_can_hold_is_marked(run: Callable[..., Summary]) -> None:
    summary = run(task={**AWKWARD, "odd": "numbers"})
    assert (summary.num_examples, summary.problem) == (7, "ValueError: answers has another type")


def test_an_edit_to_a_method_concerns_its_own_runs_only(
    run: Callable[..., Summary], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own method in a file of its own: after an edit its unfinished run is refused, the reference is not."""
    folder = tmp_path_factory.mktemp("own")
    monkeypatch.syspath_prepend(folder)
    source = "import dataclasses\nimport fakes\n@dataclasses.dataclass(frozen=True)\nclass Own(fakes.FakePolicy): ...\n"
    (folder / "own_policy.py").write_text(source)
    own = {"name": "own", "_target_": "own_policy.Own", "strength": 3}
    run(method=own, limit=2)
    (folder / "own_policy.py").write_text(source + "# edited\n")
    assert run(limit=3).num_examples == 6
    with pytest.raises(ValueError, match="begun under other conditions .code .* -> "):
        run(method=own, limit=3)
    assert run(method=own, limit=3, resume="restart").num_examples == 6


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
    ({"task__data": "lost"}, "task.data=lost is not there; give another"),
    ({"task__only": ["test"], "split": "dev"}, "split=dev: fake .*no such split; choose one of test"),
    ({"task": {"_target_": "fakes.Nothing"}}, "task._target_=fakes.Nothing is no .*AttributeError: .*Nothing"),
    ({"task": {"_target_": "fakes.describe"}}, "task._target_=fakes.describe is no dataclass"),
    ({"method": {"_target_": "nowhere.X"}}, "method._target_=nowhere.X is no .*No module named 'nowhere'"),
    ({"method": {"_target_": "X"}}, "method._target_=X is no dataclass that can be imported"),
    ({"task__subsets": "easy"}, "task.subsets=easy .*a list"),
    ({"task__nonsense": 1}, "task.nonsense=1 is no field of FakeTask; fields: .*subsets"),
    ({"method__nonsense": 1}, "method.nonsense=1 is no field of FakePolicy; fields: strength, note, longest"),
    ({"method__strength": "strong"}, "method.strength=strong .*an integer"),
    ({"model__weights": "???"}, "weights has no value; set .*weights="),
    ({"model__weights": "broken"}, "model.weights=broken"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[str(change) for change, _ in MISTAKES])
def test_mistakes_are_named_and_leave_nothing_behind(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    target = tmp_path / "runs"
    with pytest.raises(ValueError, match=message) as caught:
        runner.run(fakes.config(target, **change), fakes.ENGINE)
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
    runner.run(cfg, fakes.ENGINE)
    folders = (plan.reference.run_id, plan.job.run_id)
    stormy = tmp_path / "stormy"
    for folder, lines in [(folders[1], 1), (folders[1], 6), (folders[0], 1), (folders[0], 9)]:
        child = process(stormy, "batch_size=2", "limit=5", FAKE_SLEEP_S="0.05")
        file = stormy / folder / "rows.jsonl"
        wait_for(lambda file=file, lines=lines: num_lines(file) >= lines, child)
        child.send_signal(signal.SIGKILL)
        child.communicate()
    runner.run(fakes.config(stormy, batch_size=2, limit=5), fakes.ENGINE)
    for folder in folders:
        calm_rows = rows_of(tmp_path / "calm" / folder)
        assert len(calm_rows) == 12  # limit 5 runs three whole blocks of 2 per subset
        assert rows_of(stormy / folder) == calm_rows


def test_of_two_identical_commands_one_names_the_other_and_stops(tmp_path: Path, process: Start) -> None:
    plan = runner.make_plan(fakes.config(tmp_path))
    first = process(tmp_path, FAKE_SLEEP_S="0.3")
    wait_for(lambda: num_lines(tmp_path / plan.job.run_id / "rows.jsonl"), first)
    with pytest.raises(ValueError, match=rf"run {plan.job.run_id} is held by pid {first.pid} on "):
        runner.run(fakes.config(tmp_path), fakes.ENGINE)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    assert num_lines(tmp_path / plan.job.run_id / "rows.jsonl") == 8


def test_two_methods_at_once_share_one_reference_run(
    tmp_path: Path, process: Start, calls: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = runner.make_plan(fakes.config(tmp_path))
    first = process(tmp_path, FAKE_SLEEP_S="0.3")
    wait_for(lambda: num_lines(tmp_path / plan.reference.run_id / "rows.jsonl"), first)
    summary = runner.run(fakes.config(tmp_path, method__strength=2), fakes.ENGINE)
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

    summary = runner.run(cfg, replace(fakes.ENGINE, generate=generate))
    text = closing.render(summary)
    hard = next(line for line in text.splitlines() if line.startswith("hard"))
    assert hard.endswith("floor")
    assert summary.above_floor is not None
    assert summary.above_floor.reference == 100.0
    assert summary.overall is not None
    assert summary.overall.reference == 50.0
    assert "macro, not at floor" in text


def test_fidelity_is_measured_where_it_is_asked_for(run: Callable[..., Summary], tmp_path: Path) -> None:
    """It is part of the run id, needs no second reference run, and measures FullKV too, as itself."""
    without, measured = run(), run(metrics__fidelity=True)
    assert without.run_id != measured.run_id
    assert without.facts.reference_id == measured.facts.reference_id
    assert {row["fidelity"] for row in rows_of(tmp_path / without.run_id)} == {None}
    rows = rows_of(tmp_path / measured.run_id)
    assert {row["fidelity"]["gold.kl"] for row in rows} == {len("easy-0000") / 100}
    assert measured.fidelity["gold.kl"].value == pytest.approx(0.09)
    assert "KL 0.0900 [0.0900, 0.0900]" in " ".join(closing.render(measured).split())
    full = run(metrics__fidelity=True, method={"name": "full_kv", "_target_": "fakes.FakePolicy", "strength": 0})
    assert full.fidelity["gold.kl"].value == 0.0
    assert full.run_id != full.facts.reference_id


def test_fidelity_along_one_text(run: Callable[..., Summary], tmp_path: Path) -> None:
    both, gold = run(metrics__fidelity=True), run(metrics__fidelity=True, metrics__fidelity_streams=["gold"])
    assert both.run_id != gold.run_id
    same = run(metrics__fidelity=True, metrics__fidelity_streams=["full_kv", "gold"])
    assert same.run_id == both.run_id
    [row, *_] = rows_of(tmp_path / gold.run_id)
    assert {name.split(".")[0] for name in row["fidelity"]} == {"gold"}
    with pytest.raises(ValueError, match=r"metrics.fidelity_streams=\[\] is empty; give \[gold, full_kv\] or one"):
        run(metrics__fidelity=True, metrics__fidelity_streams=[])


def test_a_growing_cache_has_no_fidelity(run: Callable[..., Summary]) -> None:
    with pytest.raises(ValueError, match=r"metrics.fidelity=true: .*use protocol.mode=reset"):
        run(metrics__fidelity=True, protocol__name="multi_query", protocol__mode="continue")
