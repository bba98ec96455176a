"""Scripts that make tables of runs: numbers worked out by hand, and a conversation read in lockstep."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rows import FULL, row, write
from script_modules import ROOT, script

from qevict_bench.rows import Row

LABELS = ((0, False), (0, False), (1, True), (2, False))
DRIFT: dict[str, Any] = {"task": "drift", "protocol": "multi_query", "mode": "continue", "model": "tiny"}


def talks(scores: Sequence[Sequence[float]], **changes: Any) -> list[Row]:
    """Conversations of four turns; a score per turn."""
    return [
        row(
            "drift",
            4 * talk + turn,
            score,
            example_id=f"drift-{talk:04}-turn{turn}",
            group=f"drift-{talk:04}",
            turn=turn,
            metrics={"string_match": score, "distance": float(LABELS[turn][0]), "reasked": float(LABELS[turn][1])},
            **{**DRIFT, **changes},
        )
        for talk, turns in enumerate(scores)
        for turn, score in enumerate(turns)
    ]


def lines_of(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "---" not in line]


def shown(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = script(name).main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


# ---- drift_table ----


def test_right_answers_over_distance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ffffffffffff", talks([[1, 1, 1, 0], [1, 1, 1, 1]], **FULL))
    write(tmp_path / "aaaaaaaaaaaa", talks([[1, 0, 1, 0], [1, 1, 1, 0]]))
    folder = tmp_path / ".lockstep"
    folder.mkdir()
    head = "example_id,group,distance,reasked,kl,agreement,missed,fraction\n"
    forced = [
        f"drift-{t:04}-turn{i},drift-{t:04},{d},{int(r)},{0.1 * (i + 1)},1,0.25,0.2"
        for t in range(2)
        for i, (d, r) in enumerate(LABELS)
    ]
    (folder / "aaaaaaaaaaaa.csv").write_text(head + "\n".join(forced) + "\n")
    code, out, err = shown("drift_table", capsys, str(tmp_path), "--model", "tiny")
    assert (code, err) == (0, "")
    head_line, full, qevict, *rest = lines_of(out)
    assert head_line[4:] == ["first visit", "1 turn ago", "2 turns ago", "same needle", "another", "minus FullKV"]
    assert full[:4] == ["full_kv", "1.0", "1.000", "8"]
    assert [re.match(r"\d+", cell)[0] for cell in full[4:9]] == ["100", "100", "50", "100", "50"]  # type: ignore[index]
    assert qevict[:4] == ["qevict", "0.2", "0.200", "8"]
    assert [re.match(r"\d+", cell)[0] for cell in qevict[4:9]] == ["75", "100", "0", "100", "0"]  # type: ignore[index]
    assert qevict[9].startswith("-25 [")  # two of eight turns lost
    kl, missed = rest[1], rest[2]  # rest[0] is the head of the second table
    assert kl[:5] == ["qevict", "0.2", "0.200", "8", "KL"]
    assert [cell.split(" ")[0] for cell in kl[5:]] == ["0.150", "0.300", "0.400"]
    assert [cell.split(" ")[0] for cell in missed[5:]] == ["25.0"] * 3


def test_runs_asked_other_things_are_not_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "ffffffffffff", talks([[1, 1, 1, 0]], **FULL, answers=("no",)))
    write(tmp_path / "aaaaaaaaaaaa", talks([[1, 0, 1, 0]]))
    code, out, err = shown("drift_table", capsys, str(tmp_path), "--model", "tiny")
    assert (code, out) == (2, "")
    assert "drift-0000-turn0 is another question in" in err


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "example_id,group,distance,reasked,kl\nx,y,1,0,no\n", b"\xff"])
def test_a_foreign_measurement_is_one_line(
    content: str | bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "aaaaaaaaaaaa", talks([[1, 0, 1, 0]]))
    (tmp_path / ".lockstep").mkdir()
    path = tmp_path / ".lockstep" / "aaaaaaaaaaaa.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = shown("drift_table", capsys, str(tmp_path), "--model", "tiny")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"{path} " in err
    assert "measure it anew" in err


def test_native_budgets_stand_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "aaaaaaaaaaaa", talks([[1, 0, 1, 0]], budget="native"))
    assert lines_of(shown("drift_table", capsys, str(tmp_path), "--model", "tiny")[1])[1][:2] == ["qevict", "native"]


@pytest.mark.parametrize(("name", "made"), [("drift_table", "talks"), ("fidelity_table", "measured")])
def test_settings_are_not_mixed(name: str, made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_of = {
        "talks": lambda **changes: talks([[1, 0, 1, 0]], **changes),
        "measured": lambda **c: measured((1, 0), (1, 1), **c),
    }
    write(tmp_path / "aaaaaaaaaaaa", rows_of[made]())
    write(tmp_path / "bbbbbbbbbbbb", rows_of[made](seed=7, method="snapkv", run_id="bbbbbbbbbbbb"))
    code, out, err = shown(name, capsys, str(tmp_path), "--model", "tiny")
    assert (code, out) == (2, "")
    assert re.search(r"qevict has seed=0, snapkv seed=7|snapkv has seed=7, qevict seed=0", err)


@pytest.mark.parametrize("name", ["drift_table", "fidelity_table"])
def test_a_folder_without_such_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "aaaaaaaaaaaa", [row()])
    code, out, err = shown(name, capsys, str(tmp_path))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"error: {tmp_path} has no run" in err


# ---- drift_lockstep ----


def lockstep(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "scripts/drift_lockstep.py"), "model=tiny", f"results_dir={tmp_path}"]
    command += ["task=drift", "task.turns=6", "task.topics=3", "task.context_length=2560", "limit=12", "batch_size=2"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip() or done.stderr.strip()


GROWING = ("protocol=multi_query", "protocol.mode=continue")


def test_every_turn_is_measured(tmp_path: Path) -> None:
    """FullKV loses nothing, whatever a method evicts is missed, and a method alone is what it is beside others."""
    read = {}
    for name, arguments in {"full": ["method=full_kv"], "lossy": ["method=streaming_llm", "budget=0.3"]}.items():
        code, path = lockstep(tmp_path, *GROWING, *arguments)
        assert code == 0, path
        with open(path) as stream:
            read[name] = list(csv.DictReader(stream))
    for full, lossy in zip(read["full"], read["lossy"], strict=True):
        assert (full["example_id"], full["distance"]) == (lossy["example_id"], lossy["distance"])
        assert float(full["kl"]) < 1e-9
        assert (full["agreement"], full["missed"], full["fraction"]) == ("1", "0", "1")
        assert float(lossy["kl"]) > 1e-4
        assert 0.01 < float(lossy["missed"]) < 0.9
        assert float(lossy["fraction"]) <= 0.3
    assert [turn["group"] for turn in read["full"]] == ["drift-0000"] * 6 + ["drift-0001"] * 6


def test_the_lockstep_needs_growing_conversations(tmp_path: Path) -> None:
    code, said = lockstep(tmp_path, "method=qevict")
    assert (code, len(said.splitlines())) == (2, 1)
    assert "give task=drift protocol=multi_query protocol.mode=continue" in said


# ---- fidelity_table ----


def measured(scores: Sequence[float], kls: Sequence[float], **changes: Any) -> list[Row]:
    return [
        row(
            "niah",
            i,
            score,
            task="ruler",
            model="tiny",
            fidelity={
                "gold.kl": kl,
                "gold.kl_first": 0.5,
                "gold.agreement": 0.5,
                "gold.nll_change": 2 * kl,
                "gold.memory": 0.19,
            },
            **changes,
        )
        for i, (score, kl) in enumerate(zip(scores, kls, strict=True))
    ]


def test_methods_are_ranked_by_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scores 75, 50, 25, 0 beside KL .1, .2, .4, .3: ranks differ by one exchange, so Spearman is 1 - 6 * 2 / 60."""
    for name, scores, kl in (("a", (1, 1, 1, 0), 0.1), ("b", (1, 1, 0, 0), 0.2), ("c", (1, 0, 0, 0), 0.4)):
        write(tmp_path / (name * 12), measured(scores, [kl] * 4, method=name, run_id=name * 12))
    write(tmp_path / ("d" * 12), measured((0, 0, 0, 0), [0.3] * 4, method="d", run_id="d" * 12))
    code, out, _ = shown("fidelity_table", capsys, str(tmp_path), "--model", "tiny")
    assert code == 0
    _, *lines = lines_of(out)
    assert [(line[0], line[2], line[4].split(" ")[0]) for line in lines] == [
        ("a", "4", "0.100"),
        ("b", "4", "0.200"),
        ("d", "4", "0.300"),
        ("c", "4", "0.400"),
    ]
    assert [line[3].split(" ")[0] for line in lines] == ["75", "50", "0", "25"]
    assert lines[0][7].startswith("0.200 [")
    assert lines[0][1] == "0.190"
    assert "Spearman of score and -KL over 4 methods: 0.80 [" in out


