"""Drift: a conversation whose questions jump between the topics of one long context, and come back. Own design.

The context has a part per topic: prose with needles, "The code of mellow-anchor: 4182093.", at even steps. Every turn
asks for one needle and about its topic, so that attention follows: "What is the code of mellow-anchor? And what does
the text say about the bakery?" is opened with "The code of mellow-anchor:", and " 4182093. The bakery ..." scores 1.
Under protocol=multi_query mode=continue all turns share one growing cache; under the other protocols each is a prompt
of its own, which makes sense alone.

A turn's `distance` is the number of turns since its topic was last asked about, 0 for a first visit. A revisit asks for
the needle asked last (`reasked`), whose code then also stands in an earlier answer, or for another of the topic, which
only the context holds: that is the test of recovery. Distances depend on the turn (4 cannot come before turn 4), so
compare methods at a distance, or with FullKV at the same, rather than distances with each other.

Score: the value occurs (string_match_all of qevict_bench.metrics) in the first line of the answer, within its first 32
characters; a list of guesses, or a code met while writing on, is no answer. Every answer has `max_new_tokens`: models
would end some after a line, and the number of routing events would hang on what they happen to say.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from qevict_bench.metrics import string_match_all
from qevict_bench.task import Example, Prompter, Task
from tasks.drift.conversations import Conversation, Shape, draw
from tasks.drift.orders import orders
from tasks.drift.topics import TOPICS

_LENGTHS, _TURNS, _NEW_TOKENS = (512, 131_072), (6, 10), (16, 8192)
_SCORED_CHARS = 32
_SENTENCE_TOKENS = 10  # no tokenizer makes fewer of a sentence
_LENGTH_STEP = 64


@dataclass(frozen=True)
class Drift(Task):
    """Questions that leave topics and return. Raises ValueError for a bad field, with its value and what to write."""

    name: ClassVar[str] = "drift"
    prompt_source: ClassVar[str] = "own"
    stop: ClassVar[tuple[str, ...]] = ()
    subsets: ClassVar[tuple[str, ...]] = ("drift",)

    source: str = "generate"
    """Only "generate": conversations need no data."""
    context_length: int = 1024
    """Tokens of the context with one question, 512..131072. A conversation has turns x (max_new_tokens + some 50) more,
    and has to fit the model."""
    turns: int = 8
    """Questions of a conversation, 6..10; `limit` counts questions, and limit=turns is one conversation."""
    topics: int = 4
    """Parts of the context, 2..10. Not every one need be asked about."""
    distances: tuple[int, ...] = (1, 2, 4)
    """Every conversation has revisits at each of these distances, as evenly as can be, and at no other."""
    reasked: float = 0.5
    """Chance that a revisit asks for the needle of its topic that was asked last, 0..1."""
    max_new_tokens: int = 256
    """Tokens of every answer, the model's EOS is not chosen: 8 x 256 are 2048 decode steps."""

    def __post_init__(self) -> None:
        if self.source != "generate":
            raise ValueError(f"source={self.source!r} is unknown; conversations can only be generated: use generate")
        bounds = {
            "context_length": _LENGTHS,
            "turns": _TURNS,
            "topics": (2, len(TOPICS)),
            "max_new_tokens": _NEW_TOKENS,
        }
        for field, (low, high) in {**bounds, "reasked": (0, 1)}.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise ValueError(f"{field}={value} is out of range; use {low} to {high}")
        if isinstance(self.distances, str | int):
            raise ValueError(f"distances={self.distances!r} is no list; write [{self.distances}]")
        object.__setattr__(self, "distances", tuple(self.distances))
        if not self.distances or len(set(self.distances)) < len(self.distances) or min(self.distances) < 1:
            raise ValueError(f"distances={list(self.distances)}: give one or more different numbers of turns from 1 on")
        if not orders(self.turns, self.topics, self.distances):
            raise ValueError(
                f"distances={list(self.distances)} cannot all occur, and no other, in turns={self.turns} on "
                f"topics={self.topics}; use more turns or topics, or distances=[1,2,4]"
            )

    @property
    def min_new_tokens(self) -> int:
        return self.max_new_tokens

    @property
    def nominal_length(self) -> int:
        return self.context_length + self.max_new_tokens

    def fingerprint(self) -> str:
        """Hash of one fixed draw: it changes with wording, vocabulary, or random draws."""
        drawn = draw(self._shape, 0, 0, "test").examples(8 * self.topics, self.max_new_tokens)
        return hashlib.sha256(f"{self.context_length} {drawn}".encode()).hexdigest()[:16]

    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        """Yield `limit` turns, conversation by conversation. Raises ValueError for a bad split, limit, or length."""
        if split not in self.splits:
            raise ValueError(f"split={split!r} is not to be had; use {' or '.join(self.splits)}")
        if limit < 1:
            raise ValueError(f"limit={limit} asks for no example; use 1 or more")
        for index in range(-(-limit // self.turns)):
            made = self._fitted(draw(self._shape, index, seed, split), prompter)
            yield from made[: limit - index * self.turns]

    def score(self, prediction: str, example: Example) -> float:
        """1 if the answer opens with the code, else 0."""
        first_line = prediction.lstrip().partition("\n")[0]
        return string_match_all(first_line[:_SCORED_CHARS], example.answers)

    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        """Return string_match, and of the question: turn, distance, first and reasked (0 or 1)."""
        found = re.search(r"-turn(\d+)-distance(\d+)(-reasked)?$", example.id)
        if found is None:
            raise ValueError(f"example {example.id} is none of task drift")
        return {
            "string_match": self.score(prediction, example),
            "turn": float(found[1]),
            "distance": float(found[2]),
            "first": float(found[2] == "0"),
            "reasked": float(found[3] is not None),
        }

    @property
    def _shape(self) -> Shape:
        return Shape(self.turns, self.topics, self.distances, self.reasked)

    def _fitted(self, conversation: Conversation, prompter: Prompter) -> list[Example]:
        """The examples with as much prose as fits; their contexts are the same, their questions differ in length."""

        def made(num_sentences: int) -> list[Example]:
            return conversation.examples(num_sentences, self.max_new_tokens)

        least = 4 * self.topics
        tokens = [prompter.count(example) for example in made(least)]
        longest = tokens.index(max(tokens))
        if max(tokens) > self.context_length:
            raise ValueError(
                f"context_length={self.context_length} is too short for topics={self.topics} with this tokenizer; use "
                f"context_length={_LENGTH_STEP * -(-max(tokens) * 5 // (4 * _LENGTH_STEP))} or more, or fewer topics"
            )
        sizes = range(least, self.context_length // _SENTENCE_TOKENS + least)
        fitting = bisect_right(sizes, self.context_length, key=lambda size: prompter.count(made(size)[longest]))
        return made(sizes[fitting - 1])
