"""What each RULER subtask consists of: the numbers of its haystack, keys, values, queries, and its metric.

Source: NVIDIA/RULER c3f5e3b, scripts/synthetic.yaml and scripts/data/synthetic/constants.py (structure only).
"""

from __future__ import annotations

from dataclasses import dataclass

ESSAY, NOISE, NEEDLES = "essay", "noise", "needles"
WORDS, NUMBERS, UUIDS = "words", "numbers", "uuids"


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

OFFICIAL_NEW_TOKENS = dict.fromkeys(NIAH, 128) | {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
"""Subtask -> tokens to generate, for all 13."""

MATCH_PART = frozenset({"qa_1", "qa_2"})
"""Subtasks scored by string_match_part (any answer); the others need all answers."""
