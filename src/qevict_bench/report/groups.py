"""Which runs may share a table, what its title says, and how a run is called in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from qevict_bench.closing import PAPER_MODELS, WORDINGS
from qevict_bench.report.commands import shared_command
from qevict_bench.rows import Row
from qevict_bench.runs import (
    PROTOCOL,
    REFERENCE,
    Difference,
    Run,
    data_difference,
    origin_differences,
    setting_differences,
)

ALLOW = ("versions", "code", "device", "dtype", "prompt_source", "protocol")
"""What runs of one table may differ in if it is named."""
_CHANGES_REFERENCE = ("dtype", "prompt_source", "protocol")
_DATA_FIELDS = ("task.source", "task.data_dir", "task.ruler_dir", "task.hub_id")


@dataclass(frozen=True)
class Group:
    """Runs of one table, and what they differ in although a table should not: kind -> values, as allowed."""

    runs: tuple[Run, ...]
    mixed: dict[str, tuple[str, ...]]
    detail: str = ""
    """What tells its title from another table's."""
    remark: str = ""
    """A further line of its setting."""

    @property
    def first(self) -> Row:
        return self.runs[0].first

    @property
    def context_length(self) -> int:
        """Of the task; 0 if it has none."""
        task = self.runs[0].config["task"]
        length = task.get("context_length", 0) if isinstance(task, dict) else 0
        return length if isinstance(length, int) else 0

    @property
    def name(self) -> str:
        """For files; not unique."""
        row = self.first
        parts = [row.task, *[str(self.context_length)] * bool(self.context_length), row.model]
        parts += [row.protocol] if "protocol" not in self.mixed else []
        return re.sub(r"[^A-Za-z0-9]+", "_", "_".join(parts)).strip("_").lower()[:100]

    @property
    def title(self) -> str:
        row = self.first
        wording = WORDINGS.get(row.prompt_source, f" ({row.prompt_source})")
        wording = " (several wordings)" if "prompt_source" in self.mixed else wording
        length = f", {self.context_length:,} tokens" if self.context_length else ""
        protocol = "several protocols" if "protocol" in self.mixed else row.protocol_words
        but = f" NOT THE SAME: {', '.join(self.mixed)}" if self.mixed else ""
        return f"{row.model}: {row.task.upper()}{wording}{length}, {protocol}{self.detail}{'.' * bool(but)}{but}"

    @property
    def count(self) -> str:
        """How many examples a run has."""
        return _count(self.runs)

    @property
    def setting(self) -> tuple[str, ...]:
        """Lines below the title."""
        row = self.first
        dtype = row.dtype if "dtype" not in self.mixed else "several number formats"
        first_token = row.first_token if "protocol" not in self.mixed else "several"
        devices = " and ".join(sorted({run.first.device for run in self.runs}))
        claim = (
            "The paper's model: a reproduction only where context, budget, protocol, prompts and n match too."
            if row.model in PAPER_MODELS
            else "Not one of the paper's models: not a reproduction."
        )
        made = f"{dtype} on {devices}; first_token {first_token}; split {row.split}, seed {row.seed}"
        lines = [f"{self.count}; {made}. {claim}"]
        lines += [
            f"These runs differ in {kind} (allowed by allow={kind}): {'; '.join(values)}."
            for kind, values in self.mixed.items()
        ]
        lines += [self.remark] * bool(self.remark)
        if any(run.environment.git_dirty for run in self.runs):
            lines.append("Some runs were made with uncommitted changes.")
        sizes = sorted({run.first.batch_size for run in self.runs})
        if len(sizes) > 1:
            lines.append(f"Batch sizes {', '.join(map(str, sizes))}: 16-bit arithmetic may answer differently.")
        newest = max(run.written for run in self.runs)
        return (*lines, f"{shared_command(self.runs)} ({commits_of(self.runs)}, newest {newest:%Y-%m-%d})")


def commits_of(runs: Sequence[Run]) -> str:
    """ "commit a" or "commits a, b, c, d and 2 more"."""
    names = sorted({run.environment.git_sha[:9] for run in runs})
    more = f" and {len(names) - 4} more" * (len(names) > 4)
    return f"commit{'s' * (len(names) > 1)} {', '.join(names[:4])}{more}"


def kind_of(name: str) -> str:
    """Which of ALLOW a difference falls under; "" for one that always keeps runs apart."""
    if name in PROTOCOL or name.startswith("protocol."):
        return "protocol"
    if name in ("dtype", "prompt_source", "device"):
        return name
    if name.startswith("code hash"):
        return "code"
    return ""


