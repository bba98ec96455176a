"""Carrying out runs: examples in, rows out. Knows neither configuration files nor a method or task by name.

Examples run in fixed blocks of `batch_size` consecutive ones of a subset, so neither `limit` nor what is already done
changes with whom an example shares its batch. A block that `limit` cuts runs whole; the extra rows are kept for later.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from qevict_bench.budget import Budget, BudgetExceeded, Geometry, Infeasible
from qevict_bench.environment import Environment
from qevict_bench.policy import KVPolicy
from qevict_bench.results import Damaged, Row, RunFailed, RunFolder, known_sizes
from qevict_bench.settings import Settings, naming
from qevict_bench.task import Example, Prompt, Prompter, Task

if TYPE_CHECKING:
    from qevict_bench.engine import Generation
    from qevict_bench.models import LoadedModel

Generate = Callable[..., Sequence["Generation"]]
"""Signature of engine.generate."""
Counting = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Signature of progress.counting."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One run: a method under a budget. `row` holds what all its rows share; `config` is the text of config.yaml."""

    policy: KVPolicy
    budget: Budget
    row: Row
    config: str
    environment: Environment

    @property
    def run_id(self) -> str:
        return self.row.run_id


@dataclass(frozen=True)
class Engine:
    """The functions of the engine that runs call: engine.generate, session.geometry_of. Tests put in others."""

    generate: Generate
    geometry_of: Callable[[LoadedModel], Geometry]


