"""Tables of what the runs of one group scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from qevict_bench.alarms import NAMED
from qevict_bench.comparison import MIN_DIFFERING
from qevict_bench.report.entries import NOT_RUN, Entry, budget_size, families_of, why
from qevict_bench.report.groups import Group
from qevict_bench.rows import Row
from qevict_bench.statistics import ALPHA, Interval, macro_interval
from qevict_bench.tables import Cell, Missing, Number, Table

MEASURES = {
    "KL": ("gold.kl", 1, 3),
    "KL of token 1": ("gold.kl_first", 1, 3),
    "same top token, %": ("gold.agreement", 100, 1),
    "NLL": ("gold.nll", 1, 3),
    "NLL change": ("gold.nll_change", 1, 3),
}
"""On the gold text: key in a row's fidelity, factor, decimals."""
_STAR = (
    f"*: differs from FullKV beyond noise: bootstrap p at most {ALPHA} after Holm over the table's runs, more than the "
    f"detectable difference, and at least {MIN_DIFFERING} examples differ."
)
_BEST = (
    "Bold: better than every other matched run at this budget, beyond noise (as *, p times the number of comparisons). "
    "≈: not told apart from the highest at this budget. Nothing else is ranked."
)
_MEMORY = "memory: mean bytes held / FullKV's bytes at the same step, all metadata counted, mean over examples."
_BADGES = (
    "enforced: the budget bounds every step; published: as its authors publish it, bounded by nothing (native) or only "
    "up to the end of the prompt; matched: the achieved bytes come as close to the budget as the engine asks."
)


def subsets_of(entries: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(row.subset for entry in entries for row in entry.rows))


def score_cell(entry: Entry) -> Cell:
    if entry.score is None:
        return entry.reason
    return Number(entry.score, mark="≈" * entry.tied, bold=entry.best)


def difference_cell(entry: Entry) -> Cell:
    if entry.is_reference:
        return ""
    if entry.overall is None:
        return Missing(entry.unpaired or ("" if entry.score is None else "no shared example"))
    return Number.of(entry.overall.diff, signed=True, mark="*" * entry.differs)


def memory_cell(entry: Entry) -> Cell:
    return Missing("") if entry.memory is None else Number(entry.memory, 3)


def by_budget(group: Group, name: str, entries: Sequence[Entry]) -> Table:
    """The summary: methods against budgets. What does not match its budget is not put beside those that do."""
    others = [entry for entry in entries if not entry.is_reference]
    budgets = list(
        dict.fromkeys(e.budget for e in sorted(others, key=lambda e: (e.published, -budget_size(e.run.first))))
    )
    budgets = budgets or list(dict.fromkeys(entry.budget for entry in entries))
    methods = dict.fromkeys(entry.method for entry in others)
    known = {(entry.method, entry.budget): entry for entry in others}

    def best(method: str) -> list[float]:
        found = [known.get((method, budget)) for budget in budgets]
        return [-1.0 if entry is None or entry.score is None else entry.score for entry in found]

    columns = ["method"]
    for budget in budgets:
        columns += [f"{budget}: score", f"{budget}: − FullKV", f"{budget}: memory"]
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        if entry.is_reference:
            rows.append((entry.method, *(score_cell(entry), "", memory_cell(entry)) * len(budgets)))
    for method in sorted(methods, key=best, reverse=True):
        line: list[Cell] = [method]
        for budget in budgets:
            line += _at(known.get((method, budget)))
        rows.append(tuple(line))
    how = "By budget, as a share of FullKV's bytes (1024t: tokens per head; native: the authors' own size). "
    how += "score: points, macro over subsets; − FullKV: paired difference with its 95 % interval."
    notes = (how, _MEMORY, _STAR)
    return Table(name, group.title, tuple(columns), tuple(rows), group.setting, (*notes, _BEST))


def by_run(group: Group, name: str, entries: Sequence[Entry], families: Mapping[str, Sequence[str]]) -> Table:
    """All runs against all subsets, with means of families."""
    subsets = subsets_of(entries)
    known = families_of(families, subsets)
    columns = ["method", "budget", "memory", "badge", "n", "score", "− FullKV", "w/t/l", "not at floor: − FullKV"]
    columns += [*(f"{family} ({len(members)})" for family, members in known.items()), *subsets]
    rows = []
    for entry in entries:
        found = entry.found
        counts = f"{found.overall.wins}/{found.overall.ties}/{found.overall.losses}" if found.overall else ""
        above = Number.of(found.above_floor.diff, signed=True) if found.above_floor else ""
        cells: list[Cell] = [entry.method, entry.budget, memory_cell(entry), entry.badge, str(len(entry.good))]
        cells += [score_cell(entry), difference_cell(entry), counts, above]
        cells += [_family(entry, members) for members in known.values()]
        cells += [subset_cell(entry, subset) for subset in subsets]
        rows.append(tuple(cells))
    notes = [
        "score and subsets: points; a family (with its number of subsets) is the mean of its subsets.",
        "w/t/l: examples won, tied and lost against FullKV; not at floor: subsets on which FullKV scores 20 or more.",
        "A subset's *: differs from FullKV by the exact test, Holm over the run's subsets.",
    ]
    return Table(
        name,
        group.title,
        tuple(columns),
        tuple(rows),
        group.setting,
        (*notes, _MEMORY, _BADGES, _STAR, _BEST),
        "every run",
    )


