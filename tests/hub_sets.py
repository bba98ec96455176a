"""Data sets in the form of the Hub, and a Hub's library that finds neither a cache nor a network."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from qevict_bench import hub

Rows = Sequence[Mapping[str, Any]]


def no_network(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Empty caches in `folder`, and a Hub that refuses the connection; returns the library's cache of snapshots."""
    import datasets

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    patch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    for function in (hub.names, hub.splits):
        function.cache_clear()
    return folder / "hub"


def write(folder: Path, configurations: Mapping[str, Mapping[str, Rows]]) -> Path:
    """Parquet files listed in the card of the set; `configurations`: name -> split -> rows."""
    import pandas

    lines = ["---", "configs:"]
    for name, splits in configurations.items():
        lines += [f"- config_name: '{name}'", "  data_files:"]
        for split, rows in splits.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            pandas.DataFrame(rows).to_parquet(folder / name / f"{split}-00000-of-00001.parquet")
            lines += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


def move_to_cache(source: Path, cache: Path, hub_id: str) -> None:
    """Lay the files of `source` out as the Hub's library does in its cache of snapshots."""
    repository, commit = cache / f"datasets--{hub_id.replace('/', '--')}", "a" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    files = [path for path in source.rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        link = repository / "snapshots" / commit / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.rename(repository / "blobs" / str(number)))
