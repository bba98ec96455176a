"""From one stream's record to numbers with a name, to curves, and to means with intervals over streams.

Scalars, by key (shares are of 1, moves are summed over layers and table heads; {who} is deployed, by_score or
by_next_mass, {span} 1, 2, 4 or 8):
k_full, k_quantized        units per layer and table head, mean over events
protected, fraction        bytes of full-precision units that do not compete / bytes allowed; bytes held / FullKV's
fmm.mean, fmm.end          future missed mass: mean over events, and at the last event that steps follow
fmm.lost.mean, fmm.lost.end                  with what is quantized counted as lost too
fmm.hindsight.mean, regret.mean, regret.end  FMM of hindsight eviction, and the distance to it
missed, missed.oracle      mean over decoded steps; the oracle evicts as much by that very step's attention
mass.*, mass_no_sinks.*    shares of attention by kind, mean over decoded steps; exact is full and recent together
churn.held, churn.full     of Full + Quantized, and of Full
lir.{who}.{span}[.strict]  LIR; spells.{who}.{span}[.strict] how many spells it is a share of
agreement.{mode}.{of}.{metric}   mode deployed or codec, of measured, uniform or shuffled
score.prefill_share        share of the windows' scores at the last event that the prompt's queries gave (decay 1)
score.tokens_to_promote    decoded tokens after which the median quantized unit, at the rate at which it has collected
                           scores, reaches the lowest Full score as it stands; median over layers and table heads
kl, same_token             of decoded steps
output_error               mean over decoded steps and layers
moves.*, first.*           promotions, demotions, evictions per later event, and at the first
ledger.bytes, ledger.share, ledger.peak      codes of promoted units: mean; share of bytes held, mean and highest
needle.{when}.{tier}       when after_prefill, before_answer or end

nan stands for what is undefined; a mean over streams leaves such streams out and counts the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from math import isnan, nan
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from qevict_bench.agreement import ScoreAgreement, score_agreement
from qevict_bench.diagnostics import (
    SHARES,
    History,
    churn,
    fmm,
    hindsight_fmm,
    lir,
    moves,
    needle_fate,
    oracle_by_next_mass,
    oracle_by_score,
    without_sinks,
)
from qevict_bench.record import Record
from qevict_bench.statistics import Interval, bootstrap

SPANS = (1, 2, 4, 8)
WHO = ("deployed", "by_score", "by_next_mass")
MOVES = ("promotions", "demotions", "evictions")


class Curve(NamedTuple):
    """Columns of numbers over `at`: tokens after the prefill, or layers. One value per column and point."""

    axis: str
    at: tuple[int, ...]
    columns: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Measured:
    """One stream under one method: scalars by key, and curves by name (fmm, moves, bytes, attention, predictions,
    output_error)."""

    stream: str
    scalars: Mapping[str, float]
    curves: Mapping[str, Curve]


class Spread(NamedTuple):
    """A mean over streams with its interval, and how many streams it is of; nan of none."""

    value: float
    low: float
    high: float
    num: int


class Answer(NamedTuple):
    """Where the answer to a needle's question lies, and after how many events the first answer token is read."""

    positions: tuple[int, ...]
    event: int


def measure(record: Record, answer: Answer, seed: int) -> Measured:
    """Everything of one stream. Without positions of an answer there is no needle fate; `seed` shuffles scores."""
    return Measured(record.name, scalars(record, answer, seed), curves(record))


