"""The command line: what mistakes look like, exit codes, and the main job on the tiny model, in real processes too."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from script_modules import script
from tiny_models import engine

import run as cli
from qevict_bench.nuq import Codebooks
from qevict_bench.task import Example, Prompt, Prompter

ROOT = Path(__file__).parents[1]
TINY = ("model=tiny", "task=ruler", "task.subsets=[niah_single_1]", "task.context_length=1536", "limit=1")

Run = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process; exit code, lines of stdout, lines of stderr. Results go to tmp_path/runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        with warnings.catch_warnings():
            code = cli.command_line([*arguments, *(() if "results_dir" in str(arguments) else ("results_dir=runs",))])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


def options(group: str) -> str:
    names = sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))
    return f"Available options in '{group}': {' '.join(names)}$"


MISTAKES = [
    ("budget=0", "budget=0 .*give a fraction"),
    ("budget=1.5", "budget=1.5 .*give a fraction"),
    ("budget=-0.2", "budget=-0.2 .*give a fraction"),
    ("budget=abc", "budget=abc .*give a fraction"),
    ("budget=", "budget= is not a budget; give a fraction"),
    ("budget='1e-99999999'", "is not a budget; give a fraction"),
    ("budget=100000000000000000000t", "is not a budget; give a fraction"),
    ("method=snapkv method.recent=5", "method.recent=5 is chosen by the method"),
    ("method.key_params=group:99999999999999999999", "choose window, group:N"),
    ("method.name=snapkv", "method.name is a label, not a setting"),
    ("method._target_=os.system", "method._target_ is a label, not a setting"),
    ("protocol.name=query_agnostic", "protocol.name is a label, not a setting"),
    ("method=quantum", f"'method/quantum'.* {options('method')}"),
    ("model=gpt5", f"'model/gpt5'.* {options('model')}"),
    ("task=chess", f"'task/chess'.* {options('task')}"),
    ("profile=huge", f"'profile/huge'.* {options('profile')}"),
    ("protocol=none", f"'protocol/none'.* {options('protocol')}"),
    ("reference=none", f"'reference/none'.* {options('reference')}"),
    ("budgt=0.3", "budgt is no field; fields: model, method, .*budget, basis"),
    ("budget", "'budget' missing EQUAL"),
    ("=3", "=3 names no field; write FIELD=VALUE"),
    ("budget=٣t", """budget=٣t cannot be read .*; quote it: 'budget="٣t"'$"""),
    ("model.path=it's", """model.path=it's cannot be read .*; quote it: 'model.path="it'"'"'s"'$"""),
    ("task.subsets=[a,b", r"task.subsets=\[a,b cannot be read .*; close its brackets and quotes; .*, write 'task.subs"),
    ("task.subsets=a]", r"task.subsets=a\] cannot be read .*; quote it: 'task.subsets=\"a\]\"'$"),
    ('budget="0.2', """budget="0.2 cannot be read .*; close its brackets and quotes"""),
    ("model.path=${x", "model.path=.{x cannot be read .*quote it"),
    ("method=null", "Config group override must be a string or a list"),
    ("method.widow=4", "method.widow=4 is no field of QEvict; fields: .*window"),
    ("method.window=wide", "method.window=wide has the wrong type; give an integer"),
    ("method.window=0", "method.window=0 must be at least 1"),
    ("task.context_length=-5", "task.context_length=-5"),
    ("task.context_length=200000", "task.context_length=200000 is out of range; use 512 to 131072"),
    ("task.context_length=long", "task.context_length=long has the wrong type; give an integer"),
    ("task.subsets=[niah_single_9]", "niah_single_9"),
    ("task.source=web", "task.source='web' is unknown"),
    ("task.source=local task.data_dir=nowhere", "nowhere"),
    ("model=local model.path=nowhere", "model.path='nowhere' is not a .*folder"),
    ("model=hub", "model=hub needs an id: model.id=OWNER/NAME"),
    ("model.dtype=int3", "model.dtype='int3': choose one of"),
    ("seed=-1", "seed=-1 is out of range"),
    ("seed=abc", "seed=abc has the wrong type; give an integer"),
    ("limit=0", "limit=0 is not positive"),
    ("limit=many", "limit=many has the wrong type"),
    ("batch_size=0", "batch_size=0 is not positive"),
    ("basis=mean", "basis='mean' is unknown; choose one of sequence, prompt, total"),
    ("enforce=never", "enforce='never' is unknown; choose one of always, prefill"),
    ("small_budget=grow", "small_budget='grow' is unknown; choose one of clamp, refuse"),
    ("method=defensivekv budget=native", "budget=native: DefensiveKV publishes no size of its own; give a fraction"),
    ("method=criticalkv method.eps=nan", "method.*eps=nan: .*eps in .0, 1000."),
    ("protocol=multi_query protocol.mode=go", "protocol.mode=go is unknown; choose one of reset, continue"),
    ("protocol.mode=continue", "protocol.mode=continue .*multi_query"),
    ("task=perplexity", "task=perplexity does not judge answers: its figure is the NLL, set metrics.fidelity=true"),
    ("task=drift task.source=hub", "task.*source='hub' is unknown; conversations can only be generated"),
    ("first_token=last", "first_token=last is unknown; choose one of compressed, full"),
    ("split=train", "split=train is unknown; choose one of test, dev"),
    ("resume=maybe", "resume=maybe is unknown; choose one of continue, restart"),
    ("results_dir=/proc/runs", "results_dir=/proc/runs cannot be written .*choose a writable folder"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_with_value_and_remedy(run: Run, tmp_path: Path, arguments: str, message: str) -> None:
    code, out, err = run("model=tiny", *arguments.split())
    assert (code, out, len(err)) == (2, [], 1), err
    assert re.match(f"error: .*{message}", err[0])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    ["٣t", "it's", "[a,b", "a]", '"x', 'say "hi";', "a=b", "日本", "C:\\;\\", 'a\\"b;', "${x", "choice(1", "{", "%;"],
)
def test_what_a_syntax_error_tells_to_write_is_that_value(value: str) -> None:
    advice = cli._syntax(f"model.path={value}").partition("quote it: ")[2]
    advice = advice or cli._syntax(f"model.path={value}").partition("write ")[2]
    (argument,) = shlex.split(advice)
    override = OverridesParser.create().parse_override(argument)
    assert (override.key_or_group, override.value()) == ("model.path", value)
    assert cli._syntax(argument) == ""


