"""scripts/report.py on runs that are unusual: every sign, length, budget and kind of failure that rows allow."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import rows as made
from test_report import HALF, INFEASIBLE, ONES, ZEROS, add, full, report, table
from test_report_tables import Page, tex_cells

from qevict_bench.report.commands import command_of, shared_command
from qevict_bench.runs import Run, read_run

__all__ = ["report"]  # the fixture

Report = Any
SIGNS = r"a&b%c$d#e_f{g}h~i^j\k<l>m|n[o]*é模型…≈Ω`'"


def files(tmp_path: Path) -> set[str]:
    return {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}


def read(tmp_path: Path) -> list[Run]:
    return [read_run(path, number) for number, path in enumerate(sorted((tmp_path / "runs").iterdir()), 1)]


def test_every_latex_table_compiles(report: Report, tmp_path: Path) -> None:
    """With pdflatex if there is one; their braces, columns and signs are looked at anyway."""
    full(tmp_path, {SIGNS: ONES, "vt": HALF})
    for budget in ("0.2", "0.1"):
        add(tmp_path, SIGNS, {SIGNS: HALF, "vt": ZEROS}, budget=budget)
    add(tmp_path, "kivi", {"vt": HALF}, status="infeasible", error=INFEASIBLE, matched=False)
    add(tmp_path, "h2o", {"vt": HALF}, status="error", error=f"{SIGNS} \x1b[31m\nsecond line")
    assert report()[0] == 0
    tables = sorted((tmp_path / "out" / "tables").glob("*.tex"))
    for path in tables:
        rows = tex_cells(path.read_text())
        assert rows
        assert len({len(row) for row in rows}) == 1
    if shutil.which("pdflatex") is None:
        return
    inputs = "\n".join(rf"\input{{{path.name}}}" for path in tables)
    without = r"\let\toprule\hline\let\midrule\hline\let\bottomrule\hline"
    booktabs = rf"\IfFileExists{{booktabs.sty}}{{\usepackage{{booktabs}}}}{{{without}}}"
    head = rf"\documentclass{{article}}\usepackage{{graphicx}}{booktabs}\begin{{document}}"
    (tmp_path / "out" / "tables" / "all.tex").write_text(f"{head}\n{inputs}\n\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path / "out" / "tables", capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]


def test_what_an_older_report_wrote_goes_and_what_others_wrote_stays(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    for budget in ("0.2", "0.1"):
        add(tmp_path, "snapkv", {"vt": HALF}, budget=budget)
    report()
    before = files(tmp_path)
    assert "figures/ruler_1024_fake_query_aware.pdf" in before
    (tmp_path / "out" / "tables" / "mine.md").write_text("[x](../report/index.html) [y](../../runs)")
    shutil.rmtree(tmp_path / "runs")
    full(tmp_path, {"vt": ONES}, model="other")
    add(tmp_path, "snapkv", {"vt": HALF}, model="other")
    report()
    after = files(tmp_path)
    assert [name for name in after if "fake" in name] == []
    assert {"tables/mine.md", "report/index.html", "tables/ruler_1024_other_query_aware.tex"} <= after
    text = (tmp_path / "out" / "tables" / "README.md").read_text()
    linked = {f"tables/{name}" for name in re.findall(r"\]\(([^)]+)\)", text)}
    assert linked == {name for name in after if name.startswith("tables/")} - {"tables/README.md", "tables/mine.md"}


def test_a_readme_of_somebody_else_stays(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    (tmp_path / "out" / "tables").mkdir(parents=True)
    readme = tmp_path / "out" / "tables" / "README.md"
    readme.write_text("[mine](mine.md)")
    code, _, err = report()
    assert (code, err.count("\n")) == (2, 1)
    assert "README.md is not of a report and would be overwritten" in err
    assert readme.read_text() == "[mine](mine.md)"
    assert files(tmp_path) == {"tables/README.md"}


def test_an_output_folder_that_cannot_be_written(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    (tmp_path / "file").write_text("")
    code, out, err = report(f"output_dir={tmp_path / 'file' / 'out'}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"output_dir={tmp_path / 'file' / 'out'} cannot be written (Not a directory); choose another" in err


def test_budgets_of_every_kind_stand_in_their_order(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    for budget in ("native", "1024t", "1/5", "0.05", "0.4"):
        add(tmp_path, "snapkv", {"vt": HALF}, budget=budget, matched=budget != "native")
    report()
    [row] = [row for row in table(tmp_path, "query_aware") if row["method"] == "snapkv"]
    assert [name for name in row if name.endswith(": score")] == [
        f"{budget}: score" for budget in ("1024t", "0.4", "1/5", "0.05", "native")
    ]


def test_full_kv_alone_has_its_score(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": HALF})
    report()
    [row] = table(tmp_path, "query_aware")
    assert (row["method"], row["1.0: score"]) == ("full_kv", "50.0")


def test_runs_of_errors_alone(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES}, status="error", error="out of memory")
    add(tmp_path, "snapkv", {"vt": ONES}, status="error", error="out of memory")
    assert report()[0] == 0
    [row] = [row for row in table(tmp_path, "query_aware") if row["method"] == "snapkv"]
    assert (row["0.2: score"], row["0.2: score note"]) == ("", "failed: out of memory")


def test_names_of_any_length_and_script(report: Report, tmp_path: Path) -> None:
    name = "模型/" + "x" * 300
    full(tmp_path, {"vt": ONES}, model=name)
    for method in ("m" * 300, "方法"):
        for budget in ("0.2", "0.1"):
            add(tmp_path, method, {"vt": HALF}, model=name, budget=budget)
    assert report()[0] == 0
    text = (tmp_path / "out" / "report" / "index.html").read_text()
    assert Page(text).rows
    assert name in text
    assert "方法" in text


def test_one_example_is_not_certain(report: Report, tmp_path: Path) -> None:
    """Six subsets of one example each: their mean has an interval."""
    subsets = [f"s{i}" for i in range(6)]
    full(tmp_path, {name: [1.0] for name in subsets})
    for budget in ("0.2", "0.1"):
        share = dict.fromkeys((*made.row().fractions, "allowed"), float(budget))  # type: ignore[misc]
        scores = {name: [float(i % 2)] for i, name in enumerate(subsets)}
        add(tmp_path, "snapkv", scores, budget=budget, fractions=share)
        add(tmp_path, "h2o", scores, budget=budget, fractions=share)
    assert report()[0] == 0
    row = next(row for row in table(tmp_path, "_equal_bytes") if row["method"] == "snapkv")
    assert row["0.200"] == "50.0"
    assert float(row["0.200 low"]) < 50 < float(row["0.200 high"])


@pytest.mark.parametrize("method", ["snapkv", ["snapkv"], None])
def test_a_configuration_that_is_none_is_a_line(report: Report, tmp_path: Path, method: object) -> None:
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "snapkv", {"vt": HALF}, config={"method": method})
    code, _, err = report()
    assert (code, err.count("\n")) == (0, 1)
    assert "config.yaml cannot be read (it is not the configuration of a run); run it again" in err


def test_a_method_that_refuses_the_fields_of_old_runs_is_named_all_the_same(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    old = {"name": "snapkv", "_target_": "methods.snapkv.SnapKV", "window": -5}
    add(tmp_path, "snapkv", {"vt": HALF}, config={"method": old})
    assert report()[0] == 0
    [row] = table(tmp_path, "table1_properties")
    assert row["method"] == "snapkv"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"context_length": 1024}, "Empty module name"),
        ({"_target_": "subprocess.Popen", "context_length": 1024}, "must be called with a dataclass"),
        ({"_target_": "tasks.gone.Gone", "context_length": 1024}, "No module named 'tasks.gone'"),
        ({"_target_": "tasks.ruler.Ruler", "context_length": -1}, "context_length"),
    ],
)
def test_a_run_that_cannot_be_scored_again_keeps_its_scores(
    report: Report, tmp_path: Path, task: dict[str, Any], said: str
) -> None:
    full(tmp_path, {"trec": ONES}, config={"task": task})
    code, out, err = report("rescore=true")
    assert (code, err) == (0, "")
    assert "keeps its scores: " in out
    assert said in out
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "Notes names the runs that keep their scores" in page
    [row] = table(tmp_path, "query_aware")
    assert row["1.0: score"] == "100.0"


def test_the_shared_command_leaves_open_what_differs(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "snapkv", {"vt": HALF}, budget="0.2", config={"limit": 4})
    add(tmp_path, "qevict", {"vt": HALF}, budget="0.1", variant="window=4,q=0.5", config={"limit": 4})
    runs = read(tmp_path)
    qevict = next(run for run in runs if run.first.method == "qevict")
    assert command_of(qevict) == (
        "python run.py method=qevict method.window=4 method.q=0.5 model=fake task=ruler task.context_length=1024 "
        "budget=0.1 limit=20 batch_size=1"
    )  # the limit was raised after config.yaml was written
    assert shared_command(runs) == (
        "python run.py method=... method.FIELD=... model=fake task=ruler task.context_length=1024 budget=... limit=20 "
        "batch_size=1"
    )
    assert report()[0] == 0
    for path in (tmp_path / "out" / "tables").glob("ruler*.*"):
        assert "run.py method=... method.FIELD=..." in path.read_text().replace("\\ldots{}", "...").replace("\\_", "_")
        assert "commit abc, newest 20" in path.read_text()
        assert "not a reproduction" in path.read_text()


def test_seconds_and_bytes_by_hand(report: Report, tmp_path: Path) -> None:
    sizes = {"mean": 0.0, "peak": 3 * 2.0**20, "workspace": 2.0**19, "host": 0.0}
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "snapkv", {"vt": HALF}, bytes=sizes, ttft_s=0.25, decode_s=0.3, new_tokens=4, batch_size=2)
    add(tmp_path, "h2o", {"vt": HALF}, new_tokens=1)
    report()
    rows = {row["method"].split(" ")[0]: row for row in table(tmp_path, "_efficiency")}
    found = rows["snapkv"]
    assert (found["batch"], found["first token, s"], found["further token, ms"]) == ("2", "0.250", "100.0")
    assert (found["peak cache, MiB"], found["workspace, MiB"], found["host, MiB"]) == ("3.00", "0.50", "0.00")
    assert (rows["h2o"]["further token, ms"], rows["h2o"]["further token, ms note"]) == ("", "no token")
