"""A run as it stands in a table: its name there, its badge, and how it compares with FullKV and with the best."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from qevict_bench.alarms import Alarm, advice, alarms_of, row_alarms
from qevict_bench.comparison import Comparison, Comparisons, Pair, compare, pair, points
from qevict_bench.report.groups import Group
from qevict_bench.rows import Row
from qevict_bench.runs import PROTOCOL, Run, data_difference
from qevict_bench.statistics import detectable_difference, holm
from qevict_bench.tables import Missing

NOT_RUN = Missing("not run")
_SHORT = 60
_PLACES = 2
_NAMED = 12


@dataclass(frozen=True)
class Entry:
    """`method` and `budget` as shown. `reference`: FullKV's run on the same examples; without it `unpaired` says why.
    `pairs` with FullKV's rows (of FullKV itself every row twice), and what they say: `found`.

    `differs`: its difference from FullKV is beyond noise (Holm over all runs of the table). `best`: so is what it is
    better than every other run of its budget; `tied`: among those not told apart from the highest.
    """

    run: Run
    method: str
    budget: str
    reference: Run | None
    unpaired: str
    pairs: dict[str, list[Pair]]
    found: Comparisons
    differs: bool = False
    best: bool = False
    tied: bool = False

    @property
    def rows(self) -> list[Row]:
        return self.run.asked or self.run.rows

    @property
    def is_reference(self) -> bool:
        return self.run.is_reference

    @cached_property
    def good(self) -> list[Row]:
        return [row for row in self.rows if row.status == "ok"]

    @cached_property
    def by_subset(self) -> dict[str, list[Row]]:
        """ok rows."""
        found: dict[str, list[Row]] = {}
        for row in self.good:
            found.setdefault(row.subset, []).append(row)
        return found

    @property
    def overall(self) -> Comparison | None:
        return self.found.overall

    @property
    def memory(self) -> float | None:
        """Mean share of FullKV's bytes while decoding."""
        return fmean((row.fractions or {})["mean"] for row in self.good) if self.good else None

    @property
    def matched(self) -> bool:
        return bool(self.good) and all(row.matched for row in self.good)

    @property
    def published(self) -> bool:
        """As its authors publish it: nothing bounds the cache, or nothing while decoding."""
        return self.run.first.budget == "native" or self.run.first.enforce == "prefill"

    @property
    def badge(self) -> str:
        if self.is_reference:
            return "reference"
        row = self.run.first
        kind = "published" if row.budget == "native" else "published, prefill only" if self.published else "enforced"
        state = "" if row.budget == "native" or not self.good else ", matched" if self.matched else ", unmatched"
        return kind + state + ", partial" * (not self.run.finished)

    @property
    def reason(self) -> Missing:
        """Why there is no score."""
        return why(self.rows)

    @property
    def score(self) -> float | None:
        """Macro average in points; None without a scored example."""
        if not self.run.scored or not self.by_subset:
            return None
        return fmean(self.subset_score(name) for name in self.by_subset)

    def subset_score(self, subset: str) -> float:
        return fmean(points(row) for row in self.by_subset[subset])

    @cached_property
    def alarms(self) -> list[Alarm]:
        reference = self.rows if self.is_reference else self.reference.rows if self.reference else []
        if not reference:
            return row_alarms(self.rows)
        together = [both for members in self.pairs.values() for both in members]
        return alarms_of(self.rows, reference, self.found, together)


def why(rows: Sequence[Row]) -> Missing:
    """Why none of these rows has a score."""
    if not rows:
        return NOT_RUN
    row = rows[0]
    if row.status == "infeasible":
        nearest = re.search(r"nearest feasible fraction is ([0-9.]+)", row.error)
        return Missing(f"infeasible: needs {nearest[1].rstrip('.')}" if nearest else f"infeasible: {_cut(row.error)}")
    return Missing(f"failed: {_cut(row.error)}" if row.status == "error" else "not scored")


def entries_of(group: Group) -> list[Entry]:
    """Every run of a table: FullKV first, then by name and falling budget; compared and ranked."""
    names = _names(group)
    made = []
    for run, (method, budget) in zip(group.runs, names, strict=True):
        reference, unpaired = _reference(run, group.runs)
        rows = run.asked or run.rows
        pairs = pair(rows, rows if run.is_reference else reference.rows if reference else [])
        found = compare(pairs if run.scored and not run.is_reference else {})
        made.append(Entry(run, method, budget, reference, unpaired, pairs, found))
    made.sort(key=lambda entry: (not entry.is_reference, entry.method, entry.published, -budget_size(entry.run.first)))
    return _ranked(_starred(made))


def _reference(run: Run, runs: Sequence[Run]) -> tuple[Run | None, str]:
    """FullKV's run on the same examples. The one its summary names, else any in the same setting."""
    if run.is_reference:
        return None, ""
    candidates = [other for other in runs if other.is_reference]
    named = [other for other in candidates if other.first.run_id == run.reference_id]
    alike = [other for other in candidates if _conditions(other) == _conditions(run)]
    for other in named or alike:
        if difference := data_difference(run.rows, other.rows):
            return None, f"FullKV was asked something else ({difference[0]})"
        return other, ""
    return None, "no FullKV run"


def _conditions(run: Run) -> tuple[object, ...]:
    """What a table may mix if it is allowed to, but no comparison."""
    return tuple(getattr(run.first, field) for field in ("dtype", "prompt_source", *PROTOCOL))


