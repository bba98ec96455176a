"""Random words, keys and values. What "dev" and "test" draw from word lists is disjoint."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.resources import files
from random import Random
from uuid import UUID

from tasks.ruler.structure import NUMBERS, WORDS


def keys(key_type: str, split: str, rng: Random) -> Iterator[str]:
    """Yield distinct keys without end. Word keys of "dev" and "test" never coincide: their nouns are disjoint."""
    if key_type != WORDS:
        while True:
            yield _uuid(rng)
    adjectives, nouns = _words("adjectivelist.txt"), _words("nounlist.txt")[0 if split == "dev" else 1 :: 2]
    for index in distinct(len(adjectives) * len(nouns), rng):
        yield f"{adjectives[index // len(nouns)]}-{nouns[index % len(nouns)]}"


def list_words(split: str, rng: Random) -> Iterator[str]:
    """Yield distinct nouns, adjectives and verbs, then (beyond some 4,000) distinct adjective-noun pairs."""
    every = sorted({*_words("nounlist.txt"), *_words("adjectivelist.txt"), *_words("verblist.txt")})
    single = every[0 if split == "dev" else 1 :: 2]
    yield from rng.sample(single, len(single))
    yield from keys(WORDS, split, rng)


def values(value_type: str, rng: Random) -> Iterator[str]:
    """Yield distinct values without end: 7-digit numbers or version-4 UUIDs."""
    if value_type != NUMBERS:
        while True:
            yield _uuid(rng)
    for index in distinct(9_000_000, rng):
        yield str(1_000_000 + index)


def distinct(population: int, rng: Random) -> Iterator[int]:
    """Yield every number below `population` once, in random order, drawing only what is taken."""
    moved: dict[int, int] = {}
    for last in reversed(range(population)):
        index = rng.randrange(last + 1)
        yield moved.get(index, index)
        moved[index] = moved.get(last, last)


def _uuid(rng: Random) -> str:
    return str(UUID(int=rng.getrandbits(128), version=4))


@functools.cache
def _words(file_name: str) -> tuple[str, ...]:
    """Plain lower-case words of one of wonderwords' lists, without its list of profanities, sorted."""
    folder = files("wonderwords.assets")
    unwanted = set((folder / "profanitylist.txt").read_text(encoding="utf-8").split("\n"))
    words = set((folder / file_name).read_text(encoding="utf-8").split("\n")) - unwanted
    return tuple(sorted(word for word in words if word.isascii() and word.isalpha() and word.islower()))
