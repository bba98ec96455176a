"""Needle: one needle in a haystack of prose, over a grid of context lengths and depths. Own wording and prose.

The well-known test of long contexts (Kamradt, https://github.com/gkamradt/LLMTest_NeedleInAHaystack), scored by string
match instead of a judge. A cell, such as "1024@50%", is a subset with `limit` examples: "... The town well ... The code
of mellow-anchor: 4182093. A dog slept ..." is asked "What is the code of mellow-anchor?", its answer opens with "The
code of mellow-anchor:", and " 4182093." scores 1. At depth d of n sentences the needle stands before sentence
round(d * n), counted from 0. Every example has prose and a key of its own: cells are independent.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import ClassVar

from qevict_bench.metrics import string_match_all
from qevict_bench.task import Example, Prompter, Task
from tasks.needle.haystack import needle, sentences

_LENGTHS = 256, 131_072
_NEW_TOKENS = 32
_LEAST_SENTENCES = 4
_SENTENCE_TOKENS = 8  # no tokenizer makes fewer of a sentence
_BEFORE = "Read the text below. A code is given for a name somewhere in it; you will be asked for it.\n\n"


@dataclass(frozen=True)
class NeedleGrid(Task):
    """Depth x length grid. Raises ValueError for a bad field, with its value and what to write instead."""

    name: ClassVar[str] = "needle"
    prompt_source: ClassVar[str] = "own"
    stop: ClassVar[tuple[str, ...]] = ("\n",)

    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Tokens of prompt + answer, 256..131072 each; an example fills them up to the last sentence."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Share of the haystack before the needle, 0..1 each."""
    source: str = "generate"
    """Only "generate": needles need no data."""

    def __post_init__(self) -> None:
        if self.source != "generate":
            raise ValueError(f"source={self.source!r} is unknown; needles can only be generated: use generate")
        for field, (low, high) in {"lengths": _LENGTHS, "depths": (0, 1)}.items():
            values = getattr(self, field)
            if isinstance(values, str | int | float):
                raise ValueError(f"{field}={values!r} is no list; write [{values}]")
            object.__setattr__(self, field, values := tuple(values))
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{field}={list(values)}: give one or more, none of them twice")
            for value in values:
                if not low <= value <= high:
                    raise ValueError(f"{field}={list(values)}: {value} is out of range; use {low} to {high}")
        if len(set(self.subsets)) < len(self.subsets):
            raise ValueError(f"depths={list(self.depths)} are too close to be told apart; use whole percents")

    @property
    def subsets(self) -> tuple[str, ...]:
        """LENGTH@DEPTH%, length by length."""
        return tuple(_cell(length, depth) for length in self.lengths for depth in self.depths)

    @property
    def nominal_length(self) -> int:
        return max(self.lengths)

    def fingerprint(self) -> str:
        """Hash of one fixed draw: it changes with wording, vocabulary, or random draws."""
        drawn = [_Draft(length, depth, 0, 0, "test").build(24) for length in self.lengths for depth in self.depths]
        return hashlib.sha256(repr(drawn).encode()).hexdigest()[:16]

    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        """Yield `limit` examples per cell. Raises ValueError for a bad split, limit, or length."""
        if split not in self.splits:
            raise ValueError(f"split={split!r} is not to be had; use {' or '.join(self.splits)}")
        if limit < 1:
            raise ValueError(f"limit={limit} asks for no example; use 1 or more")
        for length in self.lengths:
            for depth in self.depths:
                for index in range(limit):
                    yield _Draft(length, depth, index, seed, split).fitted(prompter)

    def score(self, prediction: str, example: Example) -> float:
        """1 if the code occurs in the answer, else 0."""
        return string_match_all(prediction, example.answers)

    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        """Return string_match, and of the cell: length in tokens, and depth from 0 to 1."""
        length, depth = example.subset.rstrip("%").split("@")
        return {
            "string_match": self.score(prediction, example),
            "length": float(length),
            "depth": float(depth) / 100,
        }


class _Draft:
    """Example `index` of a cell, with any amount of prose."""

    def __init__(self, length: int, depth: float, index: int, seed: int, split: str) -> None:
        self._length, self._depth, self._subset = length, depth, _cell(length, depth)
        self._id = f"{self._subset}-{index:04d}"
        rng = Random(int.from_bytes(hashlib.sha256(f"{seed}/{split}/needle/{self._id}".encode()).digest()[:8], "big"))
        self._needle = needle(split, rng)
        self._prose = list(islice(sentences(rng), max(length // _SENTENCE_TOKENS, 24)))

    def build(self, num_sentences: int) -> Example:
        pieces, hidden = self._prose[:num_sentences], self._needle
        pieces.insert(round(self._depth * num_sentences), hidden.sentence)
        context = f"{_BEFORE}{' '.join(pieces)}\n\n"
        start = context.index(hidden.sentence) + len(hidden.head) + 1
        return Example(
            id=self._id,
            subset=self._subset,
            context=context,
            question=f"What is the code of {hidden.key}?\n",
            answer_prefix=hidden.head,
            answers=(hidden.value,),
            max_new_tokens=_NEW_TOKENS,
            answer_spans=((start, start + len(hidden.value)),),
            data_source="synthetic",
            instruction_chars=len(_BEFORE),
        )

    def fitted(self, prompter: Prompter) -> Example:
        room = self._length - _NEW_TOKENS

        def tokens(num_sentences: int) -> int:
            return prompter.count(self.build(num_sentences))

        if (least := tokens(_LEAST_SENTENCES)) > room:
            raise ValueError(
                f"lengths={self._length} is too short with this tokenizer; use {64 * -(-(least + _NEW_TOKENS) // 64)} "
                "or more"
            )
        sizes = range(_LEAST_SENTENCES, len(self._prose) + 1)
        return self.build(sizes[bisect_right(sizes, room, key=tokens) - 1])


def _cell(length: int, depth: float) -> str:
    return f"{length}@{100 * depth:g}%"
