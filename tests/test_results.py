"""Files of a run: rows, torn and damaged lines, locks, environments, starting over."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from qevict_bench.environment import Environment, code_hash, hash_of
from qevict_bench.results import Damaged, Different, Row, open_run, read_rows, run_id

ENVIRONMENT = Environment("c0de", {"torch": "2.13"}, "cpu", "some CPU", 2, "host", "abc", False)
ROW = Row(
    run_id="r",
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
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "0123"


def write(path: Path, *rows: Row) -> None:
    with open_run(path, "limit: 4\n", ENVIRONMENT) as folder:
        for row in rows:
            folder.append(row)


def test_rows_survive_a_round_trip(path: Path) -> None:
    write(path, ROW, replace(ROW, example_id="a-0001", score=None, status="infeasible"))
    with open_run(path, "other\n", ENVIRONMENT) as folder:
        assert folder.rows == {
            "a-0000": ROW,
            "a-0001": replace(ROW, example_id="a-0001", score=None, status="infeasible"),
        }
    assert (path / "config.yaml").read_text() == "limit: 4\n"
    assert json.loads((path / "env.json").read_text()) == asdict(ENVIRONMENT)


def test_the_newest_row_of_an_example_counts(path: Path) -> None:
    write(path, replace(ROW, status="error", score=None))
    write(path, ROW)
    rows, _ = read_rows(path / "rows.jsonl")
    assert rows == {"a-0000": ROW}
    assert len((path / "rows.jsonl").read_text().splitlines()) > 1


@pytest.mark.parametrize("keep", [1, 40, -1])
def test_a_torn_last_line_is_dropped_with_a_warning(path: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    write(path, ROW)
    whole = (path / "rows.jsonl").read_bytes()
    (path / "rows.jsonl").write_bytes(whole + whole.replace(b"a-0000", b"a-0001")[:keep])
    with caplog.at_level(logging.WARNING), open_run(path, "", ENVIRONMENT) as folder:
        assert list(folder.rows) == ["a-0000"]
        folder.append(replace(ROW, example_id="a-0001"))
    assert "torn" in caplog.text
    assert (path / "rows.jsonl").read_bytes() == whole + whole.replace(b"a-0000", b"a-0001")


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


def test_the_code_hash_covers_engine_methods_and_tasks() -> None:
    root = Path(__file__).parents[1]
    folders = {"qevict_bench": root / "src" / "qevict_bench", "methods": root / "methods", "tasks": root / "tasks"}
    code_hash.cache_clear()
    assert code_hash() == hash_of({name: [folder] for name, folder in folders.items()})


def test_a_code_hash_changes_with_content_and_names(tmp_path: Path) -> None:
    hashes = []
    for name, text in (("one.py", "x = 1"), ("one.py", "x = 2"), ("one.py", "x = 1"), ("deep/two.py", "x = 1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        hashes.append(hash_of({"methods": [tmp_path]}))
    assert hashes[0] == hashes[2]
    assert len(set(hashes)) == 3
    (tmp_path / "notes.txt").write_text("no code")
    assert hash_of({"methods": [tmp_path]}) == hashes[-1]
