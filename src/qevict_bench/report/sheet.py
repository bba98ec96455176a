"""How every method of a table was set, and where from its origin: code, data, machine, command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from qevict_bench.report.commands import command_of
from qevict_bench.report.entries import Entry
from qevict_bench.report.groups import Group
from qevict_bench.tables import Cell, Missing, Number, Table

COLUMNS: dict[str, tuple[str, ...]] = {
    "sinks": ("sink", "sinks"),
    "window": ("observation", "window"),
    "recent": ("recent", "recent_share", "native_recent"),
    "pooling": ("pooling", "kernel"),
    "group-reduce": ("group_reduce", "order"),
    "bits": ("bits", "key_bits", "value_bits", "high", "low"),
    "group": ("group", "block", "key_params", "unit"),
    "residual": ("residual",),
    "re-selection while decoding": ("every", "omega", "gap", "reselect_score", "routing"),
}
"""What is compared between baselines, and the fields of methods that say it."""


class Declared(NamedTuple):
    """A method's class: all its fields with their defaults, and those its authors publish (the same, unless a preset
    says otherwise); how it keeps tokens: bits of its tiers, tokens routed together, what a promotion brings back."""

    defaults: Mapping[str, object]
    published: Mapping[str, object]
    tiers: tuple[str, ...]
    unit: int
    restore: str


Declare = Callable[[Mapping[str, Any]], Declared]
"""From the section `method` of a run's config.yaml."""


def settings_table(group: Group, name: str, entries: Sequence[Entry], declare: Declare) -> Table:
    """The fair-baseline sheet: one line per setting of a method."""
    rows: list[tuple[Cell, ...]] = []
    seen: dict[tuple[str, str], None] = {}
    for entry in entries:
        enforce = "native" if entry.run.first.budget == "native" else entry.run.first.enforce
        if entry.is_reference or (entry.method, enforce) in seen:
            continue
        seen[entry.method, enforce] = None
        config = entry.run.config["method"]
        declared = declare(config)
        values = {**declared.defaults, **{k: v for k, v in config.items() if k in declared.defaults}}
        cells: list[Cell] = [entry.method]
        for fields in COLUMNS.values():
            known = [field for field in fields if field in values]
            cells.append(", ".join(f"{field} {_shown(values[field])}" for field in known) or "none")
        changed = [
            f"{field} {_shown(values[field])} (published {_shown(value)})"
            for field, value in declared.published.items()
            if values.get(field, value) != value
        ]
        cells += [enforce, _fitted(entry, values), "; ".join(changed) or "as published"]
        rows.append(tuple(cells))
    notes = (
        "Fields of the method's dataclass; none: it has no such field. fitted: what the budget changed, as a range. "
        "published: the authors' setting, the dataclass's default or a preset NAME_paper of the same class.",
        "re-selection: decoded tokens between two selections; enforce always: the budget bounds every step.",
    )
    head = ("method", *COLUMNS, "enforce", "fitted", "differs from published")
    return Table(name, group.title, head, tuple(rows), group.setting, notes, "how the methods were set")


