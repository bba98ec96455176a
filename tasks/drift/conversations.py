"""One conversation: topics, needles, the order of its turns, and its examples at any amount of prose.

Needle j of the n of a part with m sentences stands before sentence round((j + 1) * m / (n + 1)), counted from 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import NamedTuple

from qevict_bench.task import Example
from tasks.drift.needles import Needle, needles
from tasks.drift.orders import orders, revisits
from tasks.drift.topics import TOPICS, Topic, sentences

_GOLD_SENTENCES = 4


class Shape(NamedTuple):
    """The fields of the task that decide what is drawn."""

    turns: int
    topics: int
    distances: tuple[int, ...]
    reasked: float


class Part(NamedTuple):
    """A topic's part of the context: its prose, drawn as far as it is needed, and its needles as they stand in it."""

    topic: Topic
    prose: Iterator[str]
    drawn: list[str]
    needles: tuple[Needle, ...]

    def first(self, count: int) -> list[str]:
        """The first `count` sentences."""
        self.drawn.extend(islice(self.prose, max(0, count - len(self.drawn))))
        return self.drawn[:count]

    def text(self, count: int) -> str:
        pieces = self.first(count)
        for index, needle in reversed(list(enumerate(self.needles))):
            pieces.insert(round((index + 1) * count / (len(self.needles) + 1)), needle.sentence)
        return " ".join(pieces)


class Turn(NamedTuple):
    """What one question asks; `distance` turns after the last one on its topic (0 = the first), the very
    needle `reasked` or another.
    """

    part: Part
    needle: Needle
    distance: int
    reasked: bool


@dataclass(frozen=True)
class Conversation:
    """A drawn conversation."""

    id: str
    parts: tuple[Part, ...]
    turns: tuple[Turn, ...]

    def examples(self, num_sentences: int, max_new_tokens: int) -> list[Example]:
        """The turns, over a context of `num_sentences` sentences of prose."""
        before = (
            f"Read the text below. It has {len(self.parts)} parts on different matters, and in each of them a code is "
            "given for some name. Questions follow.\n\n"
        )
        share, rest = divmod(num_sentences, len(self.parts))
        context = before
        for number, part in enumerate(self.parts):
            context += f"Part {'ABCDEFGHIJ'[number]}: {part.topic.title}.\n{part.text(share + (number < rest))}\n\n"
        return [
            self._example(index, turn, context, len(before), max_new_tokens) for index, turn in enumerate(self.turns)
        ]

    def _example(self, index: int, turn: Turn, context: str, instruction_chars: int, max_new_tokens: int) -> Example:
        title, (key, value) = turn.part.topic.title, turn.needle
        start = context.index(turn.needle.sentence) + turn.needle.sentence.index(value, len(key))
        return Example(
            id=f"{self.id}-turn{index}-distance{turn.distance}{'-reasked' * turn.reasked}",
            subset="drift",
            context=context,
            question=f"What is the code of {key}? And what does the text say about {title}?\n",
            answer_prefix=f"The code of {key}:",
            answers=(value,),
            max_new_tokens=max_new_tokens,
            answer_spans=((start, start + len(value)),),
            group=self.id,
            data_source="synthetic",
            instruction_chars=instruction_chars,
            gold=" ".join([f"{value}.", *turn.part.first(_GOLD_SENTENCES)]),
        )


def draw(shape: Shape, index: int, seed: int, split: str) -> Conversation:
    """Conversation `index` of a seed and split; word keys of "dev" and "test" never coincide."""
    seeded = f"{seed}/{split}/drift/{index}/{shape}"
    rng = Random(int.from_bytes(hashlib.sha256(seeded.encode()).digest()[:8], "big"))
    order = rng.choice(orders(shape.turns, shape.topics, shape.distances))
    distances = revisits(order)
    same = [distance > 0 and rng.random() < shape.reasked for distance in distances]
    new = [sum(t == topic and not s for t, s in zip(order, same, strict=True)) for topic in range(shape.topics)]
    stream = needles(split, rng)
    asked = [list(islice(stream, max(1, count))) for count in new]
    placed = [
        Part(topic, sentences(topic, Random(rng.getrandbits(64))), [], tuple(rng.sample(own, len(own))))
        for topic, own in zip(rng.sample(TOPICS, shape.topics), asked, strict=True)
    ]
    turns, taken = [], [0] * shape.topics
    for topic, distance, reasked in zip(order, distances, same, strict=True):
        taken[topic] += not reasked
        turns.append(Turn(placed[topic], asked[topic][taken[topic] - 1], distance, reasked))
    return Conversation(f"drift-{index:04d}", tuple(rng.sample(placed, len(placed))), tuple(turns))
