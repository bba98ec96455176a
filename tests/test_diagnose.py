"""scripts/diagnose.py on the tiny model: files, report and mistakes; and the oscillating workload for the ledger."""

from __future__ import annotations

import csv
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from presets import qevict
from script_modules import script
from tiny_models import engine, random_ids

import run as cli
from methods.full_kv import FullKV
from qevict_bench.agreement import score_agreement
from qevict_bench.budget import Budget
from qevict_bench.diagnosis import Plan, Run, Text, continued, layer_errors, loops, observe, observe_all
from qevict_bench.diagnostics import churn, fmm, lir, moves, oracle_by_score
from qevict_bench.findings import SECTIONS, Findings, PaperFigure, read_paper, render
from qevict_bench.lockstep import Part, Stream, observe_streams, protected_by
from qevict_bench.measures import Spread
from qevict_bench.models import ModelSpec
from qevict_bench.oscillation import Oscillating
from qevict_bench.reference import full_kv_continuation
from qevict_bench.session import geometry_of
from qevict_bench.statistics import bootstrap

ROOT = Path(__file__).parents[1]
TINY = ("model=tiny", "prompt_tokens=150", "new_tokens=24", "streams.count=2")
FIGURES = ("fmm", "mass", "residency", "routing", "ledger")
TABLES = ("scalars", "summary", "fmm", "moves", "bytes", "attention", "predictions", "output_error")
Call = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def diagnose(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the script in this process, in a folder of its own: (exit code, lines of stdout, lines of stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["diagnose.py"])
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path / "cache"))
    main = script("diagnose").job

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        with warnings.catch_warnings():
            code = cli.command_line([*arguments], main)
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def asked(*overrides: str) -> Any:
    """The checked configuration and the runs of a command line."""
    overrides = tuple(re.sub(r"^method\.", r"++\g<0>", text) for text in overrides)  # as run.py does
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return script("diagnose").checked(compose("diagnose", overrides=list(overrides)))


# ---- end to end ----


