"""Finished or growing runs as read from their folders, and what keeps two of them from being compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from qevict_bench.comparison import pair
from qevict_bench.environment import Environment
from qevict_bench.rowfiles import read_rows
from qevict_bench.rows import Row
from qevict_bench.standing import read_json, standing
from qevict_bench.terminal import plain

PROTOCOL = ("protocol", "mode", "answer_prefix_at", "instruction_at", "first_token")
SETTING = ("model", "dtype", "task", "prompt_source", "split", "seed", *PROTOCOL)
"""Fields of a row that must agree, beside model.*, task.* and protocol.* of config.yaml."""
DATA = ("subset", "index", "group", "answers", "prompt_tokens")
"""Fields of a row that must agree on every shared example."""
REFERENCE = "the reference run (model weights, task data, reference method)"
Difference = tuple[str, object, object]
"""A field's name, and its values in two runs."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Run:
    """A run as read from its folder. `reference_id` comes from summary.json ("" without it).

    `number`: its place among those read, from 1. `asked`: the rows that its newest command asked for. `finished`: it
    has all of them, and their summary. `written`: when, in UTC.
    """

    number: int
    path: Path
    rows: list[Row]
    asked: list[Row]
    config: Mapping[str, Any]
    environment: Environment
    reference_id: str
    finished: bool
    written: datetime

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def good(self) -> list[Row]:
        return [row for row in self.rows if row.status == "ok"]

    @property
    def memory(self) -> float:
        """Mean share of FullKV's bytes."""
        return fmean((row.fractions or {}).get("mean", 0.0) for row in self.good) if self.good else 0.0

    @property
    def is_reference(self) -> bool:
        row, reference = self.rows[0], self.config["reference"]
        return row.budget == "1.0" and isinstance(reference, dict) and reference.get("name") == row.method

    @property
    def scored(self) -> bool:
        """Whether its answers are judged, as far as its rows show."""
        return any(row.metrics for row in self.rows) or not self.good

    @cached_property
    def setting(self) -> dict[str, object]:
        """What two runs must have in common to be compared, by name."""
        found: dict[str, object] = {field: getattr(self.first, field) for field in SETTING}
        for group in ("model", "task", "protocol"):
            found |= _flat(self.config[group], f"{group}.")
        return found

    @cached_property
    def origin(self) -> dict[str, object]:
        """Code of engine and task, device and library versions."""
        found = self.environment
        versions = {name: found.versions[name] for name in sorted(found.versions)}
        return {"code hash of engine and task": found.shared_hash, "device": found.device, **versions}

    @property
    def conditions(self) -> str:
        """The same for two runs of which setting and origin, and what their reference ids say, are the same."""
        return repr((self.setting, self.origin, self.reference_id, self.first.batch_size))


def read_run(path: Path, number: int) -> Run:
    """Read one run; raises ValueError (one line) for anything that is missing or damaged."""
    found, _ = read_rows(path / "rows.jsonl")
    if not found:
        raise ValueError(f"{path} has no rows; give the folder of a run that has begun")
    try:
        config = yaml.load((path / "config.yaml").read_text(encoding="utf-8"), _LOADER)
        sections = ("model", "task", "protocol", "reference", "method")
        if not isinstance(config, dict) or not all(isinstance(config.get(name), dict) for name in sections):
            raise ValueError("it is not the configuration of a run")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path / 'config.yaml'} cannot be read ({one_line(error)}); run it again") from None
    try:
        environment = Environment.from_json(read_json(path / "env.json"))
    except ValueError as error:
        raise ValueError(f"{path / 'env.json'} cannot be read ({one_line(error)}); run it again") from None
    summary = read_json(path / "summary.json")
    facts = summary.get("facts")
    reference_id = str(facts.get("reference_id", "")) if isinstance(facts, dict) else ""
    stands = standing(path, found.values())
    finished = stands.complete and stands.summarized
    written = max(file.stat().st_mtime for name in ("rows.jsonl", "summary.json") if (file := path / name).exists())
    when = datetime.fromtimestamp(written, UTC)
    rows = list(found.values())
    return Run(number, path, rows, list(stands.rows), config, environment, reference_id, finished, when)


def read_folders(folders: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """All runs in folders of runs, in order of their names, and a line for each that cannot be read or has no rows.

    Raises ValueError if one of `folders` is no folder. A run that lies in two of them is read once.
    """
    runs: list[Run] = []
    problems: list[str] = []
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; name the results_dir of the runs")
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or not (path / "config.yaml").exists() or path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                runs.append(read_run(path, len(runs) + 1))
            except (ValueError, OSError) as error:
                problems.append(one_line(error))
    return runs, problems


def setting_differences(first: Run, second: Run) -> Iterator[Difference]:
    """Settings in which two runs differ, other than method and budget."""
    yield from _differences(first.setting, second.setting)
    same_batches = first.first.batch_size == second.first.batch_size  # they are part of the reference's id
    both = first.reference_id and second.reference_id and same_batches
    if both and first.reference_id != second.reference_id:
        yield REFERENCE, first.reference_id, second.reference_id


def origin_differences(first: Run, second: Run) -> Iterator[Difference]:
    """Code, device and library versions in which they differ. A method's code counts where both runs have the same."""
    mine, theirs = first.environment.code_hash, second.environment.code_hash
    if mine != theirs and first.config["method"] == second.config["method"]:
        yield "code hash", mine, theirs
    yield from _differences(first.origin, second.origin)


def data_difference(rows: Sequence[Row], others: Sequence[Row]) -> Difference | None:
    """The first shared example that is not the same one in both."""
    for row, other in (both for members in pair(rows, others).values() for both in members):
        for field in DATA:
            if (mine := getattr(row, field)) != (theirs := getattr(other, field)):
                return f"{field} of {row.example_id}", mine, theirs
    return None


def one_line(error: Exception) -> str:
    return plain(str(error))


def _differences(mine: Mapping[str, object], theirs: Mapping[str, object]) -> Iterator[Difference]:
    if mine == theirs:
        return
    for name in dict.fromkeys([*mine, *theirs]):
        if (a := mine.get(name, "none")) != (b := theirs.get(name, "none")):
            yield name, a, b


def _flat(node: object, where: str) -> dict[str, object]:
    """{"task.subsets": [...], ...}: one entry per field of a section of config.yaml."""
    return (
        {f"{where}{name}": value for name, value in sorted(node.items())} if isinstance(node, dict) else {where: node}
    )
