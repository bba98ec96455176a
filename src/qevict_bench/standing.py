"""How far a run is with what was asked of it: the small files beside its rows, read and judged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qevict_bench.rowfiles import Damaged
from qevict_bench.rows import Row


@dataclass(frozen=True)
class Standing:
    """`rows` are those that the newest command asked for, `wanted` is how many they should be (-1: nobody noted it).

    `summarized`: there is a summary, and it is of what the newest command asked for.
    """

    rows: tuple[Row, ...]
    wanted: int
    summarized: bool

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.done)

    @property
    def num_done(self) -> int:
        return len(self.rows) - len(self.failed)

    @property
    def complete(self) -> bool:
        return self.num_done >= self.wanted


def standing(path: Path, rows: Iterable[Row]) -> Standing:
    """Judge the run in the folder `path` with these rows; raises Damaged."""
    subsets, limit = _asked(path / "wanted.json")
    facts, sizes = _facts(path / "summary.json")
    counted = tuple(row for row in rows if not limit or (row.subset in subsets and row.index < limit))
    wanted = sum(min(limit, sizes.get(name, limit)) for name in subsets) if limit else -1
    of_this = not limit or facts.get("limit", limit) == limit
    return Standing(counted, wanted, of_this and (path / "summary.json").exists())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no file; raises Damaged."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged ({error}); delete it and run again") from None
    if not isinstance(values, dict):
        raise Damaged(f"{path} is damaged (it is not an object); delete it and run again")
    return values


def known_sizes(summary: Path) -> dict[str, int]:
    """Sizes of the subsets that have fewer examples than some command asked for, as noted in summary.json."""
    return _facts(summary)[1]


def _facts(summary: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The facts in summary.json, and the sizes of subsets among them."""
    facts = read_json(summary).get("facts", {})
    sizes = facts.get("available", {}) if isinstance(facts, dict) else None
    if not isinstance(sizes, dict) or any(type(size) is not int or size < 0 for size in sizes.values()):
        raise Damaged(f"{summary} is damaged (facts.available holds no numbers); delete it and run again")
    return facts, sizes


def _asked(wanted: Path) -> tuple[list[str], int]:
    """Subsets and limit that the newest command asked for; ([], 0) if none noted it."""
    values = read_json(wanted)
    subsets, limit = values.get("subsets", []), values.get("limit", 0)
    texts = isinstance(subsets, list) and all(isinstance(name, str) for name in subsets)
    if not texts or type(limit) is not int or limit < 0:
        raise Damaged(f"{wanted} is damaged; delete it and run again")
    return subsets, limit
