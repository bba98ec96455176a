"""What makes a run's scores doubtful, found in its rows: one line each, with numbers and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from qevict_bench.comparison import CEILING, FLOOR, Comparisons, Pair, shown_p
from qevict_bench.rows import Row
from qevict_bench.statistics import ALPHA

NAMED = 6
"""So many subsets are named in one line; summary.json has all."""
SAME_BYTES = 0.01
"""Caches whose mean bytes differ by less than this share count as equally large."""

_WORDS = {
    "infeasible": ("the budget admits no setting", "left out of all figures; give more budget"),
    "error": ("examples failed", "left out of all figures; issue the command again to retry them"),
    "unpaired": ("examples without an answer of FullKV", "left out of all differences; issue the command again"),
    "unmatched": ("bytes do not match the budget", "compare at the achieved bytes only"),
    "above": (
        "above FullKV beyond noise",
        "losing information cannot help by itself: check prompt, stop strings and scorer first",
    ),
    "identical": (
        "predictions all equal although the bytes differ",
        "check that the method is at work: budget, routing events, needle fate",
    ),
    "empty": ("empty predictions", "read these rows: end-of-text token, stop strings, chat template"),
    "length": (
        "most answers were ended by the length limit",
        "the score counts what was said by then; check stop strings and chat template",
    ),
    "truncated": (
        "prompts were cut",
        "their answers may be gone; take shorter prompts, or a model with a longer context",
    ),
    "overflow": (
        "prompt and answer exceed task.context_length",
        "the data were made for another tokenizer or length: name the real lengths",
    ),
    "floor": (f"FullKV below {FLOOR:.0f}", "says little about a method; take a stronger model or an easier setting"),
    "ceiling": (f"FullKV at {CEILING:.0f} or more", "only losses can show; take longer contexts or a smaller budget"),
}


@dataclass(frozen=True)
class Alarm:
    """`kind` is one of _WORDS; `subset` is empty where the run as a whole is meant; `figures` are the numbers."""

    kind: str
    subset: str
    figures: str

    @property
    def text(self) -> str:
        """The whole line."""
        return _line([self])


def lines(alarms: Iterable[Alarm]) -> list[str]:
    """One line per kind: subsets with the same alarm share it."""
    kinds: dict[str, list[Alarm]] = {}
    for alarm in alarms:
        kinds.setdefault(alarm.kind, []).append(alarm)
    return [_line(members) for members in kinds.values()]


def advice(kind: str) -> str:
    """What a kind of alarm means, and what to do."""
    headline, remedy = _WORDS[kind]
    return f"{headline[:1].upper()}{headline[1:]}: {remedy}."


def alarms_of(
    rows: Sequence[Row], reference_rows: Sequence[Row], found: Comparisons, pairs: Sequence[Pair]
) -> list[Alarm]:
    """All alarms of a run against its reference, worst first; `found` and `pairs` as from `comparison`.

    Of the reference's own run pass the rows twice.
    """
    made = row_alarms(rows, reference_rows)
    answered = {row.example_id for row in reference_rows if row.status == "ok"}
    unpaired = _counts("unpaired", rows, lambda row: row.status == "ok" and row.example_id not in answered)
    alarms = [*made, *unpaired, *above(found), *limits(found), *identical(pairs, "FullKV")]
    return sorted(alarms, key=lambda alarm: list(_WORDS).index(alarm.kind))


def row_alarms(rows: Sequence[Row], reference_rows: Sequence[Row] = ()) -> list[Alarm]:
    """What the rows of one run show; with `reference_rows` the same count of FullKV stands beside some."""
    good = [row for row in rows if row.status == "ok"]
    return [
        *_counts("infeasible", rows, lambda row: row.status == "infeasible"),
        *_counts("error", rows, lambda row: row.status == "error"),
        *_unmatched(good),
        *_counts("empty", good, lambda row: not row.prediction.strip(), reference_rows),
        *_counts("length", good, lambda row: row.stop == "length", reference_rows, least=0.5),
        *_counts("truncated", good, lambda row: row.truncated_tokens > 0, most=lambda row: row.truncated_tokens),
        *_counts("overflow", good, lambda row: row.overflow_tokens > 0, most=lambda row: row.overflow_tokens),
    ]


def above(found: Comparisons) -> list[Alarm]:
    """Scores above the reference's: subsets after Holm (exact test), the macro average by its bootstrap."""
    alarms = [
        Alarm("above", name, f"{comparison.diff.value:+.1f}, p {shown_p(found.adjusted[name])}")
        for name, comparison in found.subsets.items()
        if comparison.diff.value > 0 and found.adjusted[name] <= ALPHA
    ]
    overall = found.overall
    if overall is not None and overall.diff.value > 0 and overall.stands_out(overall.p):
        alarms.append(Alarm("above", "", f"macro {overall.diff.value:+.1f}, p {shown_p(overall.p)}"))
    return alarms


