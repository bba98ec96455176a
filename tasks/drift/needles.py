"""Needles: a word pair as key, a number as value. Word keys of "dev" and "test" never coincide."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from importlib.resources import files
from random import Random
from typing import NamedTuple


class Needle(NamedTuple):
    key: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The code of {self.key}: {self.value}."


def needles(split: str, rng: Random) -> Iterator[Needle]:
    """Needles without end, no key or value twice."""
    adjectives, nouns = _words("adjectivelist.txt"), _words("nounlist.txt")[0 if split == "dev" else 1 :: 2]
    seen = set[str]()
    while True:
        key, value = f"{rng.choice(adjectives)}-{rng.choice(nouns)}", str(rng.randint(1_000_000, 9_999_999))
        if not {key, value} & seen:
            seen |= {key, value}
            yield Needle(key, value)


@functools.cache
def _words(file_name: str) -> Sequence[str]:
    """Plain lower-case words of one of wonderwords' lists, without its list of profanities, sorted."""
    folder = files("wonderwords.assets")
    unwanted, words = ((folder / n).read_text(encoding="utf-8").split("\n") for n in ("profanitylist.txt", file_name))
    return sorted(word for word in {*words} - {*unwanted} if word.isascii() and word.isalpha() and word.islower())
