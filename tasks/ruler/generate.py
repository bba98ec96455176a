"""Build one needle-in-a-haystack example and fit it to a length in tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from random import Random
from typing import NamedTuple

from qevict_bench.task import Example, Prompter
from tasks.ruler import draws, prose, wording
from tasks.ruler.structure import ESSAY, NIAH, NOISE, Niah

MIN_FILL = 0.90
_GOOD_FILL = 0.98
_MIN_UNITS = 4
_MAX_TRIES = 16
_ESSAY_DEPTHS = 40
_LENGTH_STEP = 64


class _Needle(NamedTuple):
    depth: float
    """0 = before the first unit of the haystack, 1 = after the last."""
    sentence: str
    value: str
    value_start: int
    """Offset of `value` in `sentence`."""
    asked: bool


@dataclass
class Draft:
    """An example all but for the length of its haystack: `build(n)` and `build(n + 1)` differ by one unit only."""

    subset: str
    index: int
    keys: tuple[str, ...]
    """The keys asked for."""
    needles: tuple[_Needle, ...]
    """In order of depth."""
    answers: tuple[str, ...]
    """In order of `keys`."""
    stream: Iterator[str]
    """Endless units of the haystack: sentences or lines."""
    units: list[str] = field(default_factory=list)
    """Units taken from `stream` so far."""

    def build(self, num_units: int) -> Example:
        """Return the example with `num_units` units of haystack."""
        self.units += islice(self.stream, max(0, num_units - len(self.units)))
        spec = NIAH[self.subset]
        pieces = list(self.units[:num_units])
        at = [round(needle.depth * num_units) + i for i, needle in enumerate(self.needles)]
        for position, needle in zip(at, self.needles, strict=True):
            pieces.insert(position, needle.sentence)
        separator = " " if spec.haystack == ESSAY else "\n"
        intro = wording.intro(spec)
        spans: list[tuple[int, int]] = []
        for position, needle in zip(at, self.needles, strict=True):
            if needle.asked:
                before = sum(map(len, pieces[:position])) + len(separator) * position
                start = len(intro) + before + needle.value_start
                spans.append((start, start + len(needle.value)))
        return Example(
            id=f"{self.subset}-{self.index:04d}",
            subset=self.subset,
            context=f"{intro}{separator.join(pieces)}\n\n",
            question=wording.question(spec, self.keys),
            answer_prefix=wording.answer_prefix(spec, self.keys),
            answers=self.answers,
            max_new_tokens=wording.max_new_tokens(spec),
            answer_spans=tuple(spans),
        )


def example(subset: str, index: int, context_length: int, seed: int, split: str, prompter: Prompter) -> Example:
    """Return example `index` of `subset`: prompt tokens + max_new_tokens fill 90 to 100 % of `context_length`.

    Raises ValueError, naming a length that fits, if the subtask cannot be made that short.
    """
    name = f"{seed}/{split}/{subset}/{index}/{context_length}"
    rng = Random(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
    return _fit(draft(subset, index, split, rng), context_length, prompter)


def draft(subset: str, index: int, split: str, rng: Random) -> Draft:
    """Draw keys, values and depths of one example; the haystack is drawn as far as it is needed."""
    spec = NIAH[subset]
    keys, values = draws.keys(spec.key_type, split, rng), draws.values(spec.value_type, rng)
    owned = {key: list(islice(values, spec.values)) for key in islice(keys, spec.keys)}
    asked = tuple(owned)[: spec.queries]
    depths = _depths(spec, rng)
    needles = [
        _Needle(depths.pop(), *wording.needle(spec, key, value), key in asked)
        for key, key_values in owned.items()
        for value in key_values
    ]
    answers = tuple(value for key in asked for value in owned[key])
    return Draft(subset, index, asked, tuple(sorted(needles)), answers, _haystack(spec, rng, keys, values))


def _depths(spec: Niah, rng: Random) -> list[float]:
    """Essays: distinct points of an even grid from 0 to 1, as in RULER. Lines: anywhere."""
    count = spec.keys * spec.values
    if spec.haystack == ESSAY:
        return [point / (_ESSAY_DEPTHS - 1) for point in rng.sample(range(_ESSAY_DEPTHS), count)]
    return [rng.random() for _ in range(count)]


def _haystack(spec: Niah, rng: Random, keys: Iterator[str], values: Iterator[str]) -> Iterator[str]:
    if spec.haystack == ESSAY:
        return prose.sentences(rng)
    if spec.haystack == NOISE:
        return repeat(wording.NOISE_LINE)
    return (wording.needle(spec, key, value)[0] for key, value in zip(keys, values, strict=False))


def _fit(draft: Draft, context_length: int, prompter: Prompter) -> Example:
    """Bracketed search by tokens per unit: `low` units fit, `high` units do not."""

    def measure(num_units: int) -> tuple[Example, int]:
        built = draft.build(num_units)
        return built, len(prompter.encode(built).ids) + built.max_new_tokens

    low, high = _MIN_UNITS, context_length
    best, tokens = measure(low)
    per_unit = (measure(3 * low)[1] - tokens) / (2 * low)
    least = max(tokens + per_unit, 1.1 * per_unit / (1 - MIN_FILL))
    for _ in range(_MAX_TRIES):
        if tokens >= _GOOD_FILL * context_length or high - low <= 1:
            break
        guess = min(max(low + int((context_length - tokens) / per_unit), low + 1), high - 1)
        built, total = measure(guess)
        per_unit = (total - tokens) / (guess - low)
        if total <= context_length:
            best, low, tokens = built, guess, total
        else:
            high = guess
    if not MIN_FILL * context_length <= tokens <= context_length:
        raise ValueError(
            f"{draft.subset} does not fit context_length={context_length} with this tokenizer; "
            f"use context_length={_LENGTH_STEP * math.ceil(least / _LENGTH_STEP)} or more"
        )
    return best
