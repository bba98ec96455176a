"""Files of a run: rows, torn and damaged lines, locks, environments, starting over."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_imports import imports_of

from methods.qevict import QEvict
from methods.snapkv import SnapKV
from qevict_bench.closing import render
from qevict_bench.environment import ENGINE, READ_ROWS, Environment, _git, code_files, code_hash, hash_of
from qevict_bench.results import Damaged, Different, RunFailed, open_run, read_rows, run_id, write_atomic
from qevict_bench.rows import SHARES, SIZES, Row, check_row
from qevict_bench.standing import known_sizes
from qevict_bench.summary import Facts, summarize

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "qevict_bench"
ENVIRONMENT = Environment("c0de", "5ha5ed", {"torch": "2.13"}, "cpu", "some CPU", 2, "host", "abc", False)
ROW = Row(
    run_id="0123",
    model="m",
    method="x",
    variant="",
    task="t",
    seed=0,
    split="test",
    budget="0.2",
    basis="sequence",
    enforce="always",
    small_budget="clamp",
    batch_size=1,
    protocol="query_aware",
    mode="reset",
    answer_prefix_at="in_prompt",
    instruction_at="context",
    first_token="compressed",
    prompt_source="own",
    device="cpu",
    dtype="float32",
    git_sha="none",
    subset="a",
    example_id="a-0000",
    status="ok",
    score=1.0,
    answers=("ä", "\u2028"),
    bytes=dict.fromkeys(SIZES, 1.0),
    fractions=dict.fromkeys(SHARES, 0.2),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "0123"


def write(path: Path, *rows: Row) -> None:
    with open_run(path, "limit: 4\n", ENVIRONMENT) as folder:
        for row in rows:
            folder.append(row)


def test_rows_survive_a_round_trip(path: Path) -> None:
    write(path, ROW, replace(ROW, example_id="a-0001", index=1, score=None, status="infeasible"))
    with open_run(path, "other\n", ENVIRONMENT) as folder:
        assert folder.rows == {
            "a-0000": ROW,
            "a-0001": replace(ROW, example_id="a-0001", index=1, score=None, status="infeasible"),
        }
    assert (path / "config.yaml").read_text() == "limit: 4\n"
    assert json.loads((path / "env.json").read_text()) == asdict(ENVIRONMENT)


def test_the_newest_row_of_an_example_counts(path: Path) -> None:
    write(path, replace(ROW, status="error", score=None))
    write(path, ROW)
    rows, _ = read_rows(path / "rows.jsonl")
    assert rows == {"a-0000": ROW}
    assert len((path / "rows.jsonl").read_text().splitlines()) > 1


def second(line: bytes) -> bytes:
    return line.replace(b"a-0000", b"a-0001").replace(b'"index": 0', b'"index": 1')


@pytest.mark.parametrize("keep", [1, 40, -1])
def test_a_torn_last_line_is_dropped_with_a_warning(path: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    write(path, ROW)
    whole = (path / "rows.jsonl").read_bytes()
    (path / "rows.jsonl").write_bytes(whole + second(whole)[:keep])
    with caplog.at_level(logging.WARNING), open_run(path, "", ENVIRONMENT) as folder:
        assert list(folder.rows) == ["a-0000"]
        folder.append(replace(ROW, example_id="a-0001", index=1))
    assert "torn" in caplog.text
    assert (path / "rows.jsonl").read_bytes() == whole + second(whole)


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"run_id": "r"}', b"\xff\xfe", b"", json.dumps({**asdict(ROW), "answers": 3}).encode()]
)
def test_any_other_damaged_line_is_an_error_that_changes_nothing(path: Path, line: bytes) -> None:
    write(path, ROW)
    file = path / "rows.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + line + b"\n" + whole)
    before = {p.name: p.read_bytes() for p in path.iterdir() if p.name != "lock"}
    with pytest.raises(Damaged, match=rf"{file}:2 is damaged .*resume=restart"), open_run(path, "", ENVIRONMENT):
        pass
    assert {p.name: p.read_bytes() for p in path.iterdir() if p.name != "lock"} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"code_hash": "beef"}, "code c0de -> beef"),
        ({"versions": {"torch": "2.14"}}, "torch 2.13 -> 2.14"),
        ({"versions": {"torch": "2.13", "numpy": "2"}}, "numpy none -> 2"),
        ({"device": "cuda"}, "device cpu -> cuda"),
    ],
)
def test_rows_of_other_code_libraries_or_device_are_not_continued(
    path: Path, change: dict[str, object], named: str
) -> None:
    write(path, ROW)
    with pytest.raises(Different, match=named), open_run(path, "", replace(ENVIRONMENT, **change)):  # type: ignore[arg-type]
        pass


def test_another_host_commit_or_thread_count_is_no_obstacle(path: Path) -> None:
    write(path, ROW)
    elsewhere = replace(ENVIRONMENT, host="b", git_sha="d", git_dirty=True, threads=8, device_name="other CPU")
    with open_run(path, "", elsewhere) as folder:
        assert folder.rows


def test_starting_over_keeps_the_old_rows_aside(path: Path) -> None:
    write(path, ROW)
    with open_run(path, "new\n", replace(ENVIRONMENT, code_hash="beef"), restart="always") as folder:
        assert not folder.rows
        folder.append(replace(ROW, score=0.0))
    assert json.loads((path / "env.json").read_text())["code_hash"] == "beef"
    assert read_rows(path / "replaced-1" / "rows.jsonl")[0] == {"a-0000": ROW}
    with open_run(path, "", ENVIRONMENT, restart="always"):
        pass
    assert read_rows(path / "replaced-2" / "rows.jsonl")[0]["a-0000"].score == 0.0


def test_restart_unusable_keeps_what_can_be_continued(path: Path) -> None:
    write(path, ROW)
    with open_run(path, "", ENVIRONMENT, restart="unusable") as folder:
        assert folder.rows
    (path / "rows.jsonl").write_bytes(b"broken\n")
    with open_run(path, "", ENVIRONMENT, restart="unusable") as folder:
        assert not folder.rows


def test_a_run_without_rows_leaves_nothing(path: Path) -> None:
    with pytest.raises(RuntimeError), open_run(path, "", ENVIRONMENT):
        raise RuntimeError
    assert not path.exists()
    write(path, ROW)
    with pytest.raises(RuntimeError), open_run(path, "", ENVIRONMENT):
        raise RuntimeError
    assert read_rows(path / "rows.jsonl")[0]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises(ValueError, match=rf"results_dir={folder} cannot be written .*choose a writable folder"):
            write(folder / "0123", ROW)


HOLDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_results import ENVIRONMENT, ROW, open_run
with open_run(Path({path!r}), "", ENVIRONMENT) as folder:
    folder.append(ROW)
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A live process that holds the run and has written one row."""
    script = HOLDER.format(tests=str(Path(__file__).parent), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True)
    assert process.stdout
    assert process.stdin
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_held_run_names_its_owner_and_death_frees_it(path: Path) -> None:
    with held(path) as owner:
        with pytest.raises(ValueError, match=rf"run 0123 is held by pid {owner.pid} on .*, since 20"):
            write(path, ROW)
        owner.kill()
        owner.wait()
        with open_run(path, "", ENVIRONMENT) as folder:
            assert list(folder.rows) == ["a-0000"]


