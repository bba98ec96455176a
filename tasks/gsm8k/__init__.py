"""GSM8K (Cobbe et al., "Training Verifiers to Solve Math Word Problems", arXiv 2110.14168): 1,319 test problems.

Problems come from files of the official repository (`local`), from the Hub (`hub`), or from a mini set of our own
problems (`fixture`). The prompt is lm-evaluation-harness' task gsm8k, as text or as turns of a chat: worked problems
of the train split, then the problem, each as "Question: ...\\nAnswer: ...". Three things differ: 8 shots, not 5; the
same shots for all examples of a run; no calculator annotations (<<16-3=13>>), neither in the shots nor in `gold`.

Example: "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total does it take?" has
the answer 3. "... 2 + 1 = 3 bolts.\\n#### 3" scores 1 by both metrics, "It takes 3 bolts" by `flexible` only.

With shots, they are all that protocols without the question may compress. Without, it is the problem up to its last
sentence, which is the question (as in KVzip); 16 of the test problems are one sentence, hence all question.

Metrics: https://github.com/EleutherAI/lm-evaluation-harness/blob/4e7e0d4/lm_eval/tasks/gsm8k/gsm8k.yaml
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import ClassVar

from qevict_bench.metrics import GSM8K_INVALID, gsm8k_flexible, gsm8k_match, gsm8k_strict
from qevict_bench.task import Example, Prompter, Task, check_source
from tasks.gsm8k import fixture, hub
from tasks.gsm8k.problems import Data, Problem, asked, last_sentence, read

_FIELDS = {"fixture": "", "local": "data_dir", "hub": "hub_id"}
"""Source -> the field that it needs."""
_HEADLINES = "flexible", "strict"


@dataclass(frozen=True)
class Gsm8k(Task):
    """GSM8K. Raises ValueError for a bad field, with its value and what to write instead."""

    name: ClassVar[str] = "gsm8k"
    subsets: ClassVar[tuple[str, ...]] = ("gsm8k",)
    stop: ClassVar[tuple[str, ...]] = ("Question:", "</s>", "<|im_end|>")

    source: str = "fixture"
    """"fixture", "local" or "hub"."""
    data_dir: str = ""
    """With source "local": holds test.jsonl, and train.jsonl if shots and "dev" are to come from the train split."""
    hub_id: str = ""
    """With source "hub": OWNER/NAME, or the path of a local copy."""
    shots: int = 8
    """Worked problems before the question, drawn by the seed from the train split, or from 8 own ones without it."""
    max_new_tokens: int = 256
    headline: str = "flexible"
    """The metric that is the score: "flexible" (the last number) or "strict" (the number after "#### ")."""

    def __post_init__(self) -> None:
        check_source(self, self.source, _FIELDS)
        for field, least in (("shots", 0), ("max_new_tokens", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"{field}={getattr(self, field)} is too small; use {least} or more")
        if self.headline not in _HEADLINES:
            raise ValueError(f"headline={self.headline!r} is unknown; use one of {', '.join(_HEADLINES)}")

    @property
    def prompt_source(self) -> str:
        """ "own" for source "fixture", else "official"."""
        return "own" if self.source == "fixture" else "official"

    @property
    def splits(self) -> tuple[str, ...]:
        """ "dev" are problems of the train split that are no shots; without train.jsonl there is none."""
        without = self.source == "local" and not (Path(self.data_dir) / "train.jsonl").is_file()
        return ("test",) if without else ("test", "dev")

    @property
    def shots_source(self) -> str:
        """ "train", "own" (our problems: there is no train split, or it is the fixture's) or "none" (shots=0)."""
        return self._shots_source(self._data())

    def fingerprint(self) -> str:
        """Hash of all problems. Raises ValueError for missing or bad data, or too few problems for `shots`."""
        data = self._data()
        self._shots(data, seed=0)
        return hashlib.sha256(repr([data.test, data.train, fixture.shots()]).encode()).hexdigest()[:16]

    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        """Yield the first `limit` problems in the order of the data, or all if there are fewer.

        Raises ValueError for a bad split or limit, and for bad data.
        """
        if limit < 1:
            raise ValueError(f"limit={limit} asks for no example; use 1 or more")
        data = self._data()
        if split not in self.splits or (split == "dev" and not data.train):
            raise ValueError(f"split={split!r} is not there with source={self.source}; use test, or add a train split")
        shots = self._shots(data, seed)
        solved = tuple((asked(shot), f" {shot.solution}\n\n") for shot in shots)
        origin = {"local": "gsm8k", "hub": self.hub_id}.get(self.source, self.source)
        problems = enumerate(data.test if split == "test" else data.train)
        for index, problem in [(i, problem) for i, problem in problems if problem not in shots][:limit]:
            text = asked(problem)
            cut = 0 if solved else last_sentence(problem)
            yield Example(
                id=f"gsm8k-{index:04d}",
                subset="gsm8k",
                context=text[:cut],
                question=text[cut:],
                answer_prefix="",
                answers=(problem.number,),
                max_new_tokens=self.max_new_tokens,
                answer_spans=(),
                data_source=f"{origin} {split}, shots {self._shots_source(data)}",
                shots=solved,
                gold=problem.solution,
            )

    def score(self, prediction: str, example: Example) -> float:
        """Return the metric that `headline` names."""
        return self.metrics(prediction, example)[self.headline]

    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        """Return both metrics, and whether no number was found (invalid_*)."""
        found = {"strict": gsm8k_strict(prediction), "flexible": gsm8k_flexible(prediction)}
        matched = {name: gsm8k_match(number, example.answers[0]) for name, number in found.items()}
        return matched | {f"invalid_{name}": float(number == GSM8K_INVALID) for name, number in found.items()}

    def _data(self) -> Data:
        if self.source == "local":
            return read(Path(self.data_dir))
        return hub.load(self.hub_id) if self.source == "hub" else fixture.load()

    def _shots_source(self, data: Data) -> str:
        if not self.shots:
            return "none"
        return "train" if data.train and self.source != "fixture" else "own"

    def _shots(self, data: Data, seed: int) -> tuple[Problem, ...]:
        pool = data.train or fixture.shots()
        if self.shots > len(pool):
            whose = "of the train split" if data.train else "of our own; more need a train split (train.jsonl)"
            raise ValueError(f"shots={self.shots} is too many: there are {len(pool)} worked problems {whose}")
        return tuple(Random(f"gsm8k shots {seed}").sample(pool, self.shots))