def scalars(record: Record, answer: Answer, seed: int) -> dict[str, float]:
    """The scalars of one stream, in the order of the list above."""
    history, decoded_S = record.history, record.decoded_S
    share_S5, num_events = record.shares_S5.double()[decoded_S], len(history.steps_K)
    found = {
        "k_full": _mean(history.k_full_KLT),
        "k_quantized": _mean(history.k_quantized_KLT),
        "protected": _average(size.protected / size.allowed for size in record.sizes),
        "fraction": record.fraction,
    }
    kept, lost, least = fmm(history), fmm(history, quantized_lost=True), hindsight_fmm(history)
    for name, curve_K in (("fmm", kept), ("fmm.lost", lost), ("fmm.hindsight", least), ("regret", kept - least)):
        known_K = curve_K[~curve_K.isnan()]
        found[f"{name}.mean"] = _mean(known_K)
        found[f"{name}.end"] = float(known_K[-1]) if len(known_K) else nan
    found |= {"missed": _mean(record.missed_S[decoded_S]), "missed.oracle": _mean(record.oracle_missed_S[decoded_S])}
    mass_5 = share_S5.mean(0) if len(share_S5) else torch.full((len(SHARES),), nan)
    found |= {f"mass.{name}": float(share) for name, share in zip(SHARES, mass_5, strict=True)}
    rest = zip(SHARES[1:], without_sinks(mass_5), strict=True)
    found |= {f"mass_no_sinks.{name}": float(share) for name, share in rest}
    found["mass_no_sinks.exact"] = found["mass_no_sinks.full"] + found["mass_no_sinks.recent"]
    found |= {"churn.held": churn(history).value, "churn.full": churn(history, with_quantized=False).value}
    found |= _lir(record) | _agreements(record, seed) | _scores(record)
    found |= {"kl": _mean(record.kl_S[decoded_S]), "same_token": _mean(record.same_S[decoded_S])}
    found["output_error"] = _mean(record.output_error_SL[decoded_S])
    made = moves(history)
    for name, move_K in zip(MOVES, made, strict=True):
        found[f"moves.{name}"] = _mean(move_K[1:])
        found[f"first.{name}"] = float(move_K[0])
    ledger = [size.ledger / size.total for size in record.sizes]
    found["ledger.bytes"] = _average(size.ledger for size in record.sizes)
    found |= {"ledger.share": _average(ledger), "ledger.peak": max(ledger)}
    if answer.positions:
        at = torch.tensor(answer.positions)
        for when, event in (("after_prefill", 0), ("before_answer", answer.event), ("end", num_events - 1)):
            found |= {f"needle.{when}.{tier}": part for tier, part in needle_fate(history, at, event).items()}
    return found


def _lir(record: Record) -> dict[str, float]:
    history, found = record.history, dict[str, float]()
    full = (history.full_KLTU, oracle_by_score(history, record.prefill_LHU), oracle_by_next_mass(history))
    for who, full_KLTU in zip(WHO, full, strict=True):
        for suffix, strict in (("", False), (".strict", True)):
            for span in SPANS:
                spells = lir(full_KLTU, history.candidate_KU[: len(full_KLTU)], span, strict)
                found[f"lir.{who}.{span}{suffix}"] = spells.share
                found[f"spells.{who}.{span}{suffix}"] = float(spells.total)
    return found


def _agreements(record: Record, seed: int) -> dict[str, float]:
    history, found = record.history, dict[str, float]()
    scores = {"deployed": record.score_KLTU, "codec": record.coded_KLHU}
    if record.coded_KLHU is not None and history.tier_KLTU.shape[2] == 1:
        scores["codec"] = record.coded_KLHU.mean(2, keepdim=True)
    for mode, score_KLTU in scores.items():
        if score_KLTU is not None:
            against = (history.scoped_mass_KLTU, history.quantized_KLTU, history.k_full_KLT)
            found |= _flat(f"agreement.{mode}", score_agreement(score_KLTU, *against, seed))
    return found


def _scores(record: Record) -> dict[str, float]:
    history, first_LTU, last_LTU = record.history, record.score_first_LTU, record.score_last_LTU
    if record.score_KLTU is None or first_LTU is None or last_LTU is None:
        return {}
    full_LTU, low_LTU = history.full_KLTU[-1], history.quantized_KLTU[-1]
    held_LTU = full_LTU | low_LTU
    share = float(first_LTU.nan_to_num()[held_LTU].sum() / last_LTU[held_LTU].sum())
    steps_KLTU = history.steps_K[:, None, None, None] * ~record.score_KLTU.isnan()
    rate_LTU = record.score_KLTU.nan_to_num().sum(0) / steps_KLTU.sum(0)
    waits = []
    for full_U, low_U, last_U, rate_U in zip(
        *(x.flatten(0, 1) for x in (full_LTU, low_LTU, last_LTU, rate_LTU)), strict=True
    ):
        if bool(full_U.any()) and bool(low_U.any()):
            gap = last_U[full_U].min() - last_U[low_U].median()
            waits.append(float(gap / rate_U[low_U].nanmedian()))
    undecayed = getattr(record.policy, "decay", 1.0) == 1
    return {
        "score.prefill_share": share if undecayed else nan,
        "score.tokens_to_promote": median(waits) if waits else nan,
    }