def _names(group: Group) -> list[tuple[str, str]]:
    """Method and budget of each run as shown; what tells two alike ones apart stands in brackets."""
    shown_kinds: dict[str, Callable[[Row], str]] = {
        "protocol": lambda row: f"{row.protocol_words}, first token {row.first_token}",
        "dtype": lambda row: row.dtype,
        "prompt_source": lambda row: row.prompt_source,
        "device": lambda row: row.device,
    }
    names = []
    for run in group.runs:
        row = run.first
        said = [shown(row) for kind, shown in shown_kinds.items() if kind in group.mixed]
        method = f"{row.method} {row.variant}".strip() + (f" ({'; '.join(said)})" if said else "")
        budget = "native" if row.budget == "native" else row.budget
        budget += f" of {row.basis}" * (row.basis != "sequence" and row.budget not in ("native", "1.0"))
        names.append((method, budget + ", prefill only" * (row.enforce == "prefill" and row.budget != "native")))
    tells: tuple[Callable[[Run], str], ...] = (
        lambda run: f"batch {run.first.batch_size}",
        lambda run: run.first.small_budget,
        lambda run: "fidelity" if any(row.fidelity for row in run.rows) else "",
        lambda run: f"run {run.first.run_id}",
        lambda run: str(run.path),
    )
    for tell in tells:
        known: dict[tuple[str, str], list[int]] = {}
        for index, name in enumerate(names):
            known.setdefault(name, []).append(index)
        for alike in known.values():
            if len({tell(group.runs[index]) for index in alike}) > 1:
                for index in alike:
                    said_now = tell(group.runs[index])
                    names[index] = (f"{names[index][0]} ({said_now})" if said_now else names[index][0], names[index][1])
    return names


def budget_size(row: Row) -> float:
    """For the order of budgets."""
    if row.budget == "native":
        return 0.0
    whole, _, part = row.budget.rstrip("t").partition("/")
    return float(whole) / float(part or 1)


def _starred(entries: Sequence[Entry]) -> list[Entry]:
    """With `differs`: Holm over all runs of the table."""
    overall = [entry.overall for entry in entries]
    known = [found for found in overall if found is not None]
    adjusted = iter(holm([found.p for found in known]))
    marks = [found is not None and found.stands_out(next(adjusted)) for found in overall]
    return [replace(entry, differs=mark) for entry, mark in zip(entries, marks, strict=True)]


def _ranked(entries: Sequence[Entry]) -> list[Entry]:
    """With `best` and `tied`, among matched runs of the same budget and conditions.

    The run with the highest score is compared with each of the others, p times the number of these comparisons
    (Bonferroni): that a run other than the truly best one beats all others is then as rare as for one pair.
    """
    budgets: dict[tuple[object, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        if not entry.is_reference and not entry.published and entry.matched and entry.score is not None:
            budgets.setdefault((entry.budget, *_conditions(entry.run)), []).append(index)
    found = list(entries)
    for members in budgets.values():
        top, *others = sorted(members, key=lambda index: -(entries[index].score or 0.0))
        if not others:
            continue
        ties = [other for other in others if not _beats(entries[top], entries[other], len(others))]
        found[top] = replace(found[top], best=not ties, tied=bool(ties))
        for index in ties:
            found[index] = replace(found[index], tied=True)
    return found


def _beats(first: Entry, second: Entry, family: int) -> bool:
    shared = pair(first.rows, second.rows)
    strata = [[points(a) - points(b) for a, b in members] for members in shared.values()]
    groups = [[a.group for a, _ in members] for members in shared.values()]
    if not strata or fmean(map(fmean, strata)) <= detectable_difference(strata, groups, scale=100):
        return False  # without a bootstrap, as Comparison.stands_out would say too
    overall = compare(shared).overall
    return overall is not None and overall.stands_out(min(1.0, family * overall.p))


def alarm_lines(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """What is doubtful and what to do about it, with "where figures: method at budget, ..." for each that is true."""
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for entry in entries:
        kinds: dict[str, list[str]] = {}
        for alarm in entry.alarms:
            kinds.setdefault(advice(alarm.kind), []).append(f"{alarm.subset} {alarm.figures}".strip())
        for said, places in kinds.items():
            more = f"; {len(places) - _PLACES} more subsets" if len(places) > _PLACES else ""
            where = f"{'; '.join(places[:_PLACES])}{more}"
            found.setdefault(said, {}).setdefault(where, {}).setdefault(entry.method, []).append(entry.budget)
    compared = sum(bool(entry.good) and not entry.is_reference for entry in entries)
    return {
        said: [f"{where}: {_runs_named(methods, compared)}" for where, methods in all_of.items()]
        for said, all_of in found.items()
    }


def _runs_named(methods: Mapping[str, Sequence[str]], compared: int) -> str:
    """ "method at budget, budget; method at budget", or that it is all of those compared."""
    if sum(map(len, methods.values())) >= compared > 1:
        return "all runs"
    named = [f"{method} at {', '.join(budgets)}" for method, budgets in methods.items()]
    more = len(named) - _NAMED
    return "; ".join(named if more <= 1 else [*named[:_NAMED], f"{more} more methods"])


def families_of(families: Mapping[str, Sequence[str]], subsets: Sequence[str]) -> dict[str, list[str]]:
    """Those families of which at least two subsets were run."""
    found = {name: [subset for subset in members if subset in subsets] for name, members in families.items()}
    return {name: members for name, members in found.items() if len(members) > 1}


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"