def test_a_held_run_can_be_awaited(path: Path) -> None:
    with held(path) as owner:
        calls = []

        def wait(description: str) -> None:
            calls.append(description)
            if len(calls) == 2:
                owner.kill()
                owner.wait()

        with open_run(path, "", ENVIRONMENT, wait=wait) as folder:
            assert list(folder.rows) == ["a-0000"]
    assert calls[0].startswith(f"pid {owner.pid} on ")


def test_the_run_id_depends_on_every_value_and_not_on_their_order() -> None:
    assert run_id({"a": 1, "b": "x"}) == run_id({"b": "x", "a": 1})
    assert len({run_id(v) for v in ({"a": 1}, {"a": "1"}, {"a": 2}, {"b": 1}, {"a": 1, "b": 0})}) == 5


class Outside(SnapKV):
    """A user's own method, in a module of its own, that builds on one of ours."""


@pytest.mark.parametrize(
    ("cls", "own"),
    [
        (QEvict, {"methods/qevict.py"}),
        (fakes.FakePolicy, {"fakes.py"}),
        (Outside, {"test_results.py", "methods/snapkv.py"}),
    ],
)
def test_the_code_of_a_run_is_the_engine_and_its_own_class(cls: type, own: set[str]) -> None:
    engine = {f"{ENGINE}/{path.relative_to(SOURCE).as_posix()}": path for path in SOURCE.rglob("*.py")}
    files = code_files(cls)
    assert {name for name in files if not name.startswith(ENGINE)} == own
    assert engine.keys() - files.keys() == {name for name in engine if Path(name).with_suffix("").parts[1] in READ_ROWS}
    assert all(files[name] == path for name, path in engine.items() if name in files)


def test_a_task_in_a_package_is_the_package() -> None:
    ruler = importlib.import_module("tasks.ruler").Ruler
    files = {f"tasks/ruler/{path.name}" for path in (ROOT / "tasks" / "ruler").glob("*.py")}
    assert code_files(ruler).keys() - code_files().keys() == files


def test_a_class_in_no_file_is_refused() -> None:
    with pytest.raises(ValueError, match="Made is defined in no file"):
        code_files(type("Made", (), {"__module__": "nowhere"}))