def by_subset(group: Group, name: str, entries: Sequence[Entry]) -> Table:
    """Paired differences from FullKV, subset by subset."""
    subsets = subsets_of(entries)
    rows = []
    for entry in entries:
        if entry.is_reference or entry.overall is None:
            continue
        cells: list[Cell] = [entry.method, entry.budget, str(entry.overall.num_pairs), Number(entry.overall.noise)]
        for subset in subsets:
            found = entry.found.subsets.get(subset)
            mark = "*" * (entry.found.adjusted.get(subset, 1.0) <= ALPHA)
            cells.append(Number.of(found.diff, signed=True, mark=mark) if found else subset_cell(entry, subset))
        rows.append(tuple(cells))
    notes = (
        "Points, paired by example, with 95 % bootstrap intervals; *: exact test, Holm over the run's subsets.",
        "noise: macro differences from FullKV smaller than this do not stand out.",
    )
    head = ("method", "budget", "n", "noise", *subsets)
    return Table(name, group.title, head, tuple(rows), group.setting, notes, "differences from FullKV by subset")


def fidelity(group: Group, name: str, entries: Sequence[Entry]) -> Table | None:
    """How far predictions on the gold text are from FullKV's; None if no run measured it."""
    rows = []
    for entry in entries:
        if not any("gold.kl" in (row.fidelity or {}) for row in entry.good):
            continue
        memory = gold_memory(entry)
        cells: list[Cell] = [entry.method, entry.budget, Missing("") if memory is None else Number(memory, 3)]
        cells.append(str(sum("gold.kl" in (row.fidelity or {}) for row in entry.good)))
        for key, scale, decimals in MEASURES.values():
            found = fidelity_interval(entry.good, key, scale)
            cells.append(Number.of(found, decimals) if found else Missing("not measured"))
        rows.append(tuple(cells))
    if not rows:
        return None
    head = ("method", "budget", "memory", "n", *MEASURES)
    notes = (
        "The gold text fed to both: KL(FullKV || method) in nats of tokens 2 to N, and of token 1; NLL and its change "
        "in nats per token. Macro over subsets, 95 % intervals. memory: mean bytes / FullKV's while the text is read.",
    )
    return Table(name, group.title, head, tuple(rows), group.setting, notes, "predictions beside FullKV's")


def fidelity_interval(rows: Sequence[Row], key: str, scale: float) -> Interval | None:
    strata: dict[str, list[Row]] = {}
    for row in rows:
        if key in (row.fidelity or {}):
            strata.setdefault(row.subset, []).append(row)
    if not strata:
        return None
    values = [[scale * (row.fidelity or {})[key] for row in members] for members in strata.values()]
    return macro_interval(values, [[row.group for row in members] for members in strata.values()], resamples=2000)


def gold_memory(entry: Entry) -> float | None:
    """Mean share of FullKV's bytes while the gold text is read; of an older row, while its answer was made."""
    rows = [row for row in entry.good if row.fidelity]
    if not rows:
        return None
    return fmean((row.fidelity or {}).get("gold.memory", (row.fractions or {})["mean"]) for row in rows)


def subset_cell(entry: Entry, subset: str) -> Cell:
    rows = [row for row in entry.rows if row.subset == subset]
    if subset not in entry.by_subset or not entry.run.scored:
        return why(rows)
    return Number(entry.subset_score(subset), mark="*" * (entry.found.adjusted.get(subset, 1.0) <= ALPHA))


def _at(entry: Entry | None) -> list[Cell]:
    """Score, difference and memory at a budget."""
    if entry is None:
        return [NOT_RUN, Missing(""), Missing("")]
    if entry.score is not None and not entry.published and not entry.matched:
        return [Missing("unmatched: see every run"), Missing(""), memory_cell(entry)]
    return [score_cell(entry), difference_cell(entry), memory_cell(entry)]


def _family(entry: Entry, members: Sequence[str]) -> Cell:
    """The mean of the family's subsets, if the run has them all."""
    if missing := [subset for subset in members if subset not in entry.by_subset]:
        shown = why([row for row in entry.rows if row.subset == missing[0]])
        return Missing(shown.reason if len(missing) == len(members) else f"{', '.join(missing[:NAMED])} {shown.reason}")
    return Number(fmean(entry.subset_score(subset) for subset in members))
