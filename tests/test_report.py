"""scripts/report.py on runs written by hand, and on a sweep of the tiny model."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import rows as made
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from script_modules import ROOT, script
from test_report_tables import Page

from qevict_bench import runner
from qevict_bench.rows import Row

Report = Callable[..., tuple[int, str, str]]
INFEASIBLE = "budget=0.1 does not pay for every token at 2 bits of 968 tokens: the nearest feasible fraction is 0.228"
RULER = {"task": {"_target_": "tasks.ruler.Ruler", "context_length": 1024}}


@pytest.fixture
def report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Report:
    """Runs the script on tmp_path/runs, into tmp_path/out."""

    def run(*texts: str) -> tuple[int, str, str]:
        arguments = [f"runs={tmp_path / 'runs'}", f"output_dir={tmp_path / 'out'}", *texts]
        code = script("report").main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def add(tmp_path: Path, name: str, scores: dict[str, Sequence[float]], **changes: Any) -> list[Row]:
    """A run of method `name` in tmp_path/runs; `config`, `environment`, `summary` as in rows.write."""
    run_id = f"{crc32(f'{name} {changes}'.encode()):012x}"
    extra = {key: changes.pop(key) for key in ("config", "environment", "summary") if key in changes}
    rows = made.rows(scores, **{"run_id": run_id, "method": name, "task": "ruler", **changes})
    made.write(tmp_path / "runs" / run_id, rows, **{**extra, "config": {**RULER, **extra.get("config", {})}})
    return rows


def full(tmp_path: Path, scores: dict[str, Sequence[float]], **changes: Any) -> None:
    add(tmp_path, "full_kv", scores, budget="1.0", **changes)


def table(tmp_path: Path, name: str) -> list[dict[str, str]]:
    [path] = (tmp_path / "out" / "tables").glob(f"*{name}.csv")
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def summaries(tmp_path: Path) -> list[str]:
    folder = tmp_path / "out" / "tables"
    return [path.read_text() for path in sorted(folder.glob("ruler*_query_aware*.md")) if "aware_" not in path.stem]


ONES, HALF, ZEROS = [1.0] * 20, [1.0, 0.0] * 10, [0.0] * 20


# ---- what a table says ----


def test_numbers_by_hand(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES, "cwe": HALF, "fwe": ONES})
    add(tmp_path, "snapkv", {"vt": HALF, "cwe": HALF, "fwe": ZEROS})
    code, out, err = report()
    assert (code, err) == (0, "")
    assert "tables in" in out
    by_method = {row["method"]: row for row in table(tmp_path, "_runs")}
    snapkv = by_method["snapkv"]
    assert (snapkv["n"], snapkv["score"], snapkv["− FullKV"]) == ("60", "33.3", "-50.0")  # (50 + 50 + 0) / 3
    assert (snapkv["vt"], snapkv["cwe"], snapkv["fwe"], snapkv["aggregation (2)"]) == ("50.0", "50.0", "0.0", "25.0")
    assert snapkv["w/t/l"] == "0/30/30"
    assert (snapkv["memory"], snapkv["badge"]) == ("0.200", "enforced, matched, partial")
    assert by_method["full_kv"]["score"] == "83.3"
    [differences] = table(tmp_path, "_differences")
    assert (differences["vt"], differences["cwe"], differences["fwe"]) == ("-50.0", "+0.0", "-100.0")
    assert (differences["vt note"], differences["fwe note"]) == ("*", "*")


def test_the_same_numbers_stand_in_every_file(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES, "cwe": HALF})
    for budget in ("0.2", "0.1"):
        add(tmp_path, "snapkv", {"vt": HALF, "cwe": ZEROS}, budget=budget)
    report()
    folder = tmp_path / "out" / "tables"
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    numbers = r"[+-]?\d+\.\d+"
    for path in folder.glob("*.csv"):
        if re.search("provenance|settings|properties", path.stem):
            continue
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        expected = sorted(re.findall(numbers, "\n".join(lines[1:])))
        grid = [line for line in path.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
        assert sorted(re.findall(numbers, "\n".join(grid[2:]))) == expected
        tex = path.with_suffix(".tex").read_text().replace("$-$", "-")
        body = tex.partition("\\midrule")[2].partition("\\bottomrule")[0]
        assert sorted(re.findall(numbers, body)) == expected
        figure = page.partition(f'<figure class="table" id="{path.stem}">')[2].partition("</table>")[0]
        shown = Page(f"<table{figure.partition('<table')[2]}</table>").rows[1:]
        assert sorted(re.findall(numbers, "\n".join(" ".join(row) for row in shown))) == expected, path.stem


def test_why_a_cell_is_empty(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "snapkv", {"vt": HALF}, budget="0.2")
    add(tmp_path, "kivi", {"vt": HALF}, budget="0.2", status="infeasible", error=INFEASIBLE, matched=False)
    add(tmp_path, "h2o", {"vt": HALF}, budget="0.2", status="error", error="out of memory")
    add(tmp_path, "tova", {"vt": HALF}, budget="0.2", matched=False)
    add(tmp_path, "adakv", {"vt": HALF}, budget="0.1")
    report()
    rows = {row["method"]: row for row in table(tmp_path, "query_aware")}
    notes = {name: row["0.2: score note"] for name, row in rows.items()}
    assert notes["kivi"] == "infeasible: needs 0.228"
    assert notes["h2o"] == "failed: out of memory"
    assert notes["tova"] == "unmatched: see every run"
    assert notes["adakv"] == "not run"
    assert {rows[name]["0.2: score"] for name in ("kivi", "h2o", "tova", "adakv")} == {""}
    [text] = summaries(tmp_path)
    assert "-1" not in re.sub(r"-1\d", "", text)
    every = {row["method"]: row for row in table(tmp_path, "_runs")}
    assert every["tova"]["score"] == "50.0"
    assert every["tova"]["badge"].startswith("enforced, unmatched")


def test_published_and_enforced_are_told_apart(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "kivi", {"vt": HALF}, budget="native", matched=False)
    add(tmp_path, "snapkv", {"vt": HALF}, enforce="prefill", matched=False)
    add(tmp_path, "snapkv", {"vt": HALF})
    report()
    badges = {
        (row["method"], row["budget"]): row["badge"].removesuffix(", partial") for row in table(tmp_path, "_runs")
    }
    assert badges["kivi", "native"] == "published"
    assert badges["snapkv", "0.2, prefill only"] == "published, prefill only, unmatched"
    assert badges["snapkv", "0.2"] == "enforced, matched"
    assert badges["full_kv", "1.0"] == "reference"
    [text] = summaries(tmp_path)
    assert "native: score" in text


def test_no_winner_is_bold_inside_the_noise(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": [1.0] * 60})
    add(tmp_path, "a", {"vt": [1.0] * 40 + [0.0] * 20})
    add(tmp_path, "b", {"vt": [1.0] * 38 + [0.0] * 22})
    add(tmp_path, "c", {"vt": [0.0] * 60})
    report()
    scores = {row["method"]: (row["0.2: score"], row["0.2: score note"]) for row in table(tmp_path, "query_aware")}
    assert scores["a"] == ("66.7", "≈")
    assert scores["b"] == ("63.3", "≈")
    assert scores["c"] == ("0.0", "")
    assert "**" not in "".join(summaries(tmp_path))


def test_a_clear_winner_is_bold(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": [1.0] * 60})
    add(tmp_path, "a", {"vt": [1.0] * 50 + [0.0] * 10})
    add(tmp_path, "b", {"vt": [1.0] * 10 + [0.0] * 50})
    report()
    [text] = summaries(tmp_path)
    assert re.findall(r"\*\*([\d.]+)\*\*", text) == ["83.3"]
    assert "| b | 16.7 | -83.3 [" in text


def test_the_bytes_needed_by_hand(report: Report, tmp_path: Path) -> None:
    """Scores 50 and 100 at 0.1 and 0.2 of the bytes, FullKV 100: 95 % is reached at 0.19."""
    full(tmp_path, {"vt": ONES})
    for budget, scores in (("0.1", HALF), ("0.2", ONES)):
        share = dict.fromkeys((*made.row().fractions, "allowed"), float(budget))  # type: ignore[misc]
        add(tmp_path, "snapkv", {"vt": scores}, budget=budget, fractions=share)
        add(tmp_path, "h2o", {"vt": HALF}, budget=budget, fractions=share)
    report()
    rows = {row["method"]: row for row in table(tmp_path, "_bytes_needed")}
    assert rows["snapkv"]["bytes needed / FullKV's"] == "0.190"
    assert rows["h2o"]["bytes needed / FullKV's"] == ""
    assert rows["h2o"]["bytes needed / FullKV's note"] == "not reached up to 0.200"
    at = {row["method"]: row for row in table(tmp_path, "_equal_bytes")}
    assert (at["snapkv"]["0.100"], at["snapkv"]["0.200"], at["h2o"]["0.200"]) == ("50.0", "100.0", "50.0")
    assert (tmp_path / "out" / "figures" / "ruler_1024_fake_query_aware.pdf").read_bytes().startswith(b"%PDF")


# ---- what may share a table ----


@pytest.mark.parametrize(
    ("changes", "allow", "said"),
    [
        ({"environment": {"versions": {"python": "3.11", "torch": "2.14"}}}, "versions", "torch 2.13 or 2.14"),
        ({"environment": {"shared_hash": "d00d"}}, "code", "code hash of engine and task 5ha5ed or d00d"),
        ({"environment": {"device": "cuda"}}, "device", "device cpu or cuda"),
        ({"dtype": "bfloat16"}, "dtype", "dtype float32 or bfloat16"),
        ({"prompt_source": "official"}, "prompt_source", "prompt_source own or official"),
        ({"protocol": "query_agnostic"}, "protocol", "protocol query_aware or query_agnostic"),
    ],
)
def test_what_may_not_share_a_table(
    report: Report, tmp_path: Path, changes: dict[str, Any], allow: str, said: str
) -> None:
    full(tmp_path, {"vt": ONES}, **changes)
    add(tmp_path, "snapkv", {"vt": HALF}, **changes)
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "h2o", {"vt": ZEROS})
    assert report()[0] == 0
    tables = [text for text in _mds(tmp_path) if "snapkv" in text or "h2o" in text]
    assert not [text for text in tables if "snapkv" in text and "h2o" in text and "low-bit retention" not in text]
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert f"allow={allow} puts them together" in page
    for path in (tmp_path / "out" / "tables").iterdir():
        path.unlink()
    assert report(f"allow={allow}")[0] == 0
    both = [text for text in _mds(tmp_path) if "snapkv" in text and "h2o" in text and "0.2: score" in text]
    assert len(both) == 1
    assert f"NOT THE SAME: {allow}" in both[0].splitlines()[0]
    assert allow in both[0]
    [kinds] = [line for line in both[0].splitlines() if line.startswith("These runs differ in")]
    field, _, values = said.partition(" ") if "code" not in said else ("code hash of engine and task", "", said[29:])
    assert field in kinds
    assert all(value in kinds for value in values.split(" or "))


def _mds(tmp_path: Path) -> list[str]:
    return [path.read_text() for path in (tmp_path / "out" / "tables").glob("ruler*.md")]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"split": "dev"},
        {"seed": 7},
        {"config": {"task": {"_target_": "tasks.ruler.Ruler", "context_length": 2048}}},
        {"answers": ("no",)},
    ],
)
def test_what_never_shares_a_table(report: Report, tmp_path: Path, changes: dict[str, Any]) -> None:
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "snapkv", {"vt": HALF}, **changes)
    allow = "versions,code,device,dtype,prompt_source,protocol"
    assert report(f"allow={allow}")[0] == 0
    assert not [text for text in _mds(tmp_path) if "snapkv" in text and "full_kv" in text and "0.2: score" in text]
    titles = [text.splitlines()[0] for text in _mds(tmp_path) if "score: points" in text]
    assert len(titles) == len({*titles})


def test_a_run_without_full_kv_says_so(report: Report, tmp_path: Path) -> None:
    add(tmp_path, "snapkv", {"vt": HALF})
    report()
    [row] = table(tmp_path, "_runs")
    assert (row["score"], row["− FullKV note"]) == ("50.0", "no FullKV run")


def test_protocols_side_by_side_have_their_own_reference(report: Report, tmp_path: Path) -> None:
    for protocol, scores in (("query_aware", ONES), ("query_agnostic", HALF)):
        full(tmp_path, {"vt": scores}, protocol=protocol)
        add(tmp_path, "snapkv", {"vt": HALF}, protocol=protocol)
    report("allow=protocol")
    differences = {row["method"]: row["− FullKV"] for row in table(tmp_path, "_runs")}
    assert differences["snapkv (query_aware, first token compressed)"] == "-50.0"
    assert differences["snapkv (query_agnostic, first token compressed)"] == "+0.0"


# ---- the paper ----


HEAD = "task,model,context_length,budget,protocol,prompt_source,n,method,subset,value,mark,note\n"


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("ruler,fake,1024,0.2,query_aware,own,20,snapkv,,60.0,~,", True),
        ("ruler,fake,1024,0.2,query_aware,own,20,snapkv,vt,60.0,~,", True),
        ("ruler,fake,1024,0.2,,own,20,snapkv,,60.0,,", False),
        ("ruler,fake,1024,0.2,query_aware,own,,snapkv,,60.0,,", False),
        ("ruler,fake,1024,0.2,query_aware,own,500,snapkv,,60.0,,", False),
        ("ruler,fake,1024,0.1,query_aware,own,20,snapkv,,60.0,,", False),
        ("ruler,other,1024,0.2,query_aware,own,20,snapkv,,60.0,,", False),
        ("ruler,fake,1024,0.2,query_aware,official,20,snapkv,,60.0,,", False),
        ("ruler,fake,32768,0.2,query_aware,own,20,snapkv,,60.0,,", False),
        ("ruler,fake,1024,0.2,query_aware,own,20,h2o,,60.0,,", False),
    ],
)
def test_the_papers_figures(report: Report, tmp_path: Path, line: str, same: bool) -> None:
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "snapkv", {"vt": HALF})
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "some.csv").write_text(f"# source\n{HEAD}{line}\n")
    assert report(f"paper={tmp_path / 'paper'}")[0] == 0
    [row] = table(tmp_path, "_paper")
    assert row["paper"] == "60.0"
    if same:
        assert (row["here"], row["here − paper"], row["setting"]) == ("50.0", "-10.0", "same setting")
    else:
        assert row.get("here", "") == row.get("here − paper", "") == ""
        assert row["setting"].startswith("different setting: ")


def test_the_papers_files_can_be_read() -> None:
    from qevict_bench.report.paper import read_figures

    figures = read_figures(ROOT / "results" / "paper")
    assert {figure.task for figure in figures} == {"ruler", "longbench"}
    assert [f.value for f in figures if f.subset == "cwe" and f.method == "qevict_paper"] == ["43.98"]


# ---- settings, origins ----


def test_the_sheet_names_what_differs_from_the_published_setting(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    snapkv = {"name": "snapkv", "_target_": "methods.snapkv.SnapKV", "window": 64}
    qevict = {"name": "qevict", "_target_": "methods.qevict.QEvict"}
    gone = {"name": "gone", "_target_": "methods.gone.Gone"}
    for config in (snapkv, qevict, gone):
        add(tmp_path, config["name"], {"vt": HALF}, config={"method": config})  # type: ignore[arg-type]
    report()
    sheet = {row["method"]: row for row in table(tmp_path, "_settings")}
    assert sheet["snapkv"]["window"] == "window 64"
    assert sheet["snapkv"]["differs from published"] == "window 64 (published 32)"
    assert "prefill_scores observation (published all)" in sheet["qevict"]["differs from published"]
    assert (sheet["qevict"]["sinks"], sheet["snapkv"]["sinks"]) == ("sink 5", "none")
    assert sheet["gone"]["differs from published"] == "as published"
    origin = table(tmp_path, "_provenance")
    assert all(row["command"].startswith("python run.py method=") for row in origin)
    assert "task.context_length=1024" in origin[0]["command"]


# ---- the page ----


def test_the_page_needs_nothing_from_outside(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES, "cwe": HALF})
    for budget in ("0.2", "0.1"):
        add(tmp_path, "snap<script>kv", {"vt": HALF, "cwe": ZEROS}, budget=budget)
    report()
    text = (tmp_path / "out" / "report" / "index.html").read_text()
    page = Page(text)
    assert page.links
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= {*page.ids}
    assert len(page.ids) == len({*page.ids})
    assert not re.search(r"@import|url\((?!data:)", text)
    assert text.count("<script>") == 1
    assert "snap&lt;script&gt;kv" in text
    assert "data:image/svg+xml;base64," in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_the_figures_of_a_diagnosis_are_on_the_page(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    folder = tmp_path / "diagnosis"
    folder.mkdir()
    code, _, err = report(f"diagnose={folder}")
    assert (code, err.count("\n")) == (2, 1)
    assert "holds no figures" in err
    (folder / "residency.png").write_bytes(b"\x89PNG")
    (folder / "fmm.png").write_bytes(b"\x89PNG")
    assert report(f"diagnose={folder}")[0] == 0
    text = (tmp_path / "out" / "report" / "index.html").read_text()
    assert text.index("residency, figure") < text.index("fmm, figure")


def test_alarms_name_the_runs(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    add(tmp_path, "snapkv", {"vt": HALF}, prediction=" ")
    report()
    text = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "Empty predictions: read these rows" in text
    assert "vt 20 of 20, FullKV 0 of 20: snapkv at 0.2" in text


def test_longbench_has_means_of_its_groups(report: Report, tmp_path: Path) -> None:
    config = {"task": {"_target_": "tasks.longbench.LongBench"}}
    scores = {"hotpotqa": ONES, "musique": HALF, "lcc": ZEROS}
    full(tmp_path, scores, task="longbench", config=config)
    add(tmp_path, "snapkv", {**scores, "musique": ZEROS}, task="longbench", config=config)
    assert report()[0] == 0
    [row] = [row for row in table(tmp_path, "_runs") if row["method"] == "snapkv"]
    assert (row["multi-doc QA (2)"], row["score"]) == ("50.0", "33.3")
    families = script("report").FAMILIES["longbench"]
    assert [len(members) for members in families.values()] == [3, 3, 3, 3, 2, 2, 13, 13, 13]


# ---- scoring again ----


def test_rescoring_says_what_changed_and_writes_nothing(report: Report, tmp_path: Path) -> None:
    """Half of the stored scores are wrong: the answer is in all predictions."""
    full(tmp_path, {"vt": ONES}, prediction="yes", metrics={"string_match_all": 1.0})
    add(tmp_path, "snapkv", {"vt": ONES[:10] + ZEROS[:10]}, prediction="yes", metrics={"string_match_all": 1.0})
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    code, out, _ = report("rescore=true")
    assert code == 0
    assert re.search(r"snapkv at 0.2 on fake, ruler: score in 10 of 20 rows", out)
    assert re.search(r"full_kv at 1.0 on fake, ruler: nothing changed of 20 rows", out)
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()} == before
    [row] = [row for row in table(tmp_path, "_runs") if row["method"] == "snapkv"]
    assert (row["score"], row["− FullKV"]) == ("100.0", "+0.0")
    [text] = summaries(tmp_path)
    assert "Scored again from the stored predictions" in text
    report()
    [row] = [row for row in table(tmp_path, "_runs") if row["method"] == "snapkv"]
    assert row["score"] == "50.0"


# ---- mistakes ----


def test_damaged_runs_are_a_line_each(report: Report, tmp_path: Path) -> None:
    full(tmp_path, {"vt": ONES})
    for name, content in (("bad", "{}\n"), ("empty", "")):
        made.write(tmp_path / "runs" / name, [])
        (tmp_path / "runs" / name / "rows.jsonl").write_text(content)
    code, _, err = report()
    assert code == 0
    assert [line.partition(" ")[0] for line in err.splitlines()] == ["left", "left"]
    text = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "Could not be read" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nonsense", "nonsense is no FIELD=VALUE"),
        ("colour=red", "colour=red is no field"),
        ("allow=model", "allow=model is unknown; choose some of versions"),
        ("rescore=maybe", "rescore=maybe has the wrong type"),
        ("runs=/nowhere/at/all", "/nowhere/at/all is not a folder"),
    ],
)
def test_mistakes_are_one_line(report: Report, tmp_path: Path, text: str, said: str) -> None:
    full(tmp_path, {"vt": ONES})
    code, out, err = report(text)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_folder_without_runs(report: Report, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    code, _, err = report()
    assert code == 2
    assert "no run can be read in" in err


# ---- experiments ----

SWEEPS = sorted(path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml") if "figure1" not in path.stem)


@pytest.fixture(scope="module")
def composing() -> Iterator[None]:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        yield


@pytest.mark.parametrize("name", SWEEPS)
def test_every_experiment_is_a_sweep_of_known_things(name: str, composing: None) -> None:
    cfg = compose("run", overrides=[f"experiment={name}"], return_hydra_config=True)
    assert cfg.hydra.mode.name == "MULTIRUN"
    params = cfg.hydra.sweeper.params
    for group in ("model", "method", "protocol"):
        for option in str(params.get(group, "")).split(",") if params.get(group) else []:
            assert (ROOT / "configs" / group / f"{option}.yaml").exists(), option
    text = (ROOT / "configs" / "experiment" / f"{name}.yaml").read_text()
    assert "estimate" in text
    assert ("not a reproduction" in text) == name.endswith("_mini")
    first = {field: str(values).split(",")[0] for field, values in params.items()}
    fields = [f"{field}={value}" for field, value in first.items()]
    one = compose("run", overrides=[f"experiment={name}", *fields])
    assert runner._method(one.method, "method.")
    assert OmegaConf.to_container(one, resolve=True)


def test_every_experiment_has_its_line_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    names = {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    assert [name for name in sorted(names) if f"| `{name.removesuffix('_mini')}` |" not in text] == []


def test_every_experiment_has_a_twin_for_two_cores() -> None:
    assert {f"{name}_mini" for name in SWEEPS if not name.endswith("_mini")} == {n for n in SWEEPS if "_mini" in n}


@pytest.mark.slow
def test_a_sweep_of_the_tiny_model_becomes_a_report(report: Report, tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, str(ROOT / "run.py"), "-m", "experiment=table2_ruler_mini", "model=tiny", "limit=1"]
    command += ["batch_size=1", "task.subsets=[niah_single_1]", "task.context_length=1536", "budget=0.3,0.2"]
    command += ["method=full_kv,qevict", f"results_dir={tmp_path / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert report()[0] == 0
    summary = {row["method"]: row for row in table(tmp_path, "query_aware")}
    stored = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/summary.json")]
    achieved = {each["budget"]: each["achieved"] for each in stored if each["method"] == "qevict"}
    assert summary["qevict"]["0.2: memory"] == f"{achieved['0.2']:.3f}"
    assert summary["qevict"]["0.3: memory"] == f"{achieved['0.3']:.3f}"


# ---- a browser ----


@pytest.mark.browser
def test_the_page_in_a_browser(report: Report, tmp_path: Path) -> None:
    """No console error, tables sort, figures show, nothing is wider than a phone but what scrolls in its box."""
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium here")
    full(tmp_path, {"vt": ONES, "cwe": HALF})
    for number, name in enumerate(("snapkv", "h2o", "a_method_with_a_name_that_no_phone_is_wide_enough_for_" * 3)):
        for budget in ("0.2", "0.1"):
            scores = [1.0] * (4 + 4 * number) + [0.0] * (16 - 4 * number)
            share = dict.fromkeys((*made.row().fractions, "allowed"), float(budget))  # type: ignore[misc]
            add(tmp_path, name, {"vt": scores, "cwe": ZEROS}, budget=budget, fractions=share)
    add(tmp_path, "kivi", {"vt": ONES, "cwe": HALF}, status="infeasible", error=INFEASIBLE, matched=False)
    report()
    address = (tmp_path / "out" / "report" / "index.html").as_uri()
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (390, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            said: list[str] = []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on(
                "request", lambda request, said=said: said.append(request.url) if "http" in request.url[:4] else None
            )
            page.goto(address)
            page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
            drawn = page.evaluate("document.images[0].currentSrc === document.images[0].src")
            assert drawn == (width == 1280)  # a phone has a figure of its own
            texts = "(rows, at) => rows.map((row) => row.cells[at].textContent.replace('≈', ''))"
            table = page.locator("table").first
            for expected in (["75.0", "30.0", "20.0", "10.0"], ["10.0", "20.0", "30.0", "75.0"]):
                table.locator("thead button").nth(1).click()
                found = table.locator("tbody tr").evaluate_all(texts, 1)
                assert found == [*expected, "infeasible: needs 0.228"]
            every = page.locator("figure[id$=_runs]")
            every.locator("thead button").nth(1).click()  # budgets are texts that hold numbers
            assert every.locator("tbody tr").evaluate_all(texts, 1) == ["0.1"] * 3 + ["0.2"] * 4 + ["1.0"]
            assert said == []
        browser.close()
