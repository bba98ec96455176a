"""Data sets of the Hub: local copies, the library's cache, and what is said when there is neither."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path
from threading import Event

import hub_sets
import huggingface_hub.constants
import pandas
import pytest

from qevict_bench import hub

KNOWN = "someone/nuts"
ROWS = [{"text": "a"}, {"text": "b"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """There is no network."""
    return hub_sets.no_network(monkeypatch, tmp_path)


def texts(hub_id: Path | str, name: str | None, split: str) -> list[str]:
    return [row["text"] for row in hub.splits(str(hub_id), name, KNOWN)[split]]


def message(hub_id: Path | str) -> str:
    with pytest.raises(ValueError, match="^hub_id=") as caught:
        hub.splits(str(hub_id), None, KNOWN)
    text = str(caught.value)
    assert text.endswith(" and set task.hub_id=DIR")
    assert "\n" not in text
    return text


def test_a_local_copy(tmp_path: Path) -> None:
    folder = hub_sets.write(tmp_path / "set", {"x": {"test": ROWS, "train": ROWS[:1]}, "y": {"test": ROWS[1:]}})
    assert hub.names(str(folder), KNOWN) == ("x", "y")
    assert sorted(hub.splits(str(folder), "x", KNOWN)) == ["test", "train"]
    assert (texts(folder, "x", "test"), texts(folder, "x", "train"), texts(folder, "y", "test")) == (
        ["a", "b"],
        ["a"],
        ["b"],
    )


def test_a_folder_with_the_name_of_a_format_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_sets.write(tmp_path / "json", {"x": {"test": ROWS}})
    monkeypatch.chdir(tmp_path)
    assert texts("json", "x", "test") == ["a", "b"]


def test_a_set_in_the_cache_needs_no_network(tmp_path: Path, cache: Path) -> None:
    hub_sets.move_to_cache(hub_sets.write(tmp_path / "set", {"x": {"test": ROWS}}), cache, "any/thing")
    assert hub.names("any/thing", KNOWN) == ("x",)
    assert texts("any/thing", "x", "test") == ["a", "b"]


def test_a_part_of_a_set_in_the_cache_is_used_as_far_as_it_goes(tmp_path: Path, cache: Path) -> None:
    folder = hub_sets.write(tmp_path / "set", {"x": {"test": ROWS}, "y": {"test": ROWS}})
    next((folder / "y").iterdir()).unlink()
    hub_sets.move_to_cache(folder, cache, "any/thing")
    assert texts("any/thing", "x", "test") == ["a", "b"]
    with pytest.raises(ValueError, match="hub_id='any/thing' is no folder here, and the Hub did not give it"):
        hub.splits("any/thing", "y", KNOWN)


def test_without_a_network_nothing_is_tried_twice_and_the_message_holds_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(f"it waits {seconds} s to try again")

    monkeypatch.setattr("time.sleep", sleep)
    text = message("any/thing")
    assert text.startswith("hub_id='any/thing' is no folder here, and the Hub did not give it (ConnectError: ")
    assert "`hf download any/thing --repo-type dataset --local-dir DIR`" in text


def test_a_hub_that_never_answers_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "did not give it (" in message("any/thing")


def test_a_hub_whose_name_is_never_resolved_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    released = Event()

    def resolve(*_: object, **__: object) -> None:
        released.wait()
        raise OSError("too late")

    monkeypatch.setattr(hub, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        assert "did not give it (TimeoutError: no answer within 0.2 s)" in message("any/thing")
    finally:
        released.set()


def test_what_the_hub_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "(OfflineModeIsEnabled: " in message("any/thing")


@pytest.mark.parametrize("bad", ["a/b/c", "../x y", "-", "/nowhere/set", "./set", "$(touch x)/y"])
def test_the_command_fetches_the_known_set_where_the_name_is_none(bad: str) -> None:
    assert f"`hf download {KNOWN} --repo-type dataset" in message(bad)


def card(text: str) -> dict[str, bytes]:
    return {"README.md": f"---\n{text}\n---\n".encode()}


DAMAGED = {
    "empty": {},
    "a card only": card("license: mit"),
    "a card that is no yaml": card("configs: ["),
    "a card without text": {"README.md": b"---\n\xff\xfe: 3\n---\n"},
    "a card of other types": card("dataset_info:\n  splits: 3"),
    "files that are gone": card("configs:\n- config_name: x\n  data_files: gone/*"),
    "a script": {"set.py": b"import datasets"},
    "no parquet": {"test.parquet": b"version https://git-lfs.github.com/spec/v1\n"},
    "an empty parquet": {"test.parquet": b""},
    "no json": {"test.jsonl": b"{\n"},
    "no zip": {"test.zip": b"zip"},
}


@pytest.mark.parametrize("files", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_copy_is_named(
    tmp_path: Path, files: dict[str, bytes], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    text = message(folder)
    assert re.match(rf"hub_id='{folder}': {folder} cannot be read as a data set \(\w+: .+\); fetch it anew with", text)
    assert f"`hf download {KNOWN} --repo-type dataset" in text
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert logging.getLogger("datasets").level != logging.CRITICAL


def test_files_of_different_columns_are_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name, column in (("train", "text"), ("test", "number")):
        pandas.DataFrame({column: [1]}).to_parquet(tmp_path / "set" / f"{name}.parquet")
    assert "(CastError: Couldn't cast" in message(tmp_path / "set")


def test_an_unknown_configuration_of_a_copy_is_named(tmp_path: Path) -> None:
    folder = hub_sets.write(tmp_path / "set", {"x": {"test": ROWS}})
    with pytest.raises(ValueError, match=r"\(ValueError: BuilderConfig 'z' not found"):
        hub.splits(str(folder), "z", KNOWN)
