"""A disk that is full or takes nothing: a clear error, the rows so far intact, and the run goes on when mended."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fakes
import pytest

from qevict_bench import runner
from qevict_bench.results import RunFailed, read_rows
from qevict_bench.runner import Company

Mount = Callable[[str], None]


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "describe", fakes.describe)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Mount]]:
    """A small file system of its own, and how to mount it again with other options."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mount is refused here")

    mount("size=64k")
    try:
        yield path, mount
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("company", [None, Company()])
def test_a_full_disk(disk: tuple[Path, Mount], company: Company | None) -> None:
    path, mount = disk
    cfg = fakes.config(path, limit=40)
    with pytest.raises((RunFailed, ValueError), match="cannot be written .No space left on device"):
        runner.run(cfg, fakes.ENGINE, None, company)
    folder = path / runner.make_plan(cfg).job.run_id
    files = [folder / "rows.jsonl", *folder.glob("workers/*/rows.jsonl")]
    before = b"".join(file.read_bytes() for file in files)
    assert before.count(b'"run_id"') > 10
    assert before.endswith(b"}\n")  # no half a line
    mount("remount,size=4m")
    assert runner.run(cfg, fakes.ENGINE, None, company).num_examples == 80
    assert len(read_rows(folder / "rows.jsonl")[0]) == len((folder / "rows.jsonl").read_bytes().splitlines()) == 80


@pytest.mark.parametrize("company", [None, Company()])
def test_a_folder_that_can_only_be_read(disk: tuple[Path, Mount], company: Company | None) -> None:
    path, mount = disk
    mount("remount,size=4m")
    summary = runner.run(fakes.config(path, limit=2), fakes.ENGINE, None, company)
    rows = path / summary.run_id / "rows.jsonl"
    before = rows.read_bytes()
    mount("remount,ro")
    with pytest.raises(ValueError, match=rf"results_dir={path} cannot be written .Read-only file system.; choose"):
        runner.run(fakes.config(path, limit=4), fakes.ENGINE, None, company)
    assert rows.read_bytes() == before
    mount("remount,rw")
    assert runner.run(fakes.config(path, limit=4), fakes.ENGINE, None, company).num_examples == 8
