"""LongBench on the Hugging Face Hub, or a local copy of such a set, in one of two forms.

zai-org/LongBench (once THUDM/LongBench): data.zip with the official files. Xnhyacinth/LongBench, in kvpress' columns:
one configuration per dataset, split test, parquet with context, question, answer_prefix, answers, all_classes, length;
its context begins with the official instruction already, and its max_new_tokens (20 more than official) is not used.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qevict_bench import hub
from tasks.longbench import files
from tasks.longbench.items import KVPRESS, Found

_KNOWN = "zai-org/LongBench"


@functools.lru_cache(maxsize=4)
def archive(hub_id: str) -> Path | None:
    """The folder of a set with the official files; None for one in kvpress' columns. ValueError if there is no set."""
    folder = hub.folder(hub_id, _KNOWN)
    official = [folder / "data.zip", *folder.glob("*.jsonl"), *folder.glob("data/*.jsonl")]
    return folder if any(path.is_file() for path in official) else None


def rows(hub_id: str, name: str) -> Iterator[Found]:
    """The rows of a dataset. Raises ValueError if the set lacks it."""
    if (folder := archive(hub_id)) is not None:
        yield from files.rows(folder, name, f"hub_id={hub_id!r}")
        return
    for number, row in enumerate(_table(hub_id, name)):
        yield Found(f"{hub_id}, {name}, row {number}", row)


def hash_rows(hub_id: str, name: str) -> str:
    """Hash of the rows of a dataset, whatever files they come in. Raises ValueError as `rows`."""
    if (folder := archive(hub_id)) is not None:
        return files.hash_file(folder, name, f"hub_id={hub_id!r}")
    digest, columns = hashlib.sha256(), ("context", *KVPRESS, "answers", "all_classes", "length", "_id")
    for row in _table(hub_id, name):
        digest.update(repr([row.get(column) for column in columns]).encode())
    return digest.hexdigest()


def _table(hub_id: str, name: str) -> Any:
    names = hub.names(hub_id, _KNOWN)
    if name not in names:
        raise ValueError(
            f"hub_id={hub_id!r} has no {name}; its configurations: {', '.join(names)}; take it out of task.subsets"
        )
    splits = hub.splits(hub_id, name, _KNOWN)
    if "test" not in splits or not len(splits["test"]):
        raise ValueError(f"hub_id={hub_id!r}, {name} has no rows in a split test, only {', '.join(splits)}")
    return splits["test"]
