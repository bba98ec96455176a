"""Carrying out runs: examples in, rows out. Knows neither configuration files nor a method or task by name.

Examples run in fixed blocks of `batch_size` consecutive ones of a subset (conversations, with multi_query), so neither
`limit` nor what is already done changes with whom an example shares its batch. A block that `limit` cuts runs whole;
the extra rows are kept for later.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from qevict_bench.asking import Asking, Engine, Job, Ready, conversation
from qevict_bench.budget import BudgetExceeded, Geometry, Infeasible
from qevict_bench.kept import Kept
from qevict_bench.leases import LeaseLost
from qevict_bench.protocol import Protocol, lengths
from qevict_bench.results import RunFailed, RunFolder
from qevict_bench.rowfiles import Damaged
from qevict_bench.rows import Row, check_row
from qevict_bench.settings import Settings, naming
from qevict_bench.standing import known_sizes
from qevict_bench.task import Example, Prompt, Prompter, Task

if TYPE_CHECKING:
    from qevict_bench.engine import Generation
    from qevict_bench.models import LoadedModel

Counting = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Signature of progress.counting."""
Wait = Callable[[str], None]
"""Signature of progress.Waiting: told again and again who is waited for."""
Place = tuple[str, int]
"""Subset, and index in it."""

log = logging.getLogger(__name__)