def test_files_and_report_agree_with_the_records(diagnose: Call, tmp_path: Path) -> None:
    """Scalars and curves are recomputed here from records of the streams that the script says it reads."""
    variants = ("+runs.two.q=0", "+runs.three.q=0.6")
    settings = (*TINY, "budget=0.5", "method=qevict", "method.prefill_scores=all")
    code, out, err = diagnose(*settings, *variants, "output_dir=found", "codec_scores=true")
    assert code == 0, err
    files = {f"{name}.csv" for name in TABLES} | {f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")}
    assert {path.name for path in (tmp_path / "found").iterdir()} == files
    scalars = {(row["run"], row["stream"]): row for row in rows(tmp_path / "found/scalars.csv")}
    wanted, policies = asked(*settings, *variants)
    texts = script("diagnose").texts_of(wanted, engine())
    prompts = [text.prefill for text in texts]
    answers = full_kv_continuation(engine(), prompts, 24)
    assert [text.name for text in texts] == ["herring fleet 1", "bakery 1"]
    streams = [
        Stream(text.name, (Part(text.prefill, False), Part(ids, True)))
        for text, ids in zip(texts, answers, strict=True)
    ]
    assert set(scalars) == {(run, text.name) for run in policies for text in texts} | {("oscillation", texts[0].name)}
    summary = {(row["run"], row["scalar"]): row for row in rows(tmp_path / "found/summary.csv")}
    for run, policy in policies.items():
        records = observe_streams(engine(), policy, Budget("0.5"), streams, seed=0, coded_scores=True)
        expected: dict[str, list[float]] = {}
        for record in records:
            history = record.history
            measured = {
                "fmm.mean": float(fmm(history)[:-1].mean()),
                "fmm.end": float(fmm(history)[-2]),
                "mass.recent": float(record.shares_S5[:, 3].mean()),
                "missed": float(record.missed_S.mean()),
                "churn.held": churn(history).value,
                "lir.deployed.1": lir(history.full_KLTU, history.candidate_KU, 1).share,
                "lir.by_score.2.strict": lir(
                    oracle_by_score(history, record.prefill_LHU), history.candidate_KU, 2, True
                ).share,
                "kl": float(record.kl_S.mean()),
                "moves.demotions": float(moves(history).demotions_K[1:].double().mean()),
                "k_quantized": float(history.k_quantized_KLT.double().mean()),
                "ledger.bytes": sum(size.ledger for size in record.sizes) / len(record.sizes),
                "fraction": record.fraction,
            }
            if run == "three":
                assert record.coded_KLHU is not None
                where = (history.scoped_mass_KLTU, history.quantized_KLTU, history.k_full_KLT, 0)
                codec = score_agreement(record.coded_KLHU.mean(2, keepdim=True), *where)
                measured["agreement.codec.shuffled.spearman"] = codec.shuffled.spearman.value
            row = scalars[run, record.name]
            assert {key: float(row[key]) for key in measured} == pytest.approx(measured, rel=1e-6, nan_ok=True)
            for key, value in measured.items():
                expected.setdefault(key, []).append(value)
            curve = [
                row for row in rows(tmp_path / "found/fmm.csv") if (row["run"], row["stream"]) == (run, record.name)
            ]
            assert [int(row["tokens"]) for row in curve] == [0, 8, 16, 24]
            assert [float(row["evicted"]) for row in curve] == pytest.approx(
                fmm(history).tolist(), rel=1e-6, nan_ok=True
            )
        for key, values in expected.items():
            if not any(map(isnan, values)):
                interval, row = bootstrap(values).interval(), summary[run, key]
                found = [float(row[name]) for name in ("mean", "low", "high")]
                assert found == pytest.approx([interval.value, interval.low, interval.high], rel=1e-6)
                assert row["streams"] == "2"
    text = "\n".join(out)
    mean = float(summary["three", "fmm.mean"]["mean"])
    assert re.search(rf"FMM, mean over events +[\d.]+ ±[\d.]+ +{100 * mean:.2f} ±", text)
    change = [float(scalars["three", x.name]["kl"]) - float(scalars["two", x.name]["kl"]) for x in streams]
    assert re.search(rf"\n  three - two +{re.escape(f'{sum(change) / 2:+.3f}')} \[", text)
    assert "small model: not a reproduction" in text
    assert "(prefill_scores=all)" in out[0]
    assert max(map(len, out)) <= 100
    assert float(scalars["oscillation", "herring fleet 1"]["churn.full"]) == 1


def test_a_needle_has_a_fate_before_and_after_the_question(diagnose: Call, tmp_path: Path) -> None:
    settings = ("model=tiny", "prompt_tokens=700", "new_tokens=9", "streams.count=6", "streams.source=needle")
    code, out, err = diagnose(*settings, "method=snapkv", "streams.question=appended", "budget=0.5", "output_dir=.")
    assert code == 0, err
    found = rows(tmp_path / "scalars.csv")
    depths = ["0%", "25%", "50%", "75%", "100%", "0%"]
    assert [row["stream"].split("@")[1] for row in found] == [
        f"{depth}-000{number // 5}" for number, depth in enumerate(depths)
    ]
    for row in found:
        for when in ("after_prefill", "before_answer", "end"):
            assert sum(
                float(row[f"needle.{when}.{tier}"]) for tier in ("full", "quantized", "evicted")
            ) == pytest.approx(1)
        assert float(row["needle.end.evicted"]) >= float(row["needle.after_prefill.evicted"])
    assert any("evicted after the prefill" in line for line in out)
    assert not (tmp_path / "ledger.png").exists()  # no codes, no ledger


@pytest.mark.parametrize("method", ["full_kv", "h2o", "kivi", "zipcache", "adakv", "mikv", "qevict_noevict"])
def test_other_methods(diagnose: Call, tmp_path: Path, method: str) -> None:
    """One of each kind: nothing evicted, tokens, groups, several low tiers, ragged heads, no eviction."""
    code, _, err = diagnose(*TINY, f"method={method}", "budget=0.6", "streams.count=1", "output_dir=.")
    assert code == 0, err
    [row] = [row for row in rows(tmp_path / "scalars.csv") if row["run"] == method]
    shares = [float(row[f"mass.{kind}"]) for kind in ("sink", "full", "quantized", "recent", "evicted")]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    if method == "full_kv":
        assert (float(row["fmm.mean"]), float(row["churn.held"]), float(row["fraction"])) == (0, 0, 1)


def test_a_tier_that_is_off(diagnose: Call, tmp_path: Path) -> None:
    """A second run of whatever quantizes, in which what is quantized is as good as gone."""
    variants = ("method=qevict", "+runs.two.q=0", "+runs.three.q=0.9", "tier_off=true", "output_dir=.")
    code, out, err = diagnose(*TINY, "budget=0.35", *variants)
    assert code == 0, err
    kl: dict[str, list[float]] = {}
    for row in rows(tmp_path / "scalars.csv"):
        kl.setdefault(row["run"], []).append(float(row["kl"]))
    assert list(kl) == ["two", "three", "three-off", "oscillation"]
    assert all(seen < off for seen, off in zip(kl["three"], kl["three-off"], strict=True))
    assert any("three-off - three" in line for line in out)


@pytest.mark.slow
def test_workers_change_no_number(diagnose: Call, tmp_path: Path) -> None:
    arguments = (*TINY, "method=qevict_paper", "budget=0.5", "+runs.a.q=0", "+runs.b.q=0.7")
    for workers in (1, 2):
        code, _, err = diagnose(*arguments, f"workers={workers}", f"output_dir=with{workers}")
        assert code == 0, err
    for name in TABLES:
        assert (tmp_path / f"with1/{name}.csv").read_bytes() == (tmp_path / f"with2/{name}.csv").read_bytes()


# ---- text ----


def test_prose_depends_on_seed_and_number_alone() -> None:
    texts_of = script("diagnose").texts_of
    few = texts_of(asked(*TINY)[0], engine())
    more = texts_of(asked(*TINY, "streams.count=12")[0], engine())
    other = texts_of(asked(*TINY, "seed=1")[0], engine())
    assert more[:2] == few
    assert [more[10].name, more[0].name] == ["herring fleet 2", "herring fleet 1"]
    assert len({text.prefill for text in (*more, *other)}) == 14
    assert all(len(text.prefill) == 150 and text.prefill[0] == 256 for text in more)  # one <s>, at the start


def test_files_are_cut_into_stretches_in_turn(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("a" * 30)
    (tmp_path / "deep/b.txt").write_text("b" * 9 + "c" * 9)
    (tmp_path / "not.md").write_text("d" * 100)
    fields = ("model=tiny", "prompt_tokens=10", "streams.source=files", f"streams.path={tmp_path}")
    texts = script("diagnose").texts_of(asked(*fields, "streams.count=5")[0], engine())
    found = [(text.name, engine().tokenizer.decode(text.prefill[1:])) for text in texts]
    nine = {letter: letter * 9 for letter in "abc"}
    assert found == [
        ("a.txt@0", nine["a"]), ("deep/b.txt@0", nine["b"]), ("a.txt@9", nine["a"]), ("deep/b.txt@9", nine["c"]),
        ("a.txt@18", nine["a"]),
    ]  # fmt: skip
    assert {text.prefill[0] for text in texts} == {256}
    with pytest.raises(ValueError, match="has text for 5 streams of 9 tokens, but streams.count=6"):
        script("diagnose").texts_of(asked(*fields, "streams.count=6")[0], engine())


def test_continuations_are_full_kvs_and_loops_are_counted() -> None:
    texts = [Text("a", tuple(random_ids(40, 1)), tuple(random_ids(5, 2))), Text("b", tuple(random_ids(30, 3)))]
    streams = continued(engine(), texts, 6, batch_size=1)
    both = full_kv_continuation(engine(), [texts[0].prefill + texts[0].question, texts[1].prefill], 6)
    assert [stream.parts[-1] for stream in streams] == [Part(ids, True) for ids in both]
    assert streams[0].parts[:-1] == (Part(texts[0].prefill, False), Part(texts[0].question, False))
    assert len(streams[1].parts) == 2
    again = replace(streams[1], parts=(streams[1].parts[0], Part((1, 2) * 10, True)))
    assert (loops(again), loops(streams[1])) == (True, False)
    with pytest.raises(ValueError, match="same names: a, a"):
        continued(engine(), [texts[0], texts[0]], 6, 2)


# ---- mistakes ----

MISTAKES = [
    ("streams.count=0", "streams.count=0 is not positive; give an integer of at least 1$"),
    ("streams.source=web", "streams.source=web is unknown; choose one of prose, files, needle$"),
    ("streams.source=files", r"streams.path=\(empty\) does not go with streams.source=files"),
    ("streams.path=x", "streams.path=x does not go with streams.source=prose"),
    ("streams.question=appended", "streams.question=appended does not go with streams.source=prose"),
    ("streams.source=files streams.path=nowhere.txt", "streams.path=nowhere.txt cannot be read .*; give text files"),
    ("streams.source=needle prompt_tokens=60", r"prompt_tokens=60 \(\+ 32 to answer\): lengths=\[92\]: 92 is out of"),
    ("streams.words=3", "streams.words is no field; fields of streams: source, count, path, question$"),
    ("prompt_tokens=1", "prompt_tokens=1 is too small; give an integer of at least 2$"),
    ("prompt_tokens=131072", "prompt_tokens=131072 with new_tokens=24 exceeds the context of tiny"),
    ("new_tokens=x", "new_tokens=x has the wrong type; give an integer$"),
    ("batch_size=0", "batch_size=0 is too small"),
    ("workers=0", "workers=0 is too small"),
    ("seed=-1", "seed=-1 is out of range"),
    ("budget=2", "budget=2 is not a budget"),
    ("budget=native", "budget=native: QEvict publishes no size"),
    ("budget=0.01", "budget=0.01 pays for .*the nearest feasible fraction is"),
    ("method.window=0", "method.window=0 must be at least 1$"),
    ("+runs.a.windo=3", "runs.a.windo=3 is no field of QEvict; fields: omega"),
    ("+runs.a=3", "runs={'a': 3} is no mapping"),
    ("+runs.oscillation.q=0", "runs.oscillation: oscillation and names that end in"),
    ("paper=nowhere.csv", "paper=nowhere.csv cannot be read"),
    ("limit=3", "limit is no field; fields: model, method, streams, budget"),
    ("method=kvquant", ".*python scripts/calibrate_kvquant.py model=tiny"),
    ("experiment=nope", "In 'diagnose': Could not find 'experiment/nope'"),
    ("output_dir=taken", "output_dir=taken cannot be made"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[name for name, _ in MISTAKES])
def test_a_mistake_is_one_line(diagnose: Call, tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "taken").write_text("a file")
    given = arguments.split()
    kept = [text for text in TINY if text.split("=")[0] not in {text.split("=")[0] for text in given}]
    code, out, err = diagnose(*kept, *given)
    assert (code, out) == (2, []), err
    assert re.match(f"error: {message}", err[-1]), err
    assert sum(line.startswith("error") for line in err) == 1
    assert not list(tmp_path.rglob("*.csv"))


# ---- configurations ----


@pytest.mark.parametrize("name", ["figure1", "figure1_llama"])
def test_the_experiments_are_the_papers(name: str) -> None:
    settings, runs = asked(f"experiment={name}")
    paper = yaml.safe_load((ROOT / "configs/method/qevict_paper.yaml").read_text())
    for run, window, two_tiers in (
        ("R1", 1, True), ("R2", 8, True), ("R3", 8, False), ("R4-2", 32, True), ("R4-3", 32, False),
    ):  # fmt: skip
        expected = {**paper, "window": window, "q": 0.0 if two_tiers else 0.7}
        assert {field: getattr(runs[run], field) for field in expected if field not in ("name", "_target_")} == {
            field: value for field, value in expected.items() if field not in ("name", "_target_")
        }
    assert len(runs) == 5
    assert (settings.prompt_tokens, settings.new_tokens, settings.budget, settings.streams.count) == (
        512,
        256,
        "0.2",
        20,
    )
    assert settings.model.name == ("smollm2_135m" if name == "figure1" else "llama31_8b")
    figures = read_paper(ROOT / settings.paper)
    assert {figure.run for figure in figures} <= set(runs)
    printed = [(figure.run, figure.key, figure.text) for figure in figures]
    assert ("R1", "churn.held", "0.017") in printed
    assert ("R3", "mass_no_sinks.quantized", "0.426") in printed
    assert ("R3", "lir.deployed.4", "0.0618") in printed
    assert [runs[run].fit(Budget("0.2"), geometry_of(engine()), 512, 256).knobs() for run in runs] == [
        {"sink": 5, "recent": 32}
    ] * 5


# ---- report ----


def findings(**changes: Any) -> Findings:
    spreads = {line.key: Spread(0.25, 0.2, 0.35, 3) for section in SECTIONS for line in section.lines}
    fixed = {key: Spread(0.6, 0.6, 0.6, 3) for key in ("k_full", "k_quantized", "protected", "fraction")}
    values: dict[str, Any] = {
        "title": ["a title"],
        "num_streams": 3,
        "num_looping": 1,
        "runs": {f"a run with a name {number}": {**spreads, **fixed} for number in range(7)},
        "errors": {"a": [0.1] * 80},
        "kl_change": {("a run with a name 0", "another with a name " + 3 * "longer "): Spread(-0.5, -0.75, -0.25, 6)},
        "worst": dict.fromkeys(("k_full", "k_quantized", "churn.full", "fraction"), 0.5)
        | dict.fromkeys(("ledger.bytes", "ledger.share", "ledger.peak"), 0.1),
        "paper": [PaperFigure("a run with a name 0", "churn.held", "0.017", "~", "A note.")],
        "files": [Path("a.csv")],
    }
    return Findings(**{**values, **changes})


def test_a_report_of_many_runs_fits_a_terminal() -> None:
    lines = render(findings()).splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.count("25.00 ±10.00") for line in lines if line.startswith("  FMM, mean")] == [5, 2]
    assert any("~0.017" in line and "0.2500 [0.2000, 0.3500]" in line for line in lines)
    different = next(i for i, line in enumerate(lines) if line.startswith("Different setting"))
    assert lines.index("  Causes of differences: untested.") > different
    assert "1 of 3 continuations loop" in "\n".join(lines)
    [pair] = [line for line in lines if line.endswith("-0.500 [-0.750, -0.250]*")]
    assert pair.startswith("  another with a name longer lo… - a run with a name 0 ")
    assert "protected-bound" in "\n".join(lines)


def test_what_is_undefined_is_said() -> None:
    nothing, one = Spread(nan, nan, nan, 0), Spread(0.5, 0.5, 0.5, 1)
    run = {**findings().runs["a run with a name 0"], "churn.full": nothing, "churn.held": one}
    text = render(findings(runs={"r": run, "s": {**run, "churn.held": nothing}}, paper=[], worst={}, num_looping=0))
    assert re.search(r"Full \+ Quantized +50.00 ±0.00\* +n/a", text)
    assert "\n  Full  " not in text.split("Selection churn")[1].split("\n\n")[0]
    assert "*: undefined in some streams" in text
    assert "Different setting" not in text
    assert "Worst case" not in text
    assert "None of the 3 continuations loops." in text


def test_one_stream_has_no_interval() -> None:
    assert "±" not in render(findings(num_streams=1))


def test_a_csv_that_is_not_the_papers(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("run,value\nR1,3\n")
    with pytest.raises(ValueError, match=r"paper=.*x.csv cannot be read .*results/paper/figure1.csv"):
        read_paper(tmp_path / "x.csv")


# ---- the worst case for the ledger ----


@pytest.mark.parametrize("budget", ["0.2", "0.4"])
@pytest.mark.parametrize("head_scope", ["layer", "kv_head"])
def test_oscillation_keeps_the_codes_of_every_full_unit(budget: str, head_scope: str) -> None:
    """A real store under the real budget: Full is replaced as a whole at every event, so all of it has codes."""
    ids = random_ids(512 + 64, 4)
    stream = Stream("a", (Part(tuple(ids[:512]), False), Part(tuple(ids[512:]), True)))
    fitted = qevict(head_scope=head_scope).fit(Budget(budget), geometry_of(engine()), 512, 64)
    [record] = observe_streams(engine(), Oscillating(fitted, *protected_by(fitted)), Budget(budget), [stream], seed=0)
    history, sizes = record.history, record.sizes
    assert churn(history, with_quantized=False).value == 1
    num_full = history.k_full_KLT[1:].sum((1, 2))
    assert int(num_full.min()) > 0
    assert int(history.k_quantized_KLT.min()) >= int(history.k_full_KLT.min())
    heads = 3 if head_scope == "layer" else 1  # a unit of a shared table has codes in every KV head
    head_dim, window = 16, 8
    codes = 2 * window * head_dim * 2 // 8  # keys and values in 2 bits; parameters count as such
    assert [size.ledger for size in sizes[1:]] == (num_full * heads * codes).tolist()
    assert sizes[0].ledger == 0
    assert all(size.total <= size.allowed for size in sizes)
    made = moves(history)
    assert made.promotions_K[1:].tolist() == num_full.tolist()
    assert torch.equal(made.promotions_K[2:], made.promotions_K[2:].clamp(min=int(made.promotions_K[1])))


def test_observing_the_worst_case_takes_the_first_stream() -> None:
    spec = ModelSpec("tiny", "tiny", device="cpu")
    texts = [Text(str(seed), tuple(random_ids(160, seed))) for seed in range(3)]
    plan = Plan(spec, Budget("0.5"), texts, continued(engine(), texts, 16, 3), False, 2, 0)
    found = dict(observe_all(plan, engine(), {"a": Run(qevict()), "worst": Run(qevict(), True)}, 1))
    assert [len(found[name].streams) for name in found] == [3, 1]
    assert found["worst"].streams[0].stream == "0"
    alone = observe(replace(plan, batch_size=1), engine(), Run(qevict()))
    assert [one.scalars["fmm.mean"] for one in alone.streams] == pytest.approx(
        [one.scalars["fmm.mean"] for one in found["a"].streams], rel=1e-5
    )
    errors = [one.curves["output_error"].columns["error"] for one in found["a"].streams]
    assert layer_errors(found["a"].streams) == pytest.approx([sum(layer) / 3 for layer in zip(*errors, strict=True)])
    whole = replace(plan, budget=Budget("1.0"))
    assert max(layer_errors(observe(whole, engine(), Run(FullKV())).streams)) < 1e-5
