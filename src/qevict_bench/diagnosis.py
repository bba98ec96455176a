"""A diagnosis: the same streams under several methods, each measured beside FullKV, and the tables that are written."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from qevict_bench.attention import register
from qevict_bench.budget import Budget, BudgetExceeded, Infeasible
from qevict_bench.diagnosis_figures import Observed, residency_of
from qevict_bench.lockstep import Part, Stream, observe_streams, protected_by
from qevict_bench.measures import Answer, Measured, Spread, measure
from qevict_bench.models import LoadedModel, ModelSpec
from qevict_bench.oscillation import Oscillating
from qevict_bench.policy import KVPolicy
from qevict_bench.reference import full_kv_continuation
from qevict_bench.results import RunFailed
from qevict_bench.session import geometry_of
from qevict_bench.streams import looping

_DIGITS = 9  # significant ones in a csv


class Text(NamedTuple):
    """What is read before the continuation: ids to prefill, ids of a question to append, where its answer lies."""

    name: str
    prefill: tuple[int, ...]
    question: tuple[int, ...] = ()
    answer_positions: tuple[int, ...] = ()

    @property
    def answer(self) -> Answer:
        return Answer(self.answer_positions, int(bool(self.question)))


class Run(NamedTuple):
    """One method on the streams. `oscillates`: its tiers, under the scores of oscillation.py. `low_hidden`: nothing
    attends to its quantized tier.
    """

    policy: KVPolicy
    oscillates: bool = False
    low_hidden: bool = False


@dataclass(frozen=True)
class Plan:
    """What every run shares. `batch_size` streams are read side by side."""

    model: ModelSpec
    budget: Budget
    texts: Sequence[Text]
    streams: Sequence[Stream]
    codec_scores: bool
    batch_size: int
    seed: int


def continued(loaded: LoadedModel, texts: Sequence[Text], num_tokens: int, batch_size: int) -> list[Stream]:
    """The texts, each followed by FullKV's greedy continuation of it. Raises ValueError for one name twice."""
    if len({text.name for text in texts}) < len(texts):
        raise ValueError(f"streams have the same names: {', '.join(text.name for text in texts)}")
    streams = []
    for begin in range(0, len(texts), batch_size):
        some = texts[begin : begin + batch_size]
        prompts = [text.prefill + text.question for text in some]
        for text, ids in zip(some, full_kv_continuation(loaded, prompts, num_tokens), strict=True):
            question = (Part(text.question, decoded=False),) if text.question else ()
            streams.append(Stream(text.name, (Part(text.prefill, decoded=False), *question, Part(ids, decoded=True))))
    return streams


def loops(stream: Stream) -> bool:
    """Whether FullKV's continuation repeats itself (streams.looping)."""
    return looping(stream.parts[-1].ids)


def observe_all(
    plan: Plan, loaded: LoadedModel, runs: Mapping[str, Run], workers: int
) -> Iterator[tuple[str, Observed]]:
    """Every run by name, in order, as it is done. With several workers, runs are spread over as many processes, each
    with a copy of the model and its share of the cores; the numbers are the same.

    Raises ValueError for what a method does not admit, RunFailed if a step goes over its budget.
    """
    if min(workers, len(runs)) == 1:
        yield from ((name, observe(plan, loaded, run)) for name, run in runs.items())
        return
    threads = max(1, (os.cpu_count() or 1) // workers)
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        waiting = {name: pool.submit(_observe_apart, plan, run) for name, run in runs.items()}
        try:
            yield from ((name, each.result()) for name, each in waiting.items())
        finally:
            pool.shutdown(cancel_futures=True)


def _observe_apart(plan: Plan, run: Run) -> Observed:
    return observe(plan, plan.model.load(register()), run)


def observe(plan: Plan, loaded: LoadedModel, run: Run) -> Observed:
    """One run over all streams; of the oscillating workload the first is enough, since it looks at no text."""
    measured, residencies = list[Measured](), list[Observed]()
    num, policy = len(plan.streams), run.policy
    try:
        if run.oscillates:
            first, num = plan.streams[0], 1
            fitted = policy.fit(plan.budget, geometry_of(loaded), first.prompt_len, first.later)
            policy = Oscillating(fitted, *protected_by(fitted))
        for begin in range(0, num, plan.batch_size):
            part = slice(begin, min(begin + plan.batch_size, num))
            records = observe_streams(
                loaded,
                policy,
                plan.budget,
                plan.streams[part],
                seed=plan.seed,
                coded_scores=plan.codec_scores,
                low_hidden=run.low_hidden,
            )
            measured += [
                measure(record, text.answer, plan.seed) for record, text in zip(records, plan.texts[part], strict=True)
            ]
            residencies = residencies or [Observed(measured, residency_of(records[0].history))]
    except Infeasible as error:
        raise ValueError(str(error)) from error
    except BudgetExceeded as error:
        raise RunFailed(str(error)) from error
    return residencies[0]


# ---- tables ----


def layer_errors(streams: Sequence[Measured]) -> list[float]:
    """Mean output error over streams, per compressible layer."""
    each = [measured.curves["output_error"].columns["error"] for measured in streams]
    return [fmean(layer) for layer in zip(*each, strict=True)]


def write_tables(
    folder: Path,
    runs: Mapping[str, Observed],
    looped: Mapping[str, bool],
    table: Mapping[str, Mapping[str, Spread]],
) -> list[Path]:
    """scalars.csv, summary.csv and one csv per family of curves; the paths. Values have nine significant digits."""
    every = [(name, measured) for name, run in runs.items() for measured in run.streams]
    keys = list(dict.fromkeys(key for _, measured in every for key in measured.scalars))
    scalars = (
        [name, each.stream, int(looped[each.stream]), *(each.scalars.get(key, float("nan")) for key in keys)]
        for name, each in every
    )
    means = ([name, key, *spread] for name, row in table.items() for key, spread in row.items())
    written = [
        _write(folder / "scalars.csv", ["run", "stream", "looping", *keys], scalars),
        _write(folder / "summary.csv", ["run", "scalar", "mean", "low", "high", "streams"], means),
    ]
    for curve, first in every[0][1].curves.items():
        rows = (
            [name, each.stream, at, *values]
            for name, each in every
            for at, *values in zip(each.curves[curve].at, *each.curves[curve].columns.values(), strict=True)
        )
        written.append(_write(folder / f"{curve}.csv", ["run", "stream", first.axis, *first.columns], rows))
    return written


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(header)
        writer.writerows([_cell(value) for value in row] for row in rows)
    return path


def _cell(value: object) -> object:
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else value