# ---- study ----


def test_the_study_runs_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A change that changes nothing (the default) differs by 0; a cell that fails is named, and the mean with it."""
    study = script("study")
    runs = {"needles": "task=needle task.lengths=[640] task.depths=[0.5]", "none": "task=needle task.source=hub"}
    subset = "640@50%"
    both = {"one": study.Family("needles", (subset,)), "other": study.Family("none", ("x",))}
    common = ("model=tiny", "budget=0.5", "limit=2", "batch_size=2", "metrics.fidelity=true")
    made = study.Study(common, tmp_path, runs, {"one": both["one"]})
    base, same = made.cells(""), made.cells("method.sink=5")
    assert len(base["one"].rows) == len(base["all"].rows) == len(same["one"].rows) == 2
    assert study.change_of(same["one"], base["one"], study.kl, 3) == "+0.000 [+0.000, +0.000]"
    kls = [study.kl(row) for row in base["one"].rows.values()]
    assert study.mean_of(base["one"], study.kl) == pytest.approx(sum(kls) / 2)
    assert min(kls) > 0
    made = study.Study(common, tmp_path, runs, both)
    broken = made.cells("method.sink=5")
    assert len(broken["one"].rows) == 2
    assert not broken["other"].rows
    assert not broken["all"].rows
    assert "needles can only be generated" in broken["other"].reason
    assert len(made.failed) == 1
    with pytest.raises(ValueError, match="needles can only be generated"):  # the first that runs: so would all others
        study.Study(common, tmp_path, runs, {"other": both["other"]}).cells("method.sink=5")
    assert "done: run.py method=qevict" in capsys.readouterr().err


def test_a_cell_that_breaks_stops_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study = script("study")

    def broken(cfg: object, kept: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(study.runner, "run", broken)
    made = study.Study(("model=tiny",), tmp_path, {"a": "task=needle"}, {"one": study.Family("a", ("x",))})
    made.run_all(["", "method.sink=5"])
    assert made.failed == ["qevict, a: out of memory", "method.sink=5, a: out of memory"]
    assert made.cells("")["one"].reason == "out of memory"


def study_row(name: str, subset: str, kl: float, score: float) -> Row:
    return row(
        subset, 0, score, example_id=name, metrics={"match": score}, fidelity={"gold.kl": kl, "gold.memory": 0.1}
    )


def test_study_means_weigh_subsets_alike() -> None:
    study = script("study")
    base = study.Cell({n: study_row(n, s, k, 0.0) for n, s, k in (("a", "x", 1.0), ("b", "x", 3.0), ("c", "y", 5.0))})
    cell = study.Cell({n: study_row(n, s, k, 0.5) for n, s, k in (("a", "x", 0.0), ("b", "x", 2.0), ("c", "y", 8.0))})
    assert study.mean_of(base, study.kl) == 3.5
    assert study.change_of(cell, base, study.kl, 1).startswith("+1.0 [")  # (-1 + 3) / 2
    assert study.change_of(cell, base, study.score, 0).startswith("+50 [")
    assert study.level(base) == "3.500; 0 (n = 3)"
    assert study.memory([base]) == "0.100 - 0.100"


def test_a_cell_that_lacks_examples_says_so() -> None:
    study = script("study")
    base = study.Cell({n: study_row(n, "x", 1.0, 0.0) for n in "abcdefgh"})
    cell = study.Cell({n: study_row(n, "x", 0.5, 0.0) for n in "abcdefg"})
    assert study.change_of(cell, base, study.kl, 1) == "-0.5 [-0.5, -0.5]* (n = 7 of 8)"
    few = study.Cell({n: study_row(n, "x", 0.5, 0.0) for n in "abcd"})
    assert "*" not in study.change_of(few, base, study.kl, 1)
    assert study._part(cell, ("x", "y")).reason == "no y"
    assert study._part(cell, ("x",)).rows == cell.rows


def test_the_best_of_the_trials_is_in_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    study = script("study")
    values = {"method=snapkv": 2.0, "method=snapkv method.window=16": 1.0, "method=h2o": 3.0}

    def cells(self: object, change: str) -> dict[str, object]:
        cell = study.Cell({"a": study_row("a", "x", values[change], 0.0)})
        return {"one": cell, "all": cell}

    monkeypatch.setattr(study.Study, "cells", cells)
    monkeypatch.setattr(study.Study, "run_all", lambda *_: None)
    made = study.Study((), Path(), {}, {"one": study.Family("needles", ("x",))})
    text = study.trials_table(made, {"snapkv": ["", "method.window=16"], "h2o": [""]})
    settings = [line.split(" | ")[1] for line in text.splitlines()[2:]]
    assert settings == ["as it is", "**window=16**", "**as it is**"]


def test_the_heatmap_is_a_table_and_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    study = script("study")

    def cells(self: object, change: str) -> dict[str, object]:
        omega, q = (float(part.split("=")[1]) for part in change.split())
        cell = study.Cell({} if omega == 32 else {"a": study_row("a", "x", omega + q, 0.5)}, "infeasible")
        return {"one": cell, "all": cell}

    monkeypatch.setattr(study.Study, "cells", cells)
    monkeypatch.setattr(study.Study, "run_all", lambda *_: None)
    common = ("model=tiny", "budget=0.1", "split=dev")
    made = study.Study(common, tmp_path, {}, {"one": study.Family("needles", ("x",))})
    text = study.heatmap(made, [1, 32], [0, 0.5])
    assert "| 1 | 1.000; 50 (n = 1) | 1.500; 50 (n = 1) |" in text
    assert "| 32 | infeasible | infeasible |" in text
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"heatmap-tiny-0.1-dev.{x}" for x in ("pdf", "png")]
