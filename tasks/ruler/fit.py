"""Fit an example to a length in tokens by the size of its haystack."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from qevict_bench.task import Example, Prompter
from tasks.ruler.wording import Frame

MIN_FILL = 0.90
GOOD_FILL = 0.97
_MAX_TRIES = 16
_LENGTH_STEP = 64
_VARIATION = 1.12  # other examples of a subtask may be that much longer


class Body(NamedTuple):
    """A haystack and where in it the answers lie, as [start, stop) characters."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Draft:
    """An example all but for the size of its haystack, which `body` makes from a number of units."""

    id: str
    subset: str
    frame: Frame
    answers: tuple[str, ...]
    max_new_tokens: int
    body: Callable[[int], Body]
    """The same number gives the same haystack; one more unit makes it longer."""
    min_units: int = 4
    max_units: int = 1 << 20
    shot: str = ""
    """A solved example, put before everything."""
    group: str = ""
    data_source: str = "generated"

    def build(self, num_units: int) -> Example:
        """Return the example with `num_units` units of haystack."""
        body = self.body(num_units)
        start = len(self.shot) + len(self.frame.before)
        return Example(
            id=self.id,
            subset=self.subset,
            context=f"{self.shot}{self.frame.before}{body.text}{self.frame.after}",
            question=self.frame.question,
            answer_prefix=self.frame.answer_prefix,
            answers=self.answers,
            max_new_tokens=self.max_new_tokens,
            answer_spans=tuple((start + begin, start + end) for begin, end in body.spans),
            group=self.group,
            data_source=self.data_source,
            instruction_chars=-1 if self.shot else len(self.frame.before),  # a solved example shows it too
        )


def fit(draft: Draft, context_length: int, prompter: Prompter, hint: int = 0) -> tuple[int, Example]:
    """Number of units, and the example, whose prompt + max_new_tokens fill 90 to 100 % of `context_length`.

    `hint` units are tried first. Bracketed search by tokens per unit: `low` units fit, `high` units do not. Raises
    ValueError, naming a length that fits, if the subtask cannot be made that short, and one that its data fill, if they
    do not suffice.
    """

    def measure(num_units: int) -> tuple[Example, int]:
        built = draft.build(num_units)
        return built, prompter.count(built) + built.max_new_tokens

    if draft.min_units <= hint <= draft.max_units:
        best, tokens = measure(hint)
        if GOOD_FILL * context_length <= tokens <= context_length:
            return hint, best
    low, high = draft.min_units, min(draft.max_units, context_length) + 1
    best, tokens = measure(low)
    more = min(3 * low, high - 1)
    per_unit = max((measure(more)[1] - tokens) / max(more - low, 1), 0.1)
    least = max(_VARIATION * (tokens + per_unit), 1.1 * per_unit / (1 - MIN_FILL))
    for _ in range(_MAX_TRIES):
        if tokens >= GOOD_FILL * context_length or high - low <= 1:
            break
        guess = min(max(low + int((context_length - tokens) / per_unit), low + 1), high - 1)
        built, total = measure(guess)
        per_unit = max((total - tokens) / (guess - low), 0.1)
        if total <= context_length:
            best, low, tokens = built, guess, total
        else:
            high = guess
    if low == draft.max_units and tokens < MIN_FILL * context_length:
        raise ValueError(
            f"{draft.subset}: the data give {tokens} tokens, too few for context_length={context_length}; use "
            f"context_length={int(tokens / MIN_FILL)} or less, or more data"
        )
    if not MIN_FILL * context_length <= tokens <= context_length:
        raise ValueError(
            f"{draft.subset} does not fit context_length={context_length} with this tokenizer; "
            f"use context_length={_LENGTH_STEP * math.ceil(least / _LENGTH_STEP)} or more"
        )
    return low, best