class Bench:
    """A model and a task, ready to complete runs; the model is loaded when the first example needs it.

    `kept` is what runs of this process share.
    """

    def __init__(
        self, settings: Settings, protocol: Protocol, task: Task, spec: Any, engine: Engine | None, kept: Kept
    ) -> None:
        self._settings, self._protocol, self._task, self._spec = settings, protocol, task, spec
        self._custom_engine, self._kept = engine, kept
        self._sizes: dict[str, int] = {}  # of subsets that turned out to be small
        self._tried: dict[str, set[Place]] = {}  # by run

    @cached_property
    def _engine(self) -> Engine:
        if self._custom_engine is not None:
            return self._custom_engine
        from qevict_bench.conversation import converse  # seconds of imports that a finished run does not need
        from qevict_bench.engine import Readings, generate
        from qevict_bench.fidelity import measure
        from qevict_bench.session import geometry_of

        return Engine(generate, converse, measure, geometry_of, Readings)

    @cached_property
    def _loaded(self) -> LoadedModel:
        attention = {}
        if self._custom_engine is None:
            from qevict_bench.attention import register

            attention = {"attn_implementation": register()}
        loaded: LoadedModel = self._kept.model(repr(self._spec), lambda: self._spec.load(**attention))
        return loaded

    @cached_property
    def _asking(self) -> Asking:
        return Asking(self._engine, self._loaded, self._settings, self._protocol, self._task)

    @cached_property
    def _geometry(self) -> Geometry:
        return self._engine.geometry_of(self._loaded)

    def selected(self, folder: RunFolder) -> list[Row]:
        """The rows that count for this command: the first `limit` of each subset, in order."""
        order = {name: position for position, name in enumerate(self._task.subsets)}
        if not folder.rows:
            raise RunFailed(f"{self._task.name} yields no examples for limit={self._settings.limit}")
        if stranger := next((row for row in folder.rows.values() if row.subset not in order), None):
            raise folder.damaged(stranger.example_id, f"{stranger.subset} is no subset of the task")
        rows = [row for row in folder.rows.values() if row.index < self._settings.limit]
        if not rows:
            raise Damaged(
                f"{folder.path} has rows, but none of the first limit={self._settings.limit} examples of a subset, and "
                "its summary.json says that there are no others; delete that file, or start over with resume=restart"
            )
        return sorted(rows, key=lambda row: (order[row.subset], row.index))

    def same_examples(self, folder: RunFolder, reference: RunFolder) -> None:
        """Raise Damaged if the two runs do not agree which example stands where, as runs of one task do."""
        ids = {row.place: row.example_id for row in reference.rows.values()}
        for row in folder.rows.values():
            if ids.get(row.place, row.example_id) != row.example_id:
                raise folder.damaged(
                    row.example_id,
                    f"or else {reference.path / 'rows.jsonl'} is, where index {row.index} of {row.subset} is "
                    f"{ids[row.place]}",
                )

    def complete(
        self, job: Job, folder: RunFolder, counting: Counting, written: Callable[[Row], None], wait: Wait
    ) -> dict[str, int]:
        """Run the examples that have no row yet, telling `written` of each row; returns the size of subsets with fewer
        than `limit` examples.

        An example that fails is not tried twice. `wait` is called while other processes run what is left.
        """
        limit = self._settings.limit
        folder.want(limit, self._task.subsets)
        self._sizes |= known_sizes(folder.path / "summary.json")
        tried, before = self._tried.setdefault(job.run_id, set()), dict(folder.rows)

        def missing() -> set[Place]:
            failed = {row.place for row in folder.rows.values() if not row.done}
            tried.update(failed & {row.place for row in folder.rows.values() if row is not before.get(row.example_id)})
            settled = {row.place for row in folder.rows.values()} - (failed - tried)
            sizes = {name: min(limit, self._sizes.get(name, limit)) for name in self._task.subsets}
            return {(name, i) for name, size in sizes.items() for i in range(size)} - settled

        if not (left := missing()):
            return self._sizes
        label = f"{job.row.method} {job.run_id}"
        log.info("%s: %d examples to run", label, len(left))
        problems: Counter[str] = Counter()
        with counting(label, len(left)) as advance:
            while left := missing():
                if blocks := self._own_first({b for b in map(self._block_of, left) if folder.free(*b)}):
                    for row in self._pass(job, folder, blocks, missing, advance):
                        written(row)
                        if row.status != "ok" and not problems[row.status]:  # the rows have all of them
                            log.warning("%s %s: %s", row.example_id, row.status, row.error)
                        problems[row.status] += 1
                else:
                    wait(f"other processes ({len(left)} examples)")
                folder.refresh()
        for status in ("error", "infeasible"):
            if problems[status] > 1:
                log.warning("%s: %d examples have status %s; their rows say why", label, problems[status], status)
        return self._sizes

    def _pass(
        self,
        job: Job,
        folder: RunFolder,
        blocks: Set[Place],
        missing: Callable[[], set[Place]],
        advance: Callable[[int], None],
    ) -> Iterator[Row]:
        """Go through the task's examples once, run those of `blocks` that are still missing, and yield their rows."""
        loaded = self._loaded
        prompter = Prompter(loaded.tokenizer, loaded.chat, self._protocol.instruction_at, loaded.max_context)
        ids = {row.place: row.example_id for row in folder.rows.values()}
        seen = dict.fromkeys(self._task.subsets, 0)
        for start, block in self._blocks(prompter):
            subset, stop = block[0].subset, start + len(block)
            seen[subset] = stop
            for index, example in enumerate(block, start):
                _check_place(folder, ids, example, index)
            if (subset, start) not in blocks:
                continue
            try:
                with folder.claim(subset, start, stop) as mine:
                    if mine and (todo := missing() & {(subset, index) for index in range(start, stop)}):
                        yield from self._run_block(job, folder, prompter, start, block)
                        advance(len(todo))
            except LeaseLost as lost:
                log.warning("%s: lost examples %d to %d of %s: %s", job.run_id, start, stop - 1, subset, lost)
        self._sizes |= {name: count for name, count in seen.items() if count < self._settings.limit}

    @cached_property
    def _block_size(self) -> int:
        return self._settings.batch_size * (self._task.turns if self._protocol.conversing else 1)

    def _block_of(self, place: Place) -> Place:
        """Where the block of an example begins."""
        return place[0], place[1] // self._block_size * self._block_size

    def _own_first(self, blocks: set[Place]) -> set[Place]:
        """Those of this process's shard, or all if it has none left."""
        shard, names = self._settings.shard, self._task.subsets
        per_subset = -(-self._settings.limit // self._block_size)
        own = {
            (name, start)
            for name, start in blocks
            if (names.index(name) * per_subset + start // self._block_size) % shard.count == shard.index
        }
        return own or blocks

    def _blocks(self, prompter: Prompter) -> Iterator[tuple[int, list[Example]]]:
        """Blocks with the index of their first example in its subset."""
        size = self._block_size
        whole_blocks = -(-self._settings.limit // size) * size
        subset, start, block = "", 0, list[Example]()
        for example in self._examples(prompter, whole_blocks):
            if example.subset != subset:
                if block:
                    yield start, block
                subset, start, block = example.subset, 0, []
            block.append(example)
            if len(block) == size:  # at once: the task may fail at its next example
                yield start, block
                start, block = start + size, []
        if block:
            yield start, block

    def _examples(self, prompter: Prompter, limit: int) -> Iterator[Example]:
        """The task's examples. What it raises after the first one ends the run, and the message says where.

        ValueError stays one; what it raises for its first example is a setting's mistake and passes as it is.
        """
        settings, places, last = self._settings, Counter[str](), ""
        ids: set[str] = set()
        try:
            with naming(type(self._task), "task."):
                for example in self._kept.examples(
                    repr((self._task, self._spec, prompter.instruction_at, limit, settings.seed, settings.split)),
                    lambda: self._task.examples(prompter, limit, settings.seed, settings.split),
                ):
                    if example.id in ids:
                        raise ValueError(f"{self._task.name} yields two examples with the id {example.id}")
                    ids.add(example.id)
                    last = f"{example.id} (index {places[example.subset]} of {example.subset})"
                    places[example.subset] += 1
                    yield example
        except Exception as error:
            if not last and isinstance(error, ValueError):
                raise
            where = f"the example after {last}" if last else f"its first example (index 0 of {self._task.subsets[0]})"
            kind = ValueError if isinstance(error, ValueError) else RunFailed
            raise kind(
                f"{self._task.name} cannot make {where}: {_named(error)}; the rows so far are kept: mend that and "
                "re-issue the command"
            ) from error

    def _run_block(
        self, job: Job, folder: RunFolder, prompter: Prompter, start: int, block: list[Example]
    ) -> Iterator[Row]:
        """Generate for a whole block and append the rows that are missing, also when it ends with RunFailed.

        What is wrong with one prompt or answer marks that example; an exception of the engine marks all whom it ran
        together.
        """
        rows, ready, exceeded = [], list[Ready](), ""
        for offset, example in enumerate(block):
            row, prompt = self._prepare(job, prompter, start + offset, example)
            if prompt is None:
                rows.append(row)
            else:
                ready.append(Ready(row, example, prompt))
        if self._protocol.mode == "continue":
            rows, ready = self._whole_conversations(rows, ready)
        try:
            generations, measured = self._asking.answers(job, prompter, ready) if ready else ([], [])
        except Exception as error:  # the run goes on without these examples
            whom = f" (batch {ready[0].example.id} .. {ready[-1].example.id})" if len(ready) > 1 else ""
            rows += [_problem(member.row, error, whom) for member in ready]
            exceeded = rows[-1].error if isinstance(error, BudgetExceeded) else ""
        else:
            rows += [self._answer(*found) for found in zip(ready, generations, measured, strict=True)]
        for row in sorted(rows, key=lambda row: row.index):
            known = folder.rows.get(row.example_id)
            if known is None or not known.done:
                folder.append(row)
                yield row
        if exceeded:
            raise RunFailed(exceeded)

    def _whole_conversations(self, rows: list[Row], ready: list[Ready]) -> tuple[list[Row], list[Ready]]:
        """Without the turns of conversations in which another turn cannot run; their rows name that turn."""
        broken = {conversation(row, self._task): row for row in reversed(rows)}
        left = [member for member in ready if conversation(member.row, self._task) not in broken]
        for member in ready:
            if cause := broken.get(conversation(member.row, self._task)):
                error = f"turn {cause.turn} of its conversation cannot run: {cause.error}"
                rows = [*rows, replace(member.row, status=cause.status, error=error)]
        return rows, left

    def _prepare(self, job: Job, prompter: Prompter, index: int, example: Example) -> tuple[Row, Prompt | None]:
        """The labelled row of an example, and its prompt; without one the row is final and says why it cannot run."""
        row = replace(job.row, subset=example.subset, example_id=example.id, index=index, turn=index % self._task.turns)
        try:
            labelled = replace(row, group=example.group, data_source=example.data_source, answers=example.answers)
            check_row(labelled)
            row = labelled
            if example.problem:
                raise ValueError(example.problem)
            prompt = self._kept.prompt(example, prompter.encode)
            num_tokens, nominal = len(prompt.ids), self._task.nominal_length
            total = num_tokens + example.max_new_tokens
            row = replace(
                row,
                prompt_tokens=num_tokens,
                truncated_tokens=prompt.truncated_tokens,
                overflow_tokens=max(0, total - nominal) if nominal else 0,
                boundary_tokens=prompt.boundary_tokens,
            )
            if total > self._loaded.max_context:
                raise Infeasible(
                    f"{example.id} needs {total} tokens ({num_tokens} + {example.max_new_tokens} new ones), more than "
                    f"the context of {self._loaded.name} ({self._loaded.max_context}); give "
                    "shorter prompts (task.context_length, task.max_length), or a model with a longer context"
                )
            if num_tokens < 2:
                raise ValueError(f"its prompt has {num_tokens} tokens; at least 2 are needed")
            first, later = lengths(self._protocol.steps(prompt), example.max_new_tokens)
            job.policy.fit(job.budget, self._geometry, first, later)
        except Exception as error:  # whatever it is belongs to this example
            return _problem(row, error), None
        return row, prompt

    def _answer(self, member: Ready, generation: Generation, fidelity: dict[str, float] | None) -> Row:
        row, example, _ = member
        try:
            answered = replace(
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
                fidelity=fidelity,
                ttft_s=generation.ttft_s,
                decode_s=generation.decode_s,
            )
            check_row(answered)
            row = answered
            score = self._task.score(generation.text, example)
            metrics = self._task.metrics(generation.text, example)
            if not 0 <= score <= 1 or not all(math.isfinite(value) for value in metrics.values()):
                raise ValueError(f"{self._task.name} scored {score}, {metrics}: a score lies in [0, 1]")
            scored = replace(row, status="ok", score=score, metrics=metrics)
            check_row(scored)
        except Exception as error:
            return _problem(row, error)
        return scored


def _check_place(folder: RunFolder, ids: Mapping[tuple[str, int], str], example: Example, index: int) -> None:
    """Raise Damaged if a row says that `example` stands elsewhere, or another one here; `ids` are those of the rows."""
    found = ids.get((example.subset, index), example.id)
    if found != example.id:
        raise folder.damaged(found, f"index {index} of {example.subset} is {example.id} in the task")
    known = folder.rows.get(example.id)
    if known is not None and known.place != (example.subset, index):
        raise folder.damaged(example.id, f"{example.id} is index {index} of {example.subset} in the task")


def _problem(row: Row, error: Exception, whom: str = "") -> Row:
    if isinstance(error, Infeasible):
        return replace(row, status="infeasible", error=" ".join(str(error).split()) + whom)
    return replace(row, status="error", error=_named(error) + whom)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _fractions(generation: Generation) -> dict[str, float]:
    """With the allowance at the last step (absent if nothing bounds it) and the prefill peak against the prompt."""
    memory, shares = generation.memory, dict(generation.fractions)
    if memory["allowed"]:
        shares["allowed"] = memory["allowed"] * shares["final"] / memory["final"]
    shares["prefill_peak"] = memory["prefill_peak"] * shares["after_prefill"] / memory["after_prefill"]
    return shares
