"""What each RULER subtask consists of: the numbers of its haystack, needles, chains, word counts, and its metric.

Source: NVIDIA/RULER c3f5e3b, scripts/synthetic.yaml, scripts/data/synthetic/*.py (structure and numbers only).
"""

from __future__ import annotations

from dataclasses import dataclass

ESSAY, NOISE, NEEDLES = "essay", "noise", "needles"
WORDS, NUMBERS, UUIDS = "words", "numbers", "uuids"

SHORT_LENGTH = 4096
"""Below this context length the word counts of cwe shrink, as in RULER; so does, here, the one-shot example of vt."""


@dataclass(frozen=True)
class Niah:
    """A needle-in-a-haystack subtask. `keys` x `values` needles; `queries` of the keys are asked for."""

    haystack: str
    """"essay" (prose), "noise" (one line repeated) or "needles" (every line is a distracting needle)."""
    key_type: str
    """"words" (adjective-noun) or "uuids"."""
    value_type: str
    """"numbers" (7 digits) or "uuids" (version 4)."""
    keys: int = 1
    values: int = 1
    queries: int = 1


NIAH = {
    "niah_single_1": Niah(NOISE, WORDS, NUMBERS),
    "niah_single_2": Niah(ESSAY, WORDS, NUMBERS),
    "niah_single_3": Niah(ESSAY, WORDS, UUIDS),
    "niah_multikey_1": Niah(ESSAY, WORDS, NUMBERS, keys=4),
    "niah_multikey_2": Niah(NEEDLES, WORDS, NUMBERS),
    "niah_multikey_3": Niah(NEEDLES, UUIDS, UUIDS),
    "niah_multivalue": Niah(ESSAY, WORDS, NUMBERS, values=4),
    "niah_multiquery": Niah(ESSAY, WORDS, NUMBERS, keys=4, queries=4),
}


@dataclass(frozen=True)
class Chain:
    """vt: one chain of `hops` copies, so hops + 1 names; after a one-shot example of `shot_lines` noise lines."""

    hops: int = 4
    name_letters: int = 5
    shot_letters: int = 3
    shot_lines: int = 16


def chain(context_length: int) -> Chain:
    """The chain of vt at this context length."""
    return Chain() if context_length >= SHORT_LENGTH else Chain(shot_lines=5)


@dataclass(frozen=True)
class Repeats:
    """cwe: `answers` common words occur `common` times each, the others `uncommon` times; the one-shot example has
    `shot_words` words that occur `shot_common` and `shot_uncommon` times.
    """

    common: int
    uncommon: int
    shot_words: int
    shot_common: int
    shot_uncommon: int
    answers: int = 10


def repeats(context_length: int) -> Repeats:
    """The word counts of cwe at this context length."""
    return Repeats(30, 3, 40, 10, 3) if context_length >= SHORT_LENGTH else Repeats(6, 1, 20, 3, 1)


FWE_ALPHA, FWE_LETTERS, FWE_ANSWERS = 2.0, 6, 3
"""fwe: word frequencies fall as rank^-alpha; rank 1 is replaced by dots and ranks 2 to 4 are the answer."""

OFFICIAL_NEW_TOKENS = dict.fromkeys(NIAH, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
"""Subtask -> tokens to generate, for all 13 in RULER's order."""

SUBSETS = tuple(OFFICIAL_NEW_TOKENS)

MATCH_PART = frozenset({"qa_1", "qa_2"})
"""Subtasks scored by string_match_part (any answer); the others need all answers."""
