"""scripts/compare.py on runs written by hand, and on runs of the runner on stand-ins."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
import rows as made

from qevict_bench import runner
from qevict_bench.terminal import columns

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare.py"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the script in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("compare_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_script", script)
    spec.loader.exec_module(script)

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = script.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        if code:
            assert err.startswith("error: ")
            assert err.count("\n") == 1
            assert out == ""
        else:
            assert max(map(columns, out.splitlines())) <= 100
        return code, out, err

    return run


def scores(share: float, seed: int, size: int = 60) -> dict[str, list[float]]:
    rng = np.random.default_rng(seed)
    return {name: (rng.random(size) < share).astype(float).tolist() for name in ("easy", "hard")}


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    first = made.write(tmp_path / "one", made.rows(scores(0.9, 1)))
    second = made.write(tmp_path / "two", made.rows(scores(0.3, 2), run_id="bbbbbbbbbbbb", method="snapkv"))
    return first, second


def test_a_clear_difference(compare: Run, two: tuple[Path, Path]) -> None:
    code, out, _ = compare(*two)
    assert code == 0
    first, second = scores(0.9, 1), scores(0.3, 2)
    macro = [100 * np.mean([np.mean(values) for values in run.values()]) for run in (first, second)]
    line = next(line for line in out.splitlines() if line.lstrip().startswith("1 - 2"))
    assert line.split()[3:7] == ["120", f"{macro[0]:.1f}", f"{macro[1]:.1f}", f"{macro[0] - macro[1]:+.1f}"]
    assert " <.001*" in line
    assert f"After Holm over 1 pair (5 %): 1 scores above 2 by {macro[0] - macro[1]:.1f}." in out
    assert "shared" not in out
    assert "FAKE-style (own wording) on fake (float32, cpu)" in out


def test_no_winner_inside_the_noise(compare: Run, tmp_path: Path) -> None:
    paths = [
        made.write(tmp_path / f"{seed}", made.rows(scores(0.5, seed), run_id=f"{seed}" * 12, method=f"m{seed}"))
        for seed in (1, 2, 3)
    ]
    code, out, _ = compare(*paths)
    assert code == 0
    assert "*" not in out.replace("*: Holm's p", "")
    assert "After Holm over 3 pairs (5 %): no difference is larger than noise, so nothing here ranks these runs." in out


def test_a_handful_of_wins_ranks_nothing(compare: Run, tmp_path: Path) -> None:
    equal = [1.0] * 45
    one = made.write(tmp_path / "a", made.rows({"easy": [*equal, *[1.0] * 5]}))
    two = made.write(tmp_path / "b", made.rows({"easy": [*equal, *[0.0] * 5]}, run_id="b" * 12, method="snapkv"))
    code, out, _ = compare(one, two)
    assert code == 0
    assert "5/45/0 0.062" in out
    assert "nothing here ranks these runs" in out


def test_subsets_and_partial_runs(compare: Run, tmp_path: Path) -> None:
    whole = made.write(tmp_path / "a", made.rows(scores(0.9, 1)), summary={"facts": {"reference_id": "r"}})
    part = made.rows(scores(0.5, 2), run_id="bbbbbbbbbbbb", method="a_method_with_a_very_long_name_indeed")[:75]
    code, out, _ = compare(whole, made.write(tmp_path / "b", part), "--subsets")
    assert code == 0
    assert "summarized" in out
    assert "partial" in out
    assert "1 - 2: 75 of 120 examples shared (ok in both)" in out
    [easy] = [line for line in out.splitlines() if line.startswith("easy")]
    [hard] = [line for line in out.splitlines() if line.startswith("hard")]
    assert (easy.split()[1], hard.split()[1]) == ("60", "15")


def test_the_reference_goes_second_and_its_limits_are_alarms(compare: Run, tmp_path: Path) -> None:
    full = made.write(tmp_path / "full", made.rows({"easy": [1.0] * 9, "hard": [0.0] * 9}, **made.FULL))
    mine = made.write(tmp_path / "mine", made.rows({"easy": [1.0] * 9, "hard": [1.0] * 9}))
    code, out, _ = compare(full, mine)
    assert code == 0
    assert "2 - 1" in out
    for part in ("floor: FullKV below 20 (hard 0.0)", "ceiling: FullKV at 99 or more (easy 100.0)", "above: above"):
        assert part in out


def test_identical_outputs_at_other_bytes(compare: Run, tmp_path: Path) -> None:
    values = {"easy": [1.0, 0.0] * 5}
    one = made.write(tmp_path / "a", made.rows(values, prediction="p"))
    other = {
        "bytes": {"mean": 100.0, "workspace": 0.0, "host": 0.0},
        "run_id": "b" * 12,
        "budget": "0.1",
        "prediction": "p",
    }
    code, out, _ = compare(one, made.write(tmp_path / "b", made.rows(values, **other)))
    assert code == 0
    assert "1 - 2: identical: predictions all equal although the bytes differ (2's on 10 of 10 examples" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {"model": "other"}}, "model is fake in one and other in the other"),
        ({"rows": {"dtype": "bfloat16"}}, "dtype is float32 in one and bfloat16"),
        ({"rows": {"protocol": "query_agnostic"}}, "protocol is query_aware in one and query_agnostic"),
        ({"rows": {"first_token": "full"}}, "first_token is compressed in one and full"),
        ({"rows": {"prompt_source": "official"}}, "prompt_source is own in one and official"),
        ({"rows": {"split": "dev"}}, "split is test in one and dev"),
        ({"rows": {"seed": 1}}, "seed is 0 in one and 1"),
        ({"rows": {"task": "gsm8k"}}, "task is fake in one and gsm8k"),
        ({"rows": {"answers": ("no",)}}, "answers of easy-0000 is ('yes',) in one and ('no',)"),
        ({"rows": {"prompt_tokens": 51}}, "prompt_tokens of easy-0000 is 50 in one and 51"),
        ({"config": {"task": {"context_length": 65}}}, "task._target_ is fakes.FakeTask in one and none"),
        ({"config": {"model": {"name": "fake", "chat": "plain"}}}, "model.chat is auto in one and plain"),
        ({"summary": {"facts": {"reference_id": "other"}}}, "the reference run (model weights, task data"),
        ({"environment": {"versions": {"python": "3.11", "torch": "2.14"}}}, "torch is 2.13 in one and 2.14"),
        ({"environment": {"device": "cuda"}}, "device is cpu in one and cuda"),
        ({"environment": {"shared_hash": "d00d"}}, "code hash of engine and task is 5ha5ed in one and d00d"),
        ({"config": {"method": made.CONFIG["method"]}, "environment": {"code_hash": "d00d"}}, "code hash is c0de"),
    ],
)
def test_runs_that_cannot_be_compared(compare: Run, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values = scores(0.5, 1, size=3)
    summary = {"facts": {"reference_id": "r"}}
    one = made.write(tmp_path / "one", made.rows(values), config={"method": made.CONFIG["method"]}, summary=summary)
    rest = {name: value for name, value in changes.items() if name != "rows"}
    fields = {"run_id": "b" * 12, "method": "snapkv", **changes.get("rows", {})}
    two = made.write(tmp_path / "two", made.rows(values, **fields), **{"summary": summary, **rest})
    code, _, err = compare(one, two)
    assert code == 2
    assert message in err
    assert "one and two cannot be compared: " in err
    if "environment" in changes:
        code, out, _ = compare(one, two, "--allow=versions")
        assert code == 0
        assert "NOT THE SAME SOFTWARE (--allow=versions): " in out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", ""),
        ("rows.jsonl", "{}\n"),
        ("env.json", ""),
        ("env.json", "[]"),
        ("env.json", "{}"),
        ("env.json", "{"),
        ("config.yaml", ""),
        ("config.yaml", "- 1"),
        ("config.yaml", "a: [\n"),
        ("summary.json", "nonsense"),
    ],
)
def test_damaged_runs_are_one_line(compare: Run, two: tuple[Path, Path], name: str, content: str) -> None:
    (two[1] / name).write_text(content)
    code, _, err = compare(*two)
    assert code == 2
    assert "two" in err


@pytest.mark.parametrize("name", ["rows.jsonl", "env.json", "config.yaml"])
def test_missing_files_are_one_line(compare: Run, two: tuple[Path, Path], name: str) -> None:
    (two[1] / name).unlink()
    assert compare(*two)[0] == 2


def test_mistakes_on_the_command_line(compare: Run, two: tuple[Path, Path], tmp_path: Path) -> None:
    assert "give at least two" in compare(two[0])[2]
    assert "given twice" in compare(two[0], two[0])[2]
    assert "nowhere is neither the folder of a run nor the id of one in " in compare(two[0], "nowhere")[2]
    assert compare("one", "two", "--results-dir", tmp_path)[0] == 0


def test_runs_without_a_shared_example(compare: Run, tmp_path: Path) -> None:
    one = made.write(tmp_path / "one", [made.row("easy", 0)])
    two = made.write(tmp_path / "two", [made.row("easy", 1, run_id="b" * 12, method="snapkv")])
    code, out, _ = compare(one, two)
    assert code == 0
    assert "no example is ok in both" in out


def test_runs_of_the_runner(compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "describe", fakes.describe)
    runs = [runner.run(fakes.config(tmp_path, method__strength=n, limit=12), fakes.ENGINE) for n in (1, 2)]
    ids = [summary.run_id for summary in runs]
    code, out, _ = compare(*ids, runs[0].facts.reference_id, "--results-dir", tmp_path)
    assert code == 0
    for summary in runs:
        assert summary.overall is not None
        diff = summary.overall.diff
        assert f"{diff.value:+6.1f}  [{diff.low:+6.1f}, {diff.high:+6.1f}]" in out
    stored = json.loads((tmp_path / ids[0] / "summary.json").read_text())
    assert [alarm["kind"] for alarm in stored["alarms"]] == ["ceiling", "ceiling"]


def test_a_summary_does_not_make_a_run_complete(compare: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the newest command asked for does: as status.py says."""
    monkeypatch.setattr(runner, "describe", fakes.describe)
    ids = [runner.run(fakes.config(tmp_path, method__strength=n, limit=3), fakes.ENGINE).run_id for n in (1, 2)]

    def states() -> list[str]:
        _, out, _ = compare(*ids, "--results-dir", tmp_path)
        return [line.split()[-1] for line in out.splitlines() if line.endswith(("  summarized", "  partial"))]

    assert states() == ["summarized", "summarized"]
    wanted = tmp_path / ids[0] / "wanted.json"
    wanted.write_text(json.dumps({"limit": 5, "subsets": ["easy", "hard"]}))
    assert states() == ["partial", "summarized"]
    (tmp_path / ids[1] / "summary.json").unlink()
    assert states() == ["partial", "partial"]
    wanted.write_text("[]")
    assert "wanted.json is damaged" in compare(*ids, "--results-dir", tmp_path)[2]


