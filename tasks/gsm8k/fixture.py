"""A mini set of our own word problems in the official columns: 48 in test, 24 in train, no story in both."""

from __future__ import annotations

import functools
from random import Random

from tasks.gsm8k.problems import Data, Problem, data, problem
from tasks.gsm8k.stories import STORIES, Story

_COPIES = {"test": 4, "train": 3}
"""Problems that every story gives."""
_NUMBERED = tuple(enumerate(STORIES))
_TEST, _TRAIN = _NUMBERED[:12], _NUMBERED[12:]


def load() -> Data:
    """All problems."""
    return data(_problems("test"), _problems("train"))


def shots() -> tuple[Problem, ...]:
    """Eight worked problems, one of each story in train, for data without a train split."""
    return _problems("train")[: len(_TRAIN)]


def rows(split: str) -> list[dict[str, str]]:
    """The problems of a split as `question` and `answer`; neighbours tell different stories."""
    stories = _TEST if split == "test" else _TRAIN
    return [_row(story, Random(f"gsm8k fixture {i} {copy}")) for copy in range(_COPIES[split]) for i, story in stories]


@functools.cache
def _problems(split: str) -> tuple[Problem, ...]:
    return tuple(problem(row, f"fixture, {split}, row {i}") for i, row in enumerate(rows(split)))


def _row(story: Story, rng: Random) -> dict[str, str]:
    drawn = [rng.choice(numbers) for numbers in story.numbers]
    results = story.results(*drawn)
    values = dict(zip("abc", drawn, strict=False)) | dict(zip("xyz", results, strict=False))
    answer = f"{story.solution.format(**values)}\n#### {results[-1]:,}"
    return {"question": story.question.format(**values), "answer": answer}
