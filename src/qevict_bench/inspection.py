"""How runs stand, as anyone can see from their folders: done, running (by whom), stopped, failed, infeasible, damaged.

Reads only, takes no lock, and may look on while others write, on this machine or another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from qevict_bench.leases import Sighting, look
from qevict_bench.rowfiles import Damaged, read_rows
from qevict_bench.rows import Row
from qevict_bench.standing import Standing, standing
from qevict_bench.terminal import columns, fitted, plain
from qevict_bench.workers import folders, unmerged

WIDTH = 120
COLUMNS = {"run": 12, "model": 14, "method": 26, "budget": 8, "task": 10, "done": 9}
"""Most characters each column may take; the state takes what is left of WIDTH."""

KINDS = ("done", "running", "stalled", "stopped", "infeasible", "failed", "damaged", "missing")


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
        leases = [seen for folder in [path, *folders(path)] if (seen := look(folder))]
        if not files and not leases:
            return None
        written_s = max((file.stat().st_mtime for file in files), default=0.0)
        merged, _ = read_rows(path / "rows.jsonl")
        rows = list({**merged, **{row.example_id: row for row in unmerged(path, merged)}}.values())
        labels = _labels(path, rows)
        found = standing(path, rows)
    except FileNotFoundError:
        return None
    except (Damaged, OSError) as error:
        return Run(path.name, "damaged", f"damaged: {str(error).removeprefix(f'{path}/')}", written_s)
    kind, state = _state(found, leases)
    return Run(path.name, kind, state, written_s, labels, found.num_done, found.wanted, found.failed)


def _state(found: Standing, leases: Sequence[Sighting]) -> tuple[str, str]:
    """First word and text of the state; `leases` are those of all processes that have to do with the run."""
    failed = found.failed
    alive = [lease for lease in leases if lease.alive]
    lease = next(iter(alive or leases), None)
    owner = "another process"
    if lease is not None and lease.owner is not None:
        owner = f"pid {lease.owner.pid} on {lease.owner.host}"
    age = f"{max(lease.age_s, 0):.0f} s ago" if lease is not None else ""
    errors = f", {len(failed)} errors" if failed else ""
    if alive:
        more = f", and {len(alive) - 1} more" if len(alive) > 1 else ""
        return "running", f"running ({owner}, {age}{more}{errors})"
    if lease is not None and lease.ahead:
        return "running", f"running? (clocks differ; {owner}, {-lease.age_s:.0f} s ahead{errors})"
    if lease is not None and lease.owner is not None and lease.stalled:
        return "stalled", f"stalled (pid {lease.owner.pid} still holds it: continue or kill it{errors})"
    if failed:
        return "failed", f"failed ({len(failed)} error rows; {failed[0].error})"
    if not found.complete or not found.summarized:
        what = "no summary" if found.complete else "partial"
        return "stopped", f"stopped ({what}; stale: {owner}, {age})" if lease is not None else f"stopped ({what})"
    infeasible = [row for row in found.rows if row.status == "infeasible"]
    if infeasible and len(infeasible) == len(found.rows):
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


def table(runs: Sequence[Run]) -> Iterator[str]:
    rows = [[*COLUMNS], *(run.cells for run in runs)]
    widths = [
        min(most, max(columns(plain(row[column])) for row in rows)) for column, most in enumerate(COLUMNS.values())
    ]
    rest = WIDTH - sum(widths) - 2 * len(widths)
    for cells, state in zip(rows, ["state", *(run.state for run in runs)], strict=True):
        texts = [fitted(text, width) for text, width in zip(cells, widths, strict=True)]
        yield "  ".join([*texts, fitted(state, rest)]).rstrip()
