"""The eight needle-in-a-haystack subtasks: keys and values hidden in noise, in prose, or among other needles."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, repeat
from random import Random
from typing import NamedTuple

from tasks.ruler import draws
from tasks.ruler.fit import Body, Draft
from tasks.ruler.structure import ESSAY, NIAH, NOISE, Niah
from tasks.ruler.wording import Wording

_ESSAY_DEPTHS = 40


class _Needle(NamedTuple):
    depth: float
    """0 = before the first unit of the haystack, 1 = after the last."""
    sentence: str
    value: str
    value_start: int
    """Offset of `value` in `sentence`."""
    asked: bool


def draft(subset: str, name: str, split: str, rng: Random, wording: Wording) -> Draft:
    """Draw keys, values and depths of one example; the haystack is drawn as far as it is needed."""
    spec = NIAH[subset]
    keys, values = draws.keys(spec.key_type, split, rng), draws.values(spec.value_type, rng)
    owned = {key: list(islice(values, spec.values)) for key in islice(keys, spec.keys)}
    asked = tuple(owned)[: spec.queries]
    depths = _depths(spec, rng)
    needles = []
    for key, key_values in owned.items():
        for value in key_values:
            sentence, start = wording.needle(spec, key, value)
            needles.append(_Needle(depths.pop(), sentence, value, start, key in asked))
    needles.sort()
    stream = _haystack(spec, rng, keys, values, wording)
    units: list[str] = []
    separator = " " if spec.haystack == ESSAY else "\n"

    def body(num_units: int) -> Body:
        units.extend(islice(stream, max(0, num_units - len(units))))
        return _hide(units[:num_units], needles, separator)

    return Draft(
        id=name,
        subset=subset,
        frame=wording.niah(spec, asked),
        answers=tuple(value for key in asked for value in owned[key]),
        max_new_tokens=wording.new_tokens(subset),
        body=body,
    )


def _hide(pieces: list[str], needles: list[_Needle], separator: str) -> Body:
    at = [round(needle.depth * len(pieces)) + i for i, needle in enumerate(needles)]
    for position, needle in zip(at, needles, strict=True):
        pieces.insert(position, needle.sentence)
    spans = []
    for position, needle in zip(at, needles, strict=True):
        if needle.asked:
            start = sum(map(len, pieces[:position])) + len(separator) * position + needle.value_start
            spans.append((start, start + len(needle.value)))
    return Body(separator.join(pieces), tuple(spans))


def _depths(spec: Niah, rng: Random) -> list[float]:
    """Essays: distinct points of an even grid from 0 to 1, as in RULER. Lines: anywhere."""
    count = spec.keys * spec.values
    if spec.haystack == ESSAY:
        return [point / (_ESSAY_DEPTHS - 1) for point in rng.sample(range(_ESSAY_DEPTHS), count)]
    return [rng.random() for _ in range(count)]


def _haystack(spec: Niah, rng: Random, keys: Iterator[str], values: Iterator[str], wording: Wording) -> Iterator[str]:
    if spec.haystack == ESSAY:
        return wording.essay(rng)
    if spec.haystack == NOISE:
        return repeat(wording.noise_line)
    return (wording.needle(spec, key, value)[0] for key, value in zip(keys, values, strict=False))
