"""What one run asks of the engine for a block of examples: answers, and how far predictions are from FullKV's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from qevict_bench.budget import Budget, Geometry
from qevict_bench.environment import Environment
from qevict_bench.policy import KVPolicy
from qevict_bench.protocol import Protocol, Turn
from qevict_bench.rows import Row
from qevict_bench.settings import Metrics, Settings
from qevict_bench.task import Ending, Example, Prompt, Prompter, Task

if TYPE_CHECKING:
    from qevict_bench.engine import Generation
    from qevict_bench.models import LoadedModel

Generate = Callable[..., Sequence["Generation"]]
"""Signature of engine.generate."""
Converse = Callable[..., Sequence[Sequence["Generation"]]]
"""Signature of conversation.converse."""
Measure = Callable[..., Sequence[dict[str, float]]]
"""Signature of fidelity.measure."""
FIDELITY = ".fidelity"
"""Folder in results_dir of FullKV's predictions, which all methods of a sweep share."""


@dataclass(frozen=True)
class Job:
    """One run: a method under a budget. `row` holds what all its rows share; `config` is the text of config.yaml."""

    policy: KVPolicy
    budget: Budget
    row: Row
    config: str
    environment: Environment
    metrics: Metrics

    @property
    def run_id(self) -> str:
        return self.row.run_id


@dataclass(frozen=True)
class Engine:
    """The functions of the engine that runs call: engine.generate, conversation.converse, fidelity.measure,
    session.geometry_of, engine.Readings. Tests put in others.
    """

    generate: Generate
    converse: Converse
    fidelity: Measure
    geometry_of: Callable[[LoadedModel], Geometry]
    readings: Callable[[], Any]


class Ready(NamedTuple):
    """An example whose prompt can run, and the labels of its row."""

    row: Row
    example: Example
    prompt: Prompt


def conversation(row: Row, task: Task) -> int:
    """The number of its conversation within the subset."""
    return row.index // task.turns


@dataclass(frozen=True)
class Asking:
    """The engine with a loaded model, for one command."""

    engine: Engine
    loaded: LoadedModel
    settings: Settings
    protocol: Protocol
    task: Task

    def answers(
        self, job: Job, prompter: Prompter, ready: Sequence[Ready]
    ) -> tuple[Sequence[Generation], Sequence[dict[str, float] | None]]:
        """Generation and fidelity (None if it is not asked for) of every example."""
        if not job.metrics.fidelity:
            return self._generations(job, prompter, ready, {}), [None] * len(ready)
        readings = {"readings": self.engine.readings()}  # both read the same prompts
        return self._generations(job, prompter, ready, readings), self._fidelity(job, prompter, ready, readings)

    def _generations(
        self, job: Job, prompter: Prompter, ready: Sequence[Ready], readings: dict[str, Any]
    ) -> Sequence[Generation]:
        ending = self._ending(ready)
        common: dict[str, Any] = {
            "stop": ending.stop,
            "min_new_tokens": ending.min_new_tokens,
            "protocol": self.protocol,
            "seed": self.settings.seed,
        }
        if not self.protocol.conversing:
            return self.engine.generate(
                self._model(ending),
                job.policy,
                job.budget,
                [member.prompt for member in ready],
                max_new_tokens=[member.example.max_new_tokens for member in ready],
                example_ids=[member.example.id for member in ready],
                **common,
                **readings,
            )
        conversations = [
            list(turns) for _, turns in groupby(ready, key=lambda member: conversation(member.row, self.task))
        ]
        made = self.engine.converse(
            self._model(ending),
            job.policy,
            job.budget,
            [
                [Turn(x.prompt, prompter.follow_up(x.example), x.example.max_new_tokens) for x in t]
                for t in conversations
            ],
            names=[turns[0].example.group or turns[0].example.id for turns in conversations],
            **common,
        )
        return [generation for turns in made for generation in turns]

    def _fidelity(
        self, job: Job, prompter: Prompter, ready: Sequence[Ready], readings: dict[str, Any]
    ) -> Sequence[dict[str, float]]:
        return self.engine.fidelity(
            self._model(self._ending(ready)),
            job.policy,
            job.budget,
            [member.prompt for member in ready],
            [prompter.continuation(member.example) for member in ready],
            folder=self.settings.results_dir / FIDELITY,
            max_new_tokens=[member.example.max_new_tokens for member in ready],
            protocol=self.protocol,
            seed=self.settings.seed,
            example_ids=[member.example.id for member in ready],
            max_tokens=job.metrics.fidelity_tokens,
            streams=job.metrics.fidelity_streams,
            **readings,
        )

    def _ending(self, ready: Sequence[Ready]) -> Ending:
        """A block is of one subset."""
        return self.task.ending(ready[0].example.subset)

    def _model(self, ending: Ending) -> LoadedModel:
        if not ending.eos_texts:
            return self.loaded
        encode = self.loaded.tokenizer.encode
        more = [encode(text, add_special_tokens=False)[-1] for text in ending.eos_texts]
        return replace(self.loaded, eos_ids=tuple(sorted({*self.loaded.eos_ids, *more})))
