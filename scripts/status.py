"""How the runs of a folder stand: python scripts/status.py [RESULTS_DIR]

One line per run, the one written last at the bottom. Reads only, takes no lock, and may look on while others write, on
this machine or another. Exit code 1 if a run has failed examples or damaged files, 2 if RESULTS_DIR is no folder.
"""

from __future__ import annotations

import argparse
import signal
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import yaml

from qevict_bench.leases import Sighting, look
from qevict_bench.results import Damaged, Row, known_sizes, read_json, read_rows

WIDTH = 120
COLUMNS = {"run": 12, "model": 14, "method": 26, "budget": 8, "task": 10, "done": 9}
"""Most characters each column may take; the state takes what is left of WIDTH."""

KINDS = ("done", "running", "stopped", "infeasible", "failed", "damaged")


@dataclass(frozen=True)
class Run:
    """One run as found. `kind` is one of KINDS; `wanted` -1 if no command noted what it asked for."""

    name: str
    kind: str
    state: str
    written_s: float
    labels: dict[str, str] = field(default_factory=dict)
    num_done: int = 0
    wanted: int = -1
    failed: tuple[Row, ...] = ()

    @property
    def cells(self) -> list[str]:
        done = f"{self.num_done}/{self.wanted if self.wanted >= 0 else '?'}"
        return [self.name, *(self.labels.get(name, "") for name in ("model", "method", "budget", "task")), done]


def inspect(path: Path) -> Run | None:
    """The run in the folder `path`, or None if none is there (any more)."""
    written_s = 0.0
    try:
        files = [file for name in ("config.yaml", "rows.jsonl") if (file := path / name).exists()]
        lease = look(path)
        if not files and lease is None:
            return None
        written_s = max((file.stat().st_mtime for file in files), default=0.0)
        rows = list(read_rows(path / "rows.jsonl")[0].values())
        labels = _labels(path, rows)
        subsets, limit = _asked(path)
        sizes = known_sizes(path / "summary.json")
    except FileNotFoundError:
        return None
    except (Damaged, OSError) as error:
        return Run(path.name, "damaged", f"damaged: {str(error).removeprefix(f'{path}/')}", written_s)
    asked = [row for row in rows if not limit or (row.subset in subsets and row.index < limit)]
    failed = tuple(row for row in asked if row.status == "error")
    num_done = len(asked) - len(failed)
    wanted = sum(min(limit, sizes.get(name, limit)) for name in subsets) if limit else -1
    summarized = (path / "summary.json").exists()
    kind, state = _state(asked, failed, num_done >= wanted, summarized, lease)
    return Run(path.name, kind, state, written_s, labels, num_done, wanted, failed)


def _state(
    asked: Sequence[Row], failed: Sequence[Row], complete: bool, summarized: bool, lease: Sighting | None
) -> tuple[str, str]:
    """First word and text of the state."""
    owner = "another process"
    if lease is not None and lease.owner is not None:
        owner = f"pid {lease.owner.pid} on {lease.owner.host}"
    age = f"{max(lease.age_s, 0):.0f} s ago" if lease is not None else ""
    if lease is not None and lease.alive:
        return "running", f"running ({owner}, {age}{f', {len(failed)} errors' if failed else ''})"
    if failed:
        return "failed", f"failed ({len(failed)} error rows; {failed[0].error})"
    if not complete or not summarized:
        what = "no summary" if complete else "partial"
        return "stopped", f"stopped ({what}; stale: {owner}, {age})" if lease is not None else f"stopped ({what})"
    infeasible = [row for row in asked if row.status == "infeasible"]
    if infeasible and len(infeasible) == len(asked):
        return "infeasible", f"infeasible ({infeasible[0].error})"
    return "done", f"done ({len(infeasible)} infeasible)" if infeasible else "done"


def _labels(path: Path, rows: Sequence[Row]) -> dict[str, str]:
    """From the rows, which say all of it; from the configuration while there is none."""
    if rows:
        first = rows[0]
        method = f"{first.method}({first.variant})" if first.variant else first.method
        return {"model": first.model, "method": method, "budget": first.budget, "task": first.task}
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        named = {name: config[name].get("name", "") for name in ("model", "method")}
        labels = {**named, "budget": config["budget"], "task": config["task"]["_target_"].split(".")[-2]}
        return {name: str(value) for name, value in labels.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, yaml.YAMLError):
        raise Damaged(f"{path / 'config.yaml'} is damaged; start over with resume=restart") from None


def _asked(path: Path) -> tuple[list[str], int]:
    """Subsets and limit that the newest command asked for; ([], 0) if none noted it."""
    values: Any = read_json(path / "wanted.json")
    subsets, limit = values.get("subsets", []), values.get("limit", 0)
    texts = isinstance(subsets, list) and all(isinstance(name, str) for name in subsets)
    if not texts or type(limit) is not int or limit < 0:
        raise Damaged(f"{path / 'wanted.json'} is damaged; delete it and run again")
    return subsets, limit


def table(runs: Sequence[Run]) -> Iterator[str]:
    rows = [[*COLUMNS], *(run.cells for run in runs)]
    widths = [
        min(most, max(_width(_plain(row[column])) for row in rows)) for column, most in enumerate(COLUMNS.values())
    ]
    rest = WIDTH - sum(widths) - 2 * len(widths)
    for cells, state in zip(rows, ["state", *(run.state for run in runs)], strict=True):
        texts = [_fitted(text, width) for text, width in zip(cells, widths, strict=True)]
        yield "  ".join([*texts, _fitted(state, rest)]).rstrip()


def _plain(text: str) -> str:
    """On one line, without characters that steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _width(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def _fitted(text: str, width: int) -> str:
    """`text` on one line, padded or cut to `width` columns; a cut shows as an ellipsis."""
    text = _plain(text[: 10 * width])
    if _width(text) > width:
        while _width(text) > width - 1:
            text = text[:-1]
        text += "…"
    return text + " " * (width - _width(text))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How the runs of a folder stand.")
    parser.add_argument("results_dir", nargs="?", type=Path, default=Path("results/runs"), metavar="RESULTS_DIR")
    parser.add_argument("--failed", action="store_true", help="list every failed example with its reason")
    options = parser.parse_args(arguments)
    if options.results_dir.exists() and not options.results_dir.is_dir():
        print(f"error: {options.results_dir} is not a folder; name the results_dir of the runs", file=sys.stderr)
        return 2
    folders = sorted(options.results_dir.iterdir()) if options.results_dir.exists() else []
    found = [run for path in folders if path.is_dir() and (run := inspect(path)) is not None]
    if not found:
        print(f"no runs in {options.results_dir}")
        return 0
    found.sort(key=lambda run: run.written_s)
    if options.failed:
        for run in found:
            for row in run.failed:
                print(_plain(f"{run.name} {row.method} {row.example_id}: {row.error}"))
            if run.kind == "damaged":
                print(_plain(f"{run.name} {run.state}"))
    else:
        print("\n".join(table(found)))
        counts = Counter(run.kind for run in found)
        plural = "s" if len(found) > 1 else ""
        print(f"{len(found)} run{plural}: {', '.join(f'{counts[kind]} {kind}' for kind in KINDS if counts[kind])}")
    return int(any(run.failed or run.kind == "damaged" for run in found))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet in `| head`
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # terminals that lack a sign show "?"
    sys.exit(main())
