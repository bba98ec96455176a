"""Rows of a run and of its reference, condensed to the figures of summary.json and of the closing table.

Scores are points (0 - 100). Fractions are shares of FullKV's bytes at the same step. Only `ok` rows count; a difference
is paired, so it uses the examples that are ok in both runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from qevict_bench.alarms import Alarm, alarms_of
from qevict_bench.comparison import Comparison, Pair, compare, pair, points
from qevict_bench.rows import Row
from qevict_bench.statistics import Interval, bootstrap

_OF_ANSWERS = ("identical", "empty", "length")
"""Alarms that say nothing where answers are not judged."""


@dataclass(frozen=True)
class Memory:
    """Means over examples: shares of FullKV's bytes at the same step, but `workspace` and `host` in bytes.

    allowed, after_prefill, peak, mean, final cover the compressible layers; whole_cache adds the sliding ones (on both
    sides). prefill_peak is the most the cache held while the prompt was read, against FullKV's after the prompt.
    workspace: dequantized working copies; host: exact copies outside the device. allowed is None if unbounded.
    """

    allowed: float | None
    after_prefill: float
    peak: float
    mean: float
    final: float
    whole_cache: float
    prefill_peak: float
    workspace: float
    host: float


@dataclass(frozen=True)
class Timings:
    """Means in seconds per example; `slowdown` = the method's total / the reference's on the same examples."""

    ttft_s: float
    decode_s: float
    reference_s: float
    slowdown: float


@dataclass(frozen=True)
class Facts:
    """What the rows do not say. `num_layers` of which `compressible_layers` count for the budget."""

    num_layers: int
    compressible_layers: int
    small_model: bool
    reference: str
    reference_id: str
    limit: int
    available: Mapping[str, int]
    """Examples a subset has, for subsets with fewer than `limit`."""


@dataclass(frozen=True)
class Summary:
    """What summary.json holds. Figures that need an ok example are None (null) while there is none.

    `scored` is False for a task without any metric of answers: its rows' score of 0 stands for nothing, so all that
    comes of scores is left out, and `fidelity` is the result. `scores` and `macro` are the method's over its own ok
    examples; `subsets`, `adjusted`, `overall` and `above_floor` are paired, as in comparison.Comparisons. `events` and
    moves are means per example. `matched`: every example's mean bytes come as close to its allowance as the engine
    asks; `achieved` is the mean share of FullKV's bytes. `problem` is the first error or infeasibility.
    """

    run_id: str
    model: str
    dtype: str
    device: str
    method: str
    variant: str
    task: str
    protocol: str
    first_token: str
    prompt_source: str
    budget: str
    basis: str
    enforce: str
    seed: int
    split: str
    batch_size: int
    facts: Facts
    num_examples: int
    num_errors: int
    num_infeasible: int
    problem: str
    scored: bool
    scores: Mapping[str, float]
    macro: float | None
    subsets: Mapping[str, Comparison]
    adjusted: Mapping[str, float]
    overall: Comparison | None
    above_floor: Comparison | None
    memory: Memory | None
    bytes: Mapping[str, float]
    matched: bool
    achieved: float | None
    events: float
    promotions: float
    demotions: float
    evictions: float
    needle_fate: Mapping[str, float]
    fidelity: Mapping[str, Interval]
    timings: Timings | None
    alarms: tuple[Alarm, ...]

    @property
    def all_infeasible(self) -> bool:
        """The budget admitted no setting for any example: there is nothing to report but that."""
        return self.num_infeasible > 0 and not self.num_examples and not self.num_errors

    def to_json(self) -> dict[str, Any]:
        """With the overall comparison's reference and difference also as `reference_macro` and `diff`, and with the
        alarms' texts."""
        overall = self.overall
        short = {"reference_macro": overall and overall.reference, "diff": overall and asdict(overall.diff)}
        return asdict(self) | short | {"alarms": [asdict(alarm) | {"text": alarm.text} for alarm in self.alarms]}


