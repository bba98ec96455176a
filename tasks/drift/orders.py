"""In which order the turns of a conversation ask about topics."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence


def revisits(order: Sequence[int]) -> tuple[int, ...]:
    """Per turn the number of turns since its topic was last asked about; 0 where it never was."""
    last: dict[int, int] = {}
    found = []
    for turn, topic in enumerate(order):
        found.append(turn - last.get(topic, turn))
        last[topic] = turn
    return tuple(found)


@functools.cache
def orders(turns: int, topics: int, distances: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every order of at most `topics` topics, numbered as they first come, with revisits at just these distances.

    Each distance occurs, and none more than once oftener than another. Empty if there is no such order.
    """
    return tuple(order for order in _extended((), turns, topics, distances) if _even(revisits(order), distances))


def _extended(order: tuple[int, ...], turns: int, topics: int, distances: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if len(order) == turns:
        yield order
        return
    for topic in range(min(max(order, default=-1) + 2, topics)):
        longer = (*order, topic)
        if revisits(longer)[-1] in (0, *distances):
            yield from _extended(longer, turns, topics, distances)


def _even(found: Sequence[int], distances: tuple[int, ...]) -> bool:
    counts = [found.count(distance) for distance in distances]
    return min(counts) > 0 and max(counts) - min(counts) <= 1