def test_no_module_that_makes_rows_imports_one_that_may_change_freely() -> None:
    """From the engine and the jobs, through every import; runner.py alone shows what it does not write."""
    todo, reached = ["engine", "jobs", "results", "environment", "models", "attention"], set()
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            found = imports_of(SOURCE / f"{name}.py")
            todo += [module.split(".")[1] for module in found if module.startswith("qevict_bench.")]
    assert {"session", "policy", "task", "leases", "settings"} <= reached
    assert not reached & {*READ_ROWS}
    assert all((SOURCE / f"{name}.py").exists() or (SOURCE / name / "__init__.py").exists() for name in READ_ROWS)


def test_a_code_hash_changes_with_content_and_names(tmp_path: Path) -> None:
    hashes = []
    for name, text in (("one.py", "x = 1"), ("one.py", "x = 2"), ("one.py", "x = 1"), ("deep/two.py", "x = 1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        hashes.append(hash_of({path.name: path for path in tmp_path.rglob("*.py")}))
    assert hashes[0] == hashes[2]
    assert len(set(hashes)) == 3
    assert code_hash(QEvict) != code_hash(SnapKV)


def environment_with(**changes: object) -> str:
    return json.dumps({**asdict(ENVIRONMENT), **changes})


BROKEN = ["", "[", "[]", "null", "3", "{}", "\0", '{"facts": 3}', "[" * 100_000, "{" * 9, "\ud800", "NaN"]


@pytest.mark.parametrize(
    "text",
    [
        *BROKEN,
        environment_with(versions=[]),
        environment_with(versions={"torch": 2}),
        environment_with(threads="2"),
        environment_with(extra=1),
        environment_with(code_hash=None),
    ],
    ids=range(len(BROKEN) + 5),
)
def test_a_damaged_env_json_is_named(path: Path, text: str) -> None:
    write(path, ROW)
    (path / "env.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(Damaged, match="env.json cannot be read .*resume=restart"), open_run(path, "", ENVIRONMENT):
        pass
    with open_run(path, "", ENVIRONMENT, restart="unusable") as folder:
        assert not folder.rows


@pytest.mark.parametrize(
    "text",
    [
        *(text for text in BROKEN if text != "{}"),
        '{"facts": {"available": []}}',
        '{"facts": {"available": {"a": "3"}}}',
        '{"facts": {"available": {"a": -1}}}',
        '{"facts": {"available": {"a": true}}}',
    ],
    ids=range(len(BROKEN) + 3),
)
def test_a_damaged_summary_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(Damaged, match="summary.json is damaged .*delete it and run again") as caught:
        known_sizes(tmp_path / "summary.json")
    assert "\n" not in str(caught.value)


def test_sizes_of_a_sound_or_absent_summary(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    assert known_sizes(file) == {}
    file.write_text("{}")
    assert known_sizes(file) == {}
    file.write_text('{"facts": {"available": {"a": 3}}}')
    assert known_sizes(file) == {"a": 3}


FIELDS = sorted(asdict(ROW))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_tampered_row_is_read_or_named_but_never_crashes_the_reader(tmp_path_factory: Any, data: Any) -> None:
    """What passes has the types of a row: everything that summaries compute from it works."""
    values = asdict(ROW)
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    )
    for name in data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3)):
        values[name] = data.draw(json_values)
    file = tmp_path_factory.getbasetemp() / "tampered.jsonl"
    file.write_text(json.dumps(values) + "\n")
    try:
        rows, _ = read_rows(file)
    except Damaged:
        return
    (row,) = rows.values()
    facts = Facts(4, 3, True, "full_kv", "x", 1, {})
    summary = summarize([row], [row], facts)
    render(summary)
    json.dumps(summary.to_json())


def test_rows_of_another_run_are_named(path: Path) -> None:
    write(path, ROW)
    path.rename(path.with_name("4567"))
    with (
        pytest.raises(Damaged, match="holds rows of run 0123"),
        open_run(path.with_name("4567"), "", ENVIRONMENT),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"example_id": "a-0001"}, "a-0001 at index 0 of a contradicts a line above"),
        ({"index": 1}, "a-0000 at index 1 of a contradicts a line above"),
        ({"subset": "b"}, "a-0000 at index 0 of b contradicts a line above"),
        ({"run_id": "4567"}, "it belongs to run 4567"),
        ({"index": 10**30}, "index has another type"),
        ({"events": -(10**400)}, "events has another type"),
        ({"index": -1}, "index -1 is none"),
    ],
)
def test_lines_that_contradict_each_other_are_named(path: Path, changes: dict[str, Any], reason: str) -> None:
    write(path, ROW)
    with open(path / "rows.jsonl", "a") as stream:
        stream.write(json.dumps(asdict(ROW) | changes) + "\n")
    with (
        pytest.raises(Damaged, match=f"rows.jsonl:2 is damaged .*{reason}.*resume=restart"),
        open_run(path, "", ENVIRONMENT),
    ):
        pass