def limits(found: Comparisons) -> list[Alarm]:
    """Subsets on which the reference scores too little or too much to tell methods apart."""
    return [
        Alarm("floor" if comparison.at_floor else "ceiling", name, f"{comparison.reference:.1f}")
        for name, comparison in found.subsets.items()
        if comparison.at_floor or comparison.at_ceiling
    ]


def identical(pairs: Sequence[Pair], other: str) -> list[Alarm]:
    """All predictions of two runs equal on the examples they share, although their mean bytes differ."""
    if not pairs or any(row.prediction != reference.prediction for row, reference in pairs):
        return []
    mine, theirs = (fmean((row.bytes or {}).get("mean", 0.0) for row in side) for side in zip(*pairs, strict=True))
    if abs(mine - theirs) <= SAME_BYTES * max(mine, theirs):
        return []
    share = f"{mine / theirs:.3f} of" if theirs else "other than"
    return [Alarm("identical", "", f"{other}'s on {len(pairs)} of {len(pairs)} examples, bytes {share} its")]


def _counts(
    kind: str,
    rows: Sequence[Row],
    holds: Callable[[Row], bool],
    reference_rows: Sequence[Row] = (),
    *,
    most: Callable[[Row], int] | None = None,
    least: float = 0.0,
) -> list[Alarm]:
    """An alarm per subset in which more than the share `least` of the rows is meant; `most` gives tokens to name."""
    alarms = []
    for subset, members in _by_subset(rows).items():
        hits = [row for row in members if holds(row)]
        if len(hits) <= least * len(members):
            continue
        figures = f"{len(hits)} of {len(members)}"
        if most is not None:
            figures += f" by up to {max(map(most, hits))} tokens"
        reference = [row for row in reference_rows if row.subset == subset and row.status == "ok"]
        if reference and reference[0].run_id != members[0].run_id:
            figures += f", FullKV {sum(map(holds, reference))} of {len(reference)}"
        alarms.append(Alarm(kind, subset, figures))
    return alarms


def _unmatched(good: Sequence[Row]) -> list[Alarm]:
    """Mean bytes of the examples that miss their allowance, as shares of FullKV's."""
    alarms = []
    for subset, members in _by_subset(good).items():
        hits = [row for row in members if not row.matched]
        if hits:
            mean, allowed = (
                fmean((row.fractions or {}).get(name, 0.0) for row in hits) for name in ("mean", "allowed")
            )
            bound = f" of {allowed:.3f} allowed" if allowed else ", nothing bounds them"
            alarms.append(Alarm("unmatched", subset, f"{len(hits)} of {len(members)}, {mean:.3f}{bound}"))
    return alarms


def _by_subset(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.subset, []).append(row)
    return found


def _line(alarms: Sequence[Alarm]) -> str:
    """`kind: headline (where figures; where figures): remedy`, for alarms of one kind."""
    headline, remedy = _WORDS[alarms[0].kind]
    places = [f"{alarm.subset} {alarm.figures}".strip() for alarm in alarms]
    shown = places if len(places) <= NAMED else [*places[: NAMED - 1], f"{len(places) - NAMED + 1} more subsets"]
    return f"{alarms[0].kind}: {headline} ({'; '.join(shown)}): {remedy}."