def test_a_context_longer_than_the_model_s_is_one_line(run: Run, tmp_path: Path, smollm2: object) -> None:
    code, out, err = run("model=smollm2_135m", "profile=paper")
    assert (code, out, len(err)) == (2, [], 1), err
    assert re.match(
        "error: task.context_length=32768 is longer than the context of smollm2_135m .8192 tokens.; ", err[0]
    )
    assert not list(tmp_path.iterdir())


def test_a_hub_model_without_network_is_one_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = run("model=hub", "model.id=nobody/nothing")
    assert (code, out, len(err)) == (2, [], 1), err
    assert re.match("error: model.id='nobody/nothing' .*network", err[0])
    assert not (tmp_path / "runs").exists()


def test_a_damaged_line_inside_the_rows_is_named(run: Run, tmp_path: Path) -> None:
    assert run(*TINY, "method=full_kv")[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text(lines[0][:30] + "\n" + lines[0])
    code, _, err = run(*TINY, "method=full_kv")
    assert (code, len(err)) == (2, 1)
    assert re.match(r"error: .*rows.jsonl:1 is damaged .*resume=restart", err[0])
    assert run(*TINY, "method=full_kv", "resume=restart")[0] == 0


def test_the_main_job_ends_with_the_line_scripts_read_and_repeats_it(run: Run, tmp_path: Path) -> None:
    code, out, err = run(*TINY, "method=streaming_llm", "budget=0.4")
    assert code == 0, err
    number = r"-?\d+\.\d"
    pattern = (
        rf"run [0-9a-f]{{12}}: score={number} full_kv={number} diff=\[{number},{number}\] memory=0\.\d+ workspace=\S+"
    )
    assert re.fullmatch(pattern, out[-1])
    assert "RULER-style (own wording)" in out[1]
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("rows.jsonl")}
    assert run(*TINY, "method=streaming_llm", "budget=0.4")[1] == out
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("rows.jsonl")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_method_s_fields_on_the_command_line_make_a_variant(run: Run) -> None:
    code, out, err = run(*TINY, "method=snapkv", "method.window=16", "budget=0.5")
    assert code == 0, err
    assert out[0].startswith("snapkv (window=16) on tiny")