def properties_table(name: str, title: str, entries: Sequence[Entry], declare: Declare) -> Table:
    """What the methods do with tokens (the paper's Table 1): declared, and what was seen in these runs."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        if not entry.is_reference and entry.good:
            found.setdefault(entry.method, []).append(entry)
    rows: list[tuple[Cell, ...]] = []
    for method, members in sorted(found.items()):
        declared = declare(members[0].run.config["method"])
        rows_of = [row for entry in members for row in entry.good]
        low = ", ".join(declared.tiers) or "no"
        evicted = any(row.evictions for row in rows_of)
        promoted = any(row.promotions for row in rows_of)
        window = f"{declared.unit} tokens" if declared.unit > 1 else "no"
        back = f"yes, {declared.restore}" if promoted else "none seen"
        rows.append((method, "yes" if evicted else "none seen", low, window, back, str(len(rows_of))))
    head = ("method", "selective eviction", "low-bit retention", "window routing", "dynamic recovery", "examples")
    notes = (
        "low-bit retention (tiers below full precision), window routing (tokens that change tier together): declared "
        "by the method. Selective eviction, dynamic recovery (a unit comes back to a better tier): seen or not in "
        "these runs.",
    )
    models = sorted({entry.run.first.model for members in found.values() for entry in members})
    newest = max((entry.run.written for members in found.values() for entry in members), default=None)
    setting = (f"From runs of {', '.join(models)}, newest {newest:%Y-%m-%d}.",) if newest else ()
    return Table(name, title, head, tuple(rows), setting, notes, "what they do with tokens")


def efficiency_table(group: Group, name: str, entries: Sequence[Entry]) -> Table:
    """Seconds and bytes of every run (the paper's Table 4)."""
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        good = entry.good
        if not good:
            continue
        row, further = entry.run.first, sum(max(0, row.new_tokens - 1) for row in good)
        cells: list[Cell] = [entry.method, entry.budget, str(row.batch_size), str(len(good))]
        cells += [Number(fmean(row.prompt_tokens for row in good), 0), Number(fmean(row.new_tokens for row in good), 0)]
        cells.append(Number(fmean(row.ttft_s for row in good), 3))
        cells.append(Number(1000 * sum(row.decode_s for row in good) / further, 1) if further else Missing("no token"))
        sizes = [[(row.bytes or {}).get(kind, 0.0) for row in good] for kind in ("peak", "workspace", "host")]
        cells += [Number(fmean(values) / 2**20, 2) for values in sizes]
        rows.append((*cells, f"{row.device}: {entry.run.environment.device_name}"))
    head = ("method", "budget", "batch", "n", "prompt tokens", "new tokens", "first token, s", "further token, ms")
    sizes_head = ("peak cache, MiB", "workspace, MiB", "host, MiB", "machine")
    notes = (
        "Means per example, a batch's time and memory divided by its examples; time with whatever else the machine "
        "did. peak cache: most bytes held while decoding; workspace: dequantized copies and buffered queries, not "
        "counted in the budget; host: exact copies outside of the device.",
    )
    return Table(name, group.title, (*head, *sizes_head), tuple(rows), group.setting, notes, "speed and bytes")


def provenance_table(group: Group, name: str, entries: Sequence[Entry]) -> Table:
    """Where the numbers come from, a line per run."""
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        run = entry.run
        found = run.environment
        versions = ", ".join(f"{n} {v}" for n, v in found.versions.items() if n in ("python", "torch", "transformers"))
        commit = found.git_sha[:12] + (" + changes" if found.git_dirty else "")
        cells: tuple[Cell, ...] = (run.first.run_id, entry.method, entry.budget, str(len(entry.good)), commit)
        cells += (
            found.code_hash,
            f"{run.written:%Y-%m-%d %H:%M} UTC",
            versions,
            f"{run.first.device}: {found.device_name}",
        )
        rows.append((*cells, command_of(run)))
    head = (
        "run",
        "method",
        "budget",
        "n",
        "commit",
        "code",
        "written",
        "versions",
        "machine",
        "command",
    )
    notes = ("written: when the newest of a run's files was.",)
    return Table(name, group.title, head, tuple(rows), group.setting, notes, "where it comes from")


def _fitted(entry: Entry, values: Mapping[str, object]) -> str:
    """Knobs that differ from the setting in some example."""
    found: dict[str, set[Any]] = {}
    for row in entry.good:
        for name, value in (row.knobs or {}).items():
            found.setdefault(name, set()).add(value if isinstance(value, int | float | str) else str(value))
    parts = []
    for name, known in found.items():
        if known != {values.get(name)}:
            ends = sorted(known, key=lambda value: (isinstance(value, str), value))
            parts.append(f"{name} {_shown(ends[0])}" + f" to {_shown(ends[-1])}" * (len(ends) > 1))
    return ", ".join(parts) or "nothing"


def _shown(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