class Bench:
    """A model and a task, ready to complete runs; the model is loaded when the first example needs it."""

    def __init__(self, settings: Settings, task: Task, spec: Any, engine: Engine | None):
        self._settings, self._task, self._spec, self._custom_engine = settings, task, spec, engine

    @cached_property
    def _engine(self) -> Engine:
        if self._custom_engine is not None:
            return self._custom_engine
        from qevict_bench.engine import generate  # seconds of imports that a finished run does not need
        from qevict_bench.session import geometry_of

        return Engine(generate, geometry_of)

    @cached_property
    def _loaded(self) -> LoadedModel:
        attention = {}
        if self._custom_engine is None:
            from qevict_bench.attention import register

            attention = {"attn_implementation": register()}
        loaded: LoadedModel = self._spec.load(**attention)
        return loaded

    @cached_property
    def _geometry(self) -> Geometry:
        return self._engine.geometry_of(self._loaded)

    def selected(self, folder: RunFolder) -> list[Row]:
        """The rows that count for this command: the first `limit` of each subset, in order."""
        order = {name: position for position, name in enumerate(self._task.subsets)}
        if not folder.rows:
            raise RunFailed(f"{self._task.name} yields no examples for limit={self._settings.limit}")
        if strangers := {row.subset for row in folder.rows.values()} - order.keys():
            raise Damaged(
                f"{folder.path / 'rows.jsonl'} is damaged ({min(strangers)} is no subset of the task); delete those "
                "lines, or start over with resume=restart"
            )
        rows = [row for row in folder.rows.values() if row.index < self._settings.limit]
        return sorted(rows, key=lambda row: (order[row.subset], row.index))

    def complete(self, job: Job, folder: RunFolder, counting: Counting) -> dict[str, int]:
        """Run the examples that have no row yet; returns the size of subsets with fewer than `limit` examples."""
        limit = self._settings.limit
        folder.want(limit, self._task.subsets)
        available = known_sizes(folder.path / "summary.json")
        wanted = {(name, i) for name in self._task.subsets for i in range(min(limit, available.get(name, limit)))}
        missing = wanted - {(row.subset, row.index) for row in folder.rows.values() if row.done}
        if not missing:
            return available
        label = f"{job.row.method} {job.run_id}"
        log.info("%s: %d of %d examples to run", label, len(missing), len(wanted))
        prompter = Prompter(self._loaded.tokenizer, self._loaded.chat)
        seen = dict.fromkeys(self._task.subsets, 0)
        problems: Counter[str] = Counter()
        with counting(label, len(missing)) as advance:
            for start, block in self._blocks(prompter):
                subset = block[0].subset
                seen[subset] = start + len(block)
                todo = missing & {(subset, start + offset) for offset in range(len(block))}
                if todo:
                    for row in self._run_block(job, folder, prompter, start, block):
                        if row.status != "ok" and not problems[row.status]:  # the rows have all of them
                            log.warning("%s %s: %s", row.example_id, row.status, row.error)
                        problems[row.status] += 1
                    advance(len(todo))
        for status in ("error", "infeasible"):
            if problems[status] > 1:
                log.warning("%s: %d examples have status %s; their rows say why", label, problems[status], status)
        return available | {name: count for name, count in seen.items() if count < limit}

    def _blocks(self, prompter: Prompter) -> Iterator[tuple[int, list[Example]]]:
        """Blocks with the index of their first example in its subset."""
        size = self._settings.batch_size
        whole_blocks = -(-self._settings.limit // size) * size
        with naming(type(self._task), "task."):
            examples = self._task.examples(prompter, whole_blocks, self._settings.seed, self._settings.split)
            for _, members in groupby(examples, key=lambda example: example.subset):
                indexed = enumerate(members)
                for number, group in groupby(indexed, key=lambda pair: pair[0] // size):
                    yield number * size, [example for _, example in group]

    def _run_block(
        self, job: Job, folder: RunFolder, prompter: Prompter, start: int, block: list[Example]
    ) -> Iterator[Row]:
        """Generate for a whole block and append the rows that are missing, also when it ends with RunFailed.

        What is wrong with one prompt or answer marks that example; an exception of the engine marks all whom it ran
        together.
        """
        rows, ready, exceeded = [], [], ""
        for offset, example in enumerate(block):
            row, prompt = self._prepare(job, prompter, start + offset, example)
            if prompt is None:
                rows.append(row)
            else:
                ready.append((row, example, prompt))
        for max_new_tokens, group in groupby(ready, key=lambda item: item[1].max_new_tokens):
            members = list(group)
            try:
                generations = self._engine.generate(
                    self._loaded,
                    job.policy,
                    job.budget,
                    [prompt for _, _, prompt in members],
                    max_new_tokens=max_new_tokens,
                    stop=self._task.stop,
                    first_token=self._settings.first_token,
                    seed=self._settings.seed,
                    example_ids=[example.id for _, example, _ in members],
                )
            except Exception as error:  # the run goes on without these examples
                whom = f" (batch {members[0][1].id} .. {members[-1][1].id})" if len(members) > 1 else ""
                rows += [_problem(row, error, whom) for row, _, _ in members]
                if isinstance(error, BudgetExceeded):
                    exceeded = rows[-1].error
                    break
            else:
                found = zip(members, generations, strict=True)
                rows += [self._answer(row, example, generation) for (row, example, _), generation in found]
        for row in sorted(rows, key=lambda row: row.index):
            known = folder.rows.get(row.example_id)
            if known is None or not known.done:
                folder.append(row)
                yield row
        if exceeded:
            raise RunFailed(exceeded)

    def _prepare(self, job: Job, prompter: Prompter, index: int, example: Example) -> tuple[Row, Prompt | None]:
        """The labelled row of an example, and its prompt; without one the row is final and says why it cannot run."""
        row = replace(
            job.row,
            subset=example.subset,
            example_id=example.id,
            index=index,
            group=example.group,
            data_source=example.data_source,
            answers=example.answers,
        )
        try:
            prompt = prompter.encode(example)
            num_tokens, nominal = len(prompt.ids), self._task.nominal_length
            total = num_tokens + example.max_new_tokens
            row = replace(
                row,
                prompt_tokens=num_tokens,
                truncated_tokens=prompt.truncated_tokens,
                overflow_tokens=max(0, total - nominal) if nominal else 0,
            )
            if total > self._loaded.max_context:
                raise Infeasible(
                    f"{example.id} needs {total} tokens ({num_tokens} + {example.max_new_tokens} new ones), more than "
                    f"the context of {self._loaded.name} ({self._loaded.max_context}); give a smaller "
                    "task.context_length, or a model with a longer context"
                )
            if num_tokens < 2:
                raise ValueError(f"its prompt has {num_tokens} tokens; at least 2 are needed")
            before = num_tokens - (self._settings.first_token == "compressed")
            job.policy.fit(job.budget, self._geometry, before, example.max_new_tokens)
        except Exception as error:  # whatever it is belongs to this example
            return _problem(row, error), None
        return row, prompt

    def _answer(self, row: Row, example: Example, generation: Generation) -> Row:
        row = replace(
            row,
            prediction=generation.text,
            stop=generation.stop,
            new_tokens=len(generation.new_ids),
            bytes=generation.memory,
            fractions=_fractions(generation),
            matched=generation.matched,
            tier_units=generation.tier_units,
            events=generation.events,
            promotions=generation.promotions,
            demotions=generation.demotions,
            evictions=generation.evictions,
            needle_fate=generation.needle_fate,
            knobs=generation.knobs,
            ttft_s=generation.ttft_s,
            decode_s=generation.decode_s,
        )
        try:
            score = self._task.score(generation.text, example)
            metrics = self._task.metrics(generation.text, example)
            if not 0 <= score <= 1 or not all(math.isfinite(value) for value in metrics.values()):
                raise ValueError(f"{self._task.name} scored {score}, {metrics}: a score lies in [0, 1]")
        except Exception as error:
            return _problem(row, error)
        return replace(row, status="ok", score=score, metrics=metrics)


def _problem(row: Row, error: Exception, whom: str = "") -> Row:
    message = " ".join(str(error).split()) + whom
    if isinstance(error, Infeasible):
        return replace(row, status="infeasible", error=message)
    return replace(row, status="error", error=f"{type(error).__name__}: {message}")


def _fractions(generation: Generation) -> dict[str, float]:
    """With the allowance at the last step (absent if nothing bounds it) and the prefill peak against the prompt."""
    memory, shares = generation.memory, dict(generation.fractions)
    if memory["allowed"]:
        shares["allowed"] = memory["allowed"] * shares["final"] / memory["final"]
    shares["prefill_peak"] = memory["prefill_peak"] * shares["after_prefill"] / memory["after_prefill"]
    return shares