def summarize(rows: Sequence[Row], reference_rows: Sequence[Row], facts: Facts) -> Summary:
    """Condense the rows of one run (at least one; pass them in the order of the task's subsets)."""
    first = rows[0]
    good = [row for row in rows if row.status == "ok"]
    bad = [row for row in rows if row.status != "ok"]
    scored = not good or any(row.metrics for row in good)
    pairs = pair(rows, reference_rows)
    all_pairs = [both for members in pairs.values() for both in members]
    found = compare(pairs if scored else {})
    subsets = dict.fromkeys(row.subset for row in good) if scored else {}
    scores = {name: fmean(points(row) for row in good if row.subset == name) for name in subsets}
    alarms = alarms_of(rows, reference_rows, found, all_pairs)
    memory = _memory(good) if good else None
    return Summary(
        run_id=first.run_id,
        model=first.model,
        dtype=first.dtype,
        device=first.device,
        method=first.method,
        variant=first.variant,
        task=first.task,
        protocol=first.protocol_words,
        first_token=first.first_token,
        prompt_source=first.prompt_source,
        budget=first.budget,
        basis=first.basis,
        enforce=first.enforce,
        seed=first.seed,
        split=first.split,
        batch_size=first.batch_size,
        facts=facts,
        num_examples=len(good),
        num_errors=sum(row.status == "error" for row in bad),
        num_infeasible=sum(row.status == "infeasible" for row in bad),
        problem=bad[0].error if bad else "",
        scored=scored,
        scores=scores,
        macro=fmean(scores.values()) if scores else None,
        subsets=found.subsets,
        adjusted=found.adjusted,
        overall=found.overall,
        above_floor=found.above_floor,
        memory=memory,
        bytes=_means(good, lambda row: row.bytes),
        matched=bool(good) and all(row.matched for row in good),
        achieved=memory.mean if memory else None,
        events=_mean(good, lambda row: row.events),
        promotions=_mean(good, lambda row: row.promotions),
        demotions=_mean(good, lambda row: row.demotions),
        evictions=_mean(good, lambda row: row.evictions),
        needle_fate=_means(good, lambda row: row.needle_fate),
        fidelity=_fidelity(good),
        timings=_timings(all_pairs),
        alarms=tuple(alarm for alarm in alarms if scored or alarm.kind not in _OF_ANSWERS),
    )


def _mean(rows: Sequence[Row], value: Callable[[Row], float]) -> float:
    return fmean(value(row) for row in rows) if rows else 0.0


def _means(rows: Sequence[Row], values: Callable[[Row], Mapping[str, float] | None]) -> dict[str, float]:
    """Mean per key over the rows that have any keys; a key that a row lacks counts as 0 there."""
    found = [mapping for row in rows if (mapping := values(row))]
    names = dict.fromkeys(name for mapping in found for name in mapping)
    return {name: fmean(mapping.get(name, 0.0) for mapping in found) for name in names}


def _fidelity(rows: Sequence[Row]) -> dict[str, Interval]:
    """Means over the examples that have the figure, by name as in fidelity.measure; examples of a group together."""
    found = [row for row in rows if row.fidelity]
    names = dict.fromkeys(name for row in found for name in row.fidelity or ())
    values = {
        name: [(row.fidelity[name], row.group) for row in found if row.fidelity and name in row.fidelity]
        for name in names
    }
    return {
        name: bootstrap([x for x, _ in pairs], [g or str(i) for i, (_, g) in enumerate(pairs)]).interval()
        for name, pairs in values.items()
    }


def _memory(rows: Sequence[Row]) -> Memory:
    fractions, sizes = _means(rows, lambda row: row.fractions), _means(rows, lambda row: row.bytes)
    return Memory(
        allowed=fractions.get("allowed"),
        after_prefill=fractions["after_prefill"],
        peak=fractions["peak"],
        mean=fractions["mean"],
        final=fractions["final"],
        whole_cache=fractions["whole_cache"],
        prefill_peak=fractions["prefill_peak"],
        workspace=sizes["workspace"],
        host=sizes["host"],
    )


def _timings(pairs: Sequence[Pair]) -> Timings | None:
    if not pairs:
        return None
    ttft_s, decode_s = fmean(row.ttft_s for row, _ in pairs), fmean(row.decode_s for row, _ in pairs)
    reference_s = fmean(reference.ttft_s + reference.decode_s for _, reference in pairs)
    return Timings(ttft_s, decode_s, reference_s, (ttft_s + decode_s) / reference_s if reference_s else 1.0)
