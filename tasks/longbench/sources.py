"""Where the items of a subset come from."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tasks.longbench import files, fixture, hub
from tasks.longbench.items import KVPRESS, OFFICIAL, Found, Item, items
from tasks.longbench.structure import BUCKETS, parts

NEEDS = {"own": "", "local": "data_dir", "hub": "hub_id"}
"""Source -> the field of the task that it needs."""

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """One of NEEDS, and the folder or the name of the set."""

    kind: str
    place: str

    @property
    def worded(self) -> bool:
        """Whether the data hold the official wording already. Raises ValueError if a set cannot be had."""
        return self.kind == "hub" and hub.archive(self.place) is None

    def fingerprint(self, subset: str) -> str:
        """Hash of a subset's data. Raises ValueError if they are missing or damaged."""
        dataset, file, _ = parts(subset)
        if self.kind == "own":
            drawn = repr(list(islice(fixture.rows(dataset, 0, "test"), 2)))
            return hashlib.sha256(drawn.encode()).hexdigest()
        return files.hash_file(Path(self.place), file) if self.kind == "local" else hub.hash_rows(self.place, file)

    def items(self, subset: str, seed: int, split: str) -> Iterator[Item]:
        """A subset's items in the order of the data; of own ones there is no end. Bad ones are logged."""
        dataset, file, bucket = parts(subset)
        low, bound = BUCKETS[bucket] if bucket else (-1, 0)
        rows, columns = self._rows(dataset, file, seed, split), KVPRESS if self.worded else OFFICIAL
        for item in items(rows, dataset, columns, bool(bucket)):
            if bucket and not low <= max(0, item.length) < bound:
                continue
            if item.problem:
                _warn(item.problem)
            yield item

    def _rows(self, dataset: str, file: str, seed: int, split: str) -> Iterator[Found]:
        if self.kind == "own":
            rows = enumerate(fixture.rows(dataset, seed, split))
            return (Found(f"own {dataset}, item {i}", row) for i, row in rows)
        return files.rows(Path(self.place), file) if self.kind == "local" else hub.rows(self.place, file)


@functools.lru_cache(maxsize=4096)
def _warn(problem: str) -> None:
    """Once: a run and its reference read the same rows."""
    log.warning("%s", problem)