def test_a_failed_run_exits_with_1_and_a_reason(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*arguments: object, **options: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr("qevict_bench.engine.generate", explode)
    code, out, err = run(*TINY, "method=full_kv")
    assert (code, out) == (1, [])
    assert re.match("error: no example of run .* succeeded; .*RuntimeError: no more memory", err[-1])


def test_an_interrupt_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qevict_bench.engine.generate", interrupt)
    code, _, err = run(*TINY, "method=full_kv")
    assert (code, err[-1]) == (130, "error: interrupted; re-issue the command to continue")


@pytest.mark.parametrize(
    ("arguments", "code"), [(("budget=0",), 2), (("method=quantum",), 2), ((*TINY, "method=full_kv"), 0)]
)
def test_in_a_process_of_its_own(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    command = [sys.executable, str(ROOT / "run.py"), *arguments, f"results_dir={tmp_path / 'runs'}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == ""
        assert re.fullmatch(r"error: .*\n", done.stderr)
        assert not list(tmp_path.iterdir())
    else:
        assert done.stdout.splitlines()[-1].startswith("run ")


def rows_in(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: (str(row["subset"]), row["index"]))


@pytest.mark.parametrize("method", ["full_kv", "snapkv", "qevict"])
def test_a_batch_gives_the_answers_of_single_examples(run: Run, tmp_path: Path, method: str) -> None:
    """In fp32 on the CPU, through the whole runner; only bytes of padding may differ."""
    single = ["model=tiny", "model.dtype=float32", f"method={method}", "budget=0.4", "limit=5"]
    single += ["task.subsets=[niah_single_1,niah_multivalue]", "task.context_length=1536"]
    answers = []
    for size in (1, 4):
        code, _, err = run(*single, f"batch_size={size}", f"results_dir={size}")
        assert code == 0, err
        (folder,) = [path for path in (tmp_path / str(size)).iterdir() if rows_in(path)[0]["method"] == method]
        rows = [row for row in rows_in(folder) if row["index"] < 5]
        assert {row["status"] for row in rows} == {"ok"}
        answers.append([(row["example_id"], row["prediction"], row["new_tokens"], row["stop"]) for row in rows])
    assert len(answers[0]) == 10
    assert len({prediction for _, prediction, _, _ in answers[0]}) > 1
    assert answers[0] == answers[1]


def test_a_budget_that_fits_nothing_is_reported_without_its_reference(run: Run, tmp_path: Path) -> None:
    code, out, err = run(*TINY, "method=snapkv", "budget=0.001", "small_budget=refuse")
    assert (code, len(list((tmp_path / "runs").iterdir()))) == (0, 1), err
    assert "nearest feasible fraction is 0." in " ".join(" ".join(out).split())
    assert out[-1].startswith("run ")


def test_an_example_that_does_not_fit_the_model_leaves_the_others_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a task whose prompts vary: one is refused before its batch begins."""
    encode = Prompter.encode

    def longer(prompter: Prompter, example: Example) -> Prompt:
        prompt = encode(prompter, example)
        return replace(prompt, ids=prompt.ids * 100) if example.id.endswith("1") else prompt

    monkeypatch.setattr(Prompter, "encode", longer)
    assert run(*TINY, "method=full_kv", "limit=2", "batch_size=2")[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    first, second = rows_in(folder)
    assert (first["status"], second["status"]) == ("ok", "infeasible")
    assert "more than the context of tiny" in second["error"]


def test_warnings_reach_the_user(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(*TINY, "method=full_kv")[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    with open(folder / "rows.jsonl", "ab") as stream:
        stream.write(b'{"run_id":')
    assert run(*TINY, "method=full_kv")[0] == 0
    assert "dropped a torn last line" in caplog.text


# ---- scripts/calibrate_kvquant.py ----

CALIBRATION = ("model=tiny", "samples=2", "length=128")
FIELDS = "fields: model, text, hub_id, .*, samples, length, seed$"


@pytest.fixture
def calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the script in this process, as `run`. The cache is tmp_path/cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["calibrate_kvquant.py"])
    monkeypatch.setenv("QEVICT_BENCH_CACHE", str(tmp_path / "cache"))
    main = script("calibrate_kvquant").job

    def call(*arguments: str) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        with warnings.catch_warnings():
            code = cli.command_line([*arguments], main)
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


CALIBRATION_MISTAKES = [
    ("samples=abc", "samples=abc has the wrong type; give an integer$"),
    ("samples=1.5", "samples=1.5 has the wrong type; give an integer$"),
    ("samples=null", "samples=None has the wrong type; give an integer$"),
    ("samples=0", "samples=0 is too small; give an integer of at least 1$"),
    ("length=64.5", "length=64.5 has the wrong type; give an integer$"),
    ("length=63", "length=63 is too small; give an integer of at least 64$"),
    ("length=131073", "length=131073 is longer than the context of tiny; give 64 to 131072 tokens$"),
    ("seed=abc", "seed=abc has the wrong type; give an integer$"),
    ("seed=null", "seed=None has the wrong type; give an integer$"),
    ("seed=-1", "seed=-1 is out of range; give an integer from 0 to "),
    ("~seed", "seed has no value; set seed=...$"),
    ("text=null", "text=None has the wrong type; give text$"),
    ("text=nowhere", "text=nowhere cannot be read .*; give prose, hub or a text file in UTF-8$"),
    ("text=latin.txt", "text=latin.txt cannot be read .*; give prose, hub or a text file in UTF-8$"),
    ("text=short.txt", "text=short.txt has 5 tokens; 2 samples of 128 need 254: give a longer text, or fewer samples$"),
    ("text=hub", "hub_id is empty; text=hub needs one"),
    ("text=hub hub_id=a/b hub_split=", "hub_split is empty; text=hub needs one"),
    ("model=nope", f"In 'calibrate_kvquant': Could not find 'model/nope' {options('model')}"),
    ("model.dtype=int3", "model.dtype='int3': choose one of"),
    ("model.foo=1", "model.foo=1 is no field of ModelSpec; fields: name, "),
    ("~model", "Key 'model' is not in struct"),
    ("sample=3", f"sample is no field; {FIELDS}"),
    ("method=kvquant", f"method is no field; {FIELDS}"),
    ("method.bits=3", f"method.bits is no field; {FIELDS}"),
]


@pytest.mark.parametrize(("arguments", "message"), CALIBRATION_MISTAKES, ids=[name for name, _ in CALIBRATION_MISTAKES])
def test_a_mistake_in_a_calibration_is_one_line(calibrate: Run, tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "latin.txt").write_bytes("café ".encode("latin-1") * 100)
    (tmp_path / "short.txt").write_text("short")
    code, out, err = calibrate(
        *(text for text in CALIBRATION if arguments != "~model" or "=tiny" not in text), *arguments.split()
    )
    assert (code, out, len(err)) == (2, [], 1), err
    assert re.match(f"error: {message}", err[0])
    assert not (tmp_path / "cache").exists()


def test_a_calibration_is_made_and_an_interrupted_one_leaves_it(
    calibrate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = calibrate(*CALIBRATION, "model.dtype=bfloat16")
    made = Codebooks.load("tiny", engine().fingerprint)
    path = Codebooks.path(engine().fingerprint)
    assert (code, out) == (0, [f"{path}: codebooks {made.digest} of tiny, 2 samples of 128 tokens"]), err

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script("calibrate_kvquant"), "key_tables", interrupt)
    code, out, err = calibrate(*CALIBRATION)
    assert (code, out, err[-1]) == (130, [], "error: interrupted; re-issue the command to continue")
    assert Codebooks.load("tiny", engine().fingerprint) == made
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("arguments", "code"), [(("samples=abc",), 2), (("model=nope",), 2), ((), 0)])
def test_a_calibration_in_a_process_of_its_own(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "calibrate_kvquant.py"), *CALIBRATION, *arguments]
    environment = {**os.environ, "QEVICT_BENCH_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr
    if code:
        assert done.stdout == ""
        assert re.fullmatch(r"error: .*\n", done.stderr)
    else:
        assert re.fullmatch(r"\S+: codebooks [0-9a-f]{16} of tiny, 2 samples of 128 tokens\n", done.stdout)
        assert done.stderr.splitlines() == ["1 of 2 samples", "2 of 2 samples"]
