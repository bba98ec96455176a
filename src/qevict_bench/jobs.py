"""Carrying out runs: examples in, rows out. Knows neither configuration files nor a method or task by name.

Examples run in fixed blocks of `batch_size` consecutive ones of a subset, so neither `limit` nor what is already done
changes with whom an example shares its batch. A block that `limit` cuts runs whole; the extra rows are kept for later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from qevict_bench.budget import Budget, BudgetExceeded, Infeasible
from qevict_bench.policy import KVPolicy
from qevict_bench.progress import Progress
from qevict_bench.results import Row, RunFolder
from qevict_bench.settings import Settings
from qevict_bench.task import Example, Prompt, Prompter, Task

if TYPE_CHECKING:
    from qevict_bench.engine import Generation
    from qevict_bench.models import LoadedModel

Generate = Callable[..., Sequence["Generation"]]
"""Signature of engine.generate."""

log = logging.getLogger(__name__)


class RunFailed(RuntimeError):
    """A run has no result; the rows written so far are kept."""


@dataclass(frozen=True)
class Job:
    """One run: a method under a budget. `row` holds what all its rows share; `config` is the text of config.yaml."""

    policy: KVPolicy
    budget: Budget
    row: Row
    config: str

    @property
    def run_id(self) -> str:
        return self.row.run_id


class Bench:
    """A model and a task, ready to complete runs; the model is loaded when the first example needs it."""

    def __init__(self, settings: Settings, task: Task, spec: Any, generate: Generate | None):
        self._settings, self._task, self._spec, self._custom_generate = settings, task, spec, generate
        self._last_problem = ""

    @cached_property
    def _loaded(self) -> LoadedModel:
        attention = {}
        if self._custom_generate is None:
            from qevict_bench.attention import register  # seconds of imports that a finished run does not need

            attention = {"attn_implementation": register()}
        loaded: LoadedModel = self._spec.load(**attention)
        return loaded

    @cached_property
    def _generate(self) -> Generate:
        if self._custom_generate is not None:
            return self._custom_generate
        from qevict_bench.engine import generate

        return generate

    def selected(self, folder: RunFolder) -> list[Row]:
        """The rows that count for this command: the first `limit` of each subset, in order."""
        order = {name: position for position, name in enumerate(self._task.subsets)}
        if not folder.rows:
            raise RunFailed(f"{self._task.name} yields no examples for limit={self._settings.limit}")
        rows = [row for row in folder.rows.values() if row.index < self._settings.limit]
        return sorted(rows, key=lambda row: (order[row.subset], row.index))

    def complete(self, job: Job, folder: RunFolder) -> dict[str, int]:
        """Run the examples that have no row yet; returns the size of subsets with fewer than `limit` examples."""
        limit = self._settings.limit
        available = _known_sizes(folder)
        wanted = {(name, i) for name in self._task.subsets for i in range(min(limit, available.get(name, limit)))}
        missing = wanted - {(row.subset, row.index) for row in folder.rows.values() if row.done}
        if not missing:
            return available
        label = f"{job.row.method} {job.run_id}"
        log.info("%s: %d of %d examples to run", label, len(missing), len(wanted))
        prompter = Prompter(self._loaded.tokenizer, self._loaded.chat)
        seen = dict.fromkeys(self._task.subsets, 0)
        with Progress(label, len(missing)) as progress:
            for start, block in self._blocks(prompter):
                subset = block[0].subset
                seen[subset] = start + len(block)
                todo = missing & {(subset, start + offset) for offset in range(len(block))}
                if todo:
                    self._run_block(job, folder, prompter, start, block)
                    progress.advance(len(todo))
        return available | {name: count for name, count in seen.items() if count < limit}

    def _blocks(self, prompter: Prompter) -> Iterator[tuple[int, list[Example]]]:
        """Blocks with the index of their first example in its subset."""
        size = self._settings.batch_size
        whole_blocks = -(-self._settings.limit // size) * size
        examples = self._task.examples(prompter, whole_blocks, self._settings.seed, self._settings.split)
        for _, members in groupby(examples, key=lambda example: example.subset):
            indexed = enumerate(members)
            for number, group in groupby(indexed, key=lambda pair: pair[0] // size):
                yield number * size, [example for _, example in group]

    def _run_block(self, job: Job, folder: RunFolder, prompter: Prompter, start: int, block: list[Example]) -> None:
        """Generate for a whole block and append the rows that are missing."""
        try:
            prompts = [self._prompt(prompter, example) for example in block]
            rows = self._answers(job, start, block, prompts)
        except Exception as error:  # whatever went wrong belongs to these examples; the run goes on
            status = "infeasible" if isinstance(error, Infeasible) else "error"
            message = " ".join(str(error).split())
            text = message if status == "infeasible" else f"{type(error).__name__}: {message}"
            if text != self._last_problem:  # the rows have all of them
                log.warning("%s %s: %s", block[0].id, status, text)
                self._last_problem = text
            rows = [
                replace(_labelled(job.row, example, start + offset), status=status, error=text)
                for offset, example in enumerate(block)
            ]
            failure = RunFailed(text) if isinstance(error, BudgetExceeded) else None
        else:
            failure = None
        for row in rows:
            known = folder.rows.get(row.example_id)
            if known is None or not known.done:
                folder.append(row)
        if failure:
            raise failure

    def _prompt(self, prompter: Prompter, example: Example) -> Prompt:
        prompt = prompter.encode(example)
        total = len(prompt.ids) + example.max_new_tokens
        if total > self._loaded.max_context:
            raise ValueError(
                f"{example.id} needs {total} tokens, more than the context of {self._loaded.name} "
                f"({self._loaded.max_context}); give a smaller task.context_length, or a model with a longer context"
            )
        return prompt

    def _answers(self, job: Job, start: int, block: list[Example], prompts: list[Prompt]) -> list[Row]:
        generations: dict[str, Generation] = {}
        paired = zip(block, prompts, strict=True)
        for max_new_tokens, group in groupby(paired, key=lambda pair: pair[0].max_new_tokens):
            members = list(group)
            ids = [example.id for example, _ in members]
            found = self._generate(
                self._loaded,
                job.policy,
                job.budget,
                [prompt for _, prompt in members],
                max_new_tokens=max_new_tokens,
                stop=self._task.stop,
                first_token=self._settings.first_token,
                seed=self._settings.seed,
                example_ids=ids,
            )
            generations |= zip(ids, found, strict=True)
        return [
            self._row(job, start + offset, example, prompt, generations[example.id])
            for offset, (example, prompt) in enumerate(zip(block, prompts, strict=True))
        ]

    def _row(self, job: Job, index: int, example: Example, prompt: Prompt, generation: Generation) -> Row:
        return replace(
            _labelled(job.row, example, index),
            status="ok",
            prompt_tokens=len(prompt.ids),
            truncated_tokens=prompt.truncated_tokens,
            prediction=generation.text,
            stop=generation.stop,
            new_tokens=len(generation.new_ids),
            score=self._task.score(generation.text, example),
            metrics=self._task.metrics(generation.text, example),
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


def _labelled(row: Row, example: Example, index: int) -> Row:
    return replace(
        row,
        subset=example.subset,
        example_id=example.id,
        index=index,
        group=example.group,
        data_source=example.data_source,
        answers=example.answers,
    )


def _fractions(generation: Generation) -> dict[str, float]:
    """With the allowance at the last step (absent if nothing bounds it) and the prefill peak against the prompt."""
    memory, shares = generation.memory, dict(generation.fractions)
    if memory["allowed"]:
        shares["allowed"] = memory["allowed"] * shares["final"] / memory["final"]
    shares["prefill_peak"] = memory["prefill_peak"] * shares["after_prefill"] / memory["after_prefill"]
    return shares


def _known_sizes(folder: RunFolder) -> dict[str, int]:
    sizes: Mapping[str, int] = folder.read_summary().get("facts", {}).get("available", {})
    return dict(sizes)