def test_an_example_that_failed_in_one_run_is_not_shared(compare: Run, tmp_path: Path) -> None:
    one = made.write(tmp_path / "one", made.rows({"easy": [1.0] * 4}))
    other = [*made.rows({"easy": [1.0] * 3}), made.row("easy", 3, status="infeasible")]
    changed = [replace(row, run_id="b" * 12, method="snapkv") for row in other]
    _, out, _ = compare(one, made.write(tmp_path / "two", changed))
    assert "1 - 2: 3 of 4 examples shared (ok in both)" in out


def test_wide_and_steering_characters_keep_the_columns(compare: Run, tmp_path: Path) -> None:
    common = {"model": "模型" * 40, "dtype": "float32"}
    values = {"容易" * 9: [1.0, 0.0], "hard\x1b[31m": [1.0, 0.0]}
    one = made.write(tmp_path / "a", made.rows(values, method="方法" * 4, variant="変数=値 " * 30, **common))
    two = made.write(tmp_path / "b", made.rows(values, run_id="b" * 12, method="snapkv", **common))
    _, out, _ = compare(one, two, "--subsets")
    lines = out.splitlines()
    assert "\x1b" not in out
    table = [line for line in lines if " partial" in line]
    assert len({columns(line) for line in table}) == 1
    subsets = [line for line in lines if line.startswith(("容易", "hard?"))]
    assert len(subsets) == 2
    assert len({columns(line) for line in subsets}) == 1