def _flat(name: str, agreement: ScoreAgreement) -> dict[str, float]:
    return {
        f"{name}.{of.name}.{metric.name}": getattr(getattr(agreement, of.name), metric.name).value
        for of in fields(agreement)
        for metric in fields(agreement.measured)
    }


def curves(record: Record) -> dict[str, Curve]:
    """Per event: fmm, moves, bytes. Per step: attention, predictions. Per layer: output_error.

    An event stands at the tokens read before it, a step at the number of its token (1, 2, ...).
    """
    history = record.history
    events = tuple((history.seq_len_K - history.seq_len_K[0]).tolist())
    steps = tuple(range(1, len(record.decoded_S) + 1))
    kept, least = fmm(history), hindsight_fmm(history)
    by_event = {
        "fmm": {"evicted": kept, "evicted_or_quantized": fmm(history, quantized_lost=True), "hindsight": least}
        | {"regret": kept - least},
        "moves": dict(zip(MOVES, moves(history), strict=True))
        | {"k_full": _per_event(history.k_full_KLT), "k_quantized": _per_event(history.k_quantized_KLT)},
        "bytes": {
            name: torch.tensor([getattr(size, name) for size in record.sizes]) for name in record.sizes[0]._fields
        },
    }
    by_step = {
        "attention": {name: record.shares_S5[:, i] for i, name in enumerate(SHARES)}
        | {"evicted_by_oracle": record.oracle_missed_S},
        "predictions": {"kl": record.kl_S, "same_token": record.same_S},
    }
    error_L = record.output_error_SL[record.decoded_S].double().mean(0)
    return {
        **{name: Curve("tokens", events, _columns(columns)) for name, columns in by_event.items()},
        **{name: Curve("tokens", steps, _columns(columns)) for name, columns in by_step.items()},
        "output_error": Curve("layer", tuple(range(len(error_L))), _columns({"error": error_L})),
    }


def busiest(history: History) -> tuple[int, int]:
    """Layer (counted among the compressible ones) and table head in which tiers change most often after event 0.

    Only units that competed before the change count; ties go to the earlier layer, then head.
    """
    change_LT = (history.tier_KLTU[1:] != history.tier_KLTU[:-1]) & history.competing_KLTU[:-1]
    num_LT = change_LT.sum((0, 3))
    layer, head = divmod(int(num_LT.flatten().argmax()), num_LT.shape[1])
    return layer, head


# ---- over streams ----


def spread(values: Iterable[float]) -> Spread:
    """The mean of one value per stream, those that are nan left out, with its bootstrap interval over streams."""
    known = [value for value in values if not isnan(value)]
    if not known:
        return Spread(nan, nan, nan, 0)
    found: Interval = bootstrap(known).interval()
    return Spread(found.value, found.low, found.high, len(known))


def spreads(streams: Sequence[Measured]) -> dict[str, Spread]:
    """Every scalar over the streams of one run."""
    keys = dict.fromkeys(key for each in streams for key in each.scalars)
    return {key: spread(each.scalars.get(key, nan) for each in streams) for key in keys}


def differences(runs: Mapping[str, Sequence[Measured]], key: str) -> dict[tuple[str, str], Spread]:
    """The scalar of the second run of every pair minus that of the first, on the same streams."""
    value = {name: {each.stream: each.scalars.get(key, nan) for each in streams} for name, streams in runs.items()}
    return {
        (first, second): spread(x - value[first].get(stream, nan) for stream, x in value[second].items())
        for first, second in combinations(value, 2)
    }


def mean_curve(
    streams: Sequence[Measured], of: Callable[[Measured], tuple[Sequence[int], Sequence[float]]]
) -> tuple[list[int], list[Spread]]:
    """A curve over the streams of one run: points where a stream has a value, and the mean of those that have one."""
    values: dict[int, list[float]] = {}
    for each in streams:
        for at, value in zip(*of(each), strict=True):
            if not isnan(value):
                values.setdefault(at, []).append(value)
    points = sorted(values)
    return points, [spread(values[at]) for at in points]


def _columns(columns: Mapping[str, Tensor]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(column.double().tolist()) for name, column in columns.items()}


def _per_event(num_KLT: Tensor) -> Tensor:
    return num_KLT.flatten(1).double().mean(1)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else nan


def _average(values: Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each)