def differences(first: Run, second: Run) -> list[tuple[str, Difference]]:
    """All that keeps two runs from sharing a table, with its kind."""
    found = [(kind_of(difference[0]), difference) for difference in setting_differences(first, second)]
    found = [each for each in found if each[1][0] != "protocol.name"]  # "protocol" says it
    kinds = {kind for kind, _ in found}
    if "prompt_source" in kinds:  # its data come from elsewhere
        found = [("prompt_source" if d[0] in _DATA_FIELDS else kind, d) for kind, d in found]
    if kinds & {*_CHANGES_REFERENCE}:  # so does its reference
        found = [each for each in found if each[1][0] != REFERENCE]
    return found + [(kind_of(each[0]) or "versions", each) for each in origin_differences(first, second)]


def grouped(runs: Iterable[Run], allow: Sequence[str]) -> list[Group]:
    """Runs that may share a table together, those with most examples first, those of split dev last.

    Raises ValueError for a word in `allow` that is none of ALLOW.
    """
    if unknown := [word for word in allow if word not in ALLOW]:
        raise ValueError(f"allow={unknown[0]} is unknown; choose some of {', '.join(ALLOW)}")
    found: list[list[Run]] = []
    mixed: list[dict[str, dict[str, None]]] = []
    # Of each group a member for all conditions there are, and for every code of a method: the others are like these.
    unlike: list[dict[tuple[str, str], Run]] = []
    for run in runs:
        method = repr(run.config["method"])
        keys = (("", run.conditions), (method, run.environment.code_hash))
        for members, kinds, known in zip(found, mixed, unlike, strict=True):
            others = [other for (what, _), other in known.items() if what in ("", method)]
            between = [each for other in others for each in differences(other, run)]
            if not any(kind == "" for kind, _ in between) and (other := data_difference(members[0].rows, run.rows)):
                between.append(("", other))
            if all(kind in allow for kind, _ in between):
                for kind, (name, mine, theirs) in between:
                    kinds.setdefault(kind, {})[f"{name} {' or '.join(sorted(map(str, (mine, theirs))))}"] = None
                members.append(run)
                for key in keys:
                    known.setdefault(key, run)
                break
        else:
            found.append([run])
            mixed.append({})
            unlike.append(dict.fromkeys(keys, run))
    groups = [
        Group(tuple(members), {kind: tuple(values) for kind, values in kinds.items()})
        for members, kinds in zip(found, mixed, strict=True)
    ]
    return _told_apart(sorted(groups, key=_order))


def _order(group: Group) -> tuple[bool, int, str]:
    return group.first.split != "test", -sum(len(run.good) for run in group.runs), group.name


def _told_apart(groups: Sequence[Group]) -> list[Group]:
    """With what differs in the titles of tables that would have the same."""
    found = list(groups)
    for title in {group.title for group in groups}:
        first, *others = [index for index, group in enumerate(groups) if group.title == title]
        values: dict[int, dict[str, object]] = {index: {} for index in (first, *others)}
        for other in others:
            for name, mine, theirs in _telling(groups[first].runs[0], groups[other].runs[0]):
                values[first][name] = mine
                for index in others:
                    values[index].setdefault(name, mine)
                values[other][name] = theirs
        for index, known in values.items():
            said = "; ".join(f"{name.removeprefix('task.')} {_plain(value)}" for name, value in known.items())
            found[index] = replace(groups[index], detail=f" ({said})" * bool(said))
    return found


def _telling(first: Run, second: Run) -> list[Difference]:
    """Differences to name in a title: settings if there are any, else all."""
    found = differences(first, second)
    settings = [each for kind, each in found if not kind and each[0] != REFERENCE]
    others = [("reference run" if d[0] == REFERENCE else d[0], *d[1:]) for _, d in found]
    return settings or others or [("examples of run", first.first.run_id, second.first.run_id)]


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def apart(groups: Sequence[tuple[str, Group]]) -> list[str]:
    """A line for every two tables, by title, that only what `allow` may name keeps apart."""
    lines = []
    for index, (name, group) in enumerate(groups):
        for other_name, other in groups[index + 1 :]:
            between = differences(group.runs[0], other.runs[0])
            kinds = list(dict.fromkeys(kind for kind, _ in between))
            if all(kinds):
                said = "; ".join(f"{field} {mine} and {theirs}" for _, (field, mine, theirs) in between[:4])
                lines.append(
                    f"{name} and {other_name} are apart by {said}: allow={','.join(kinds)} puts them together."
                )
    return lines


def _count(runs: Sequence[Run]) -> str:
    counts = sorted({len(run.good) for run in runs if run.good})
    if not counts:
        return "no example ok"
    subsets = len({row.subset for run in runs for row in run.rows})
    n = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"n = {n} example{'s' * (n != '1')} in {subsets} subset{'s' * (subsets > 1)}"