def test_half_a_surrogate_pair_survives(path: Path) -> None:
    row = replace(ROW, answers=("\ud83d", "ä"), prediction="\udcff", metrics={"\ud83d": 1.0}, group="日本")
    write(path, row)
    assert read_rows(path / "rows.jsonl")[0] == {"a-0000": row}
    assert (path / "rows.jsonl").read_bytes().isascii()
    with open_run(path, "", ENVIRONMENT) as folder:
        folder.write_summary({"problem": "\ud83d"})
    assert json.loads((path / "summary.json").read_text()) == {"problem": "\ud83d"}
    line = json.dumps(asdict(ROW), ensure_ascii=False)  # as written before
    (path / "rows.jsonl").write_text(line + "\n", encoding="utf-8")
    assert read_rows(path / "rows.jsonl")[0] == {"a-0000": ROW}


@pytest.mark.parametrize(
    "changes",
    [
        {"metrics": {"x": float("nan")}},
        {"knobs": {"x": {1, 2}}},
        {"answers": (3,)},
        {"new_tokens": 2**64},
        {"fractions": {}},
        {"index": -1},
    ],
)
def test_a_row_that_could_not_be_read_again_is_refused(changes: dict[str, Any]) -> None:
    check_row(ROW)
    with pytest.raises((ValueError, TypeError)):
        check_row(replace(ROW, **changes))


def full_disk(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_atomic(tmp_path / "file", "old")
    monkeypatch.setattr(os, call, full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "file", "new")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "file", "\ud83d")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("good", range(6))
def test_a_disk_that_is_full_from_some_point_on_leaves_no_run_without_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    """Synced in turn: lease, config.yaml, env.json, wanted.json, the first row, summary.json."""
    calls: list[int] = []
    sync = os.fsync

    def fill_up(descriptor: int) -> None:
        calls.append(descriptor)
        (sync if len(calls) <= good else full_disk)(descriptor)

    monkeypatch.setattr(os, "fsync", fill_up)

    def write_all() -> None:
        with open_run(path, "", ENVIRONMENT) as folder:
            folder.want(1, "a")
            folder.append(ROW)
            folder.write_summary({})

    with pytest.raises((ValueError, RunFailed), match="cannot be written .No space left"):
        write_all()
    assert len(calls) == good + 1
    if good < 5:
        assert not path.exists()
    else:
        assert sorted(file.name for file in path.iterdir()) == [
            "config.yaml",
            "env.json",
            "lock",
            "rows.jsonl",
            "wanted.json",
        ]


def test_what_a_killed_process_left_half_written_is_removed(path: Path) -> None:
    path.mkdir(parents=True)
    for name in (".config.yaml.7", ".summary.json.8"):
        (path / name).write_text("half")
    with pytest.raises(RuntimeError), open_run(path, "", ENVIRONMENT):
        raise RuntimeError
    assert not path.exists()


def git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True)


def test_only_changes_to_tracked_files_make_a_checkout_dirty(tmp_path: Path) -> None:
    def dirty() -> bool:
        _git.cache_clear()
        return _git(tmp_path)[1]

    git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "x")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "rows").write_text("new")
    assert not dirty()
    (tmp_path / "file").write_text("2")
    assert dirty()
    git(tmp_path, "checkout", "file")
    assert not dirty()
    (tmp_path / "file").unlink()
    assert dirty()
    _git.cache_clear()


def test_a_full_disk_ends_the_run_and_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sync = os.fsync
    with open_run(path, "", ENVIRONMENT) as folder:
        folder.append(ROW)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunFailed, match="cannot be written .No space left"):
            folder.append(replace(ROW, example_id="a-0001", index=1))
    other = path.with_name("4567")
    with pytest.raises(ValueError, match="cannot be written .No space left"), open_run(other, "", ENVIRONMENT):
        pass
    monkeypatch.setattr(os, "fsync", sync)
    assert not list(other.glob("lease.*"))
    assert "a-0000" in read_rows(path / "rows.jsonl")[0]


def test_a_writer_that_was_taken_over_writes_no_more(path: Path) -> None:
    with open_run(path, "", ENVIRONMENT) as folder:
        folder.append(ROW)
        (path / "lease.1").rename(path / "lease.2")
        before = (path / "rows.jsonl").read_bytes()
        late = replace(ROW, example_id="a-0001", index=1)
        for act in (lambda: folder.append(late), lambda: folder.want(1, "a"), lambda: folder.write_summary({})):
            with pytest.raises(RunFailed, match=r"run 0123 was taken over .*pid \d+ on .*writes no more rows"):
                act()
        assert (path / "rows.jsonl").read_bytes() == before
    assert (path / "lease.2").exists()  # the other's
    assert not (path / "summary.json").exists()
