"""A haystack of plain prose without digits, and the needle that is hidden in it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from importlib.resources import files
from random import Random
from typing import NamedTuple

_PATTERNS = """The {trade} opened a shop near {place}, and {weather} nobody came.
Letters for {place} were left with the {trade}, who read them aloud {weather}.
A {trade} and a {other_trade} shared a table at {place} and spoke about {matter}.
{matter} was discussed at {place} until the {trade} fell asleep.
The road past {place} is older than the town, though the {trade} denies it.
Every child knew the {trade} by the sound of the cart {weather}.
The {other_trade} owed the {trade} a favour and paid it with advice on {matter}.
It is said that the first {trade} of the town came from {place} and stayed because of {matter}.
{weather}, the windows of {place} were lit and the {trade} counted the guests.
A dog slept in front of {place} and let nobody in but the {other_trade}.
The {trade} thought little of {matter}, and less of people who praised it.
Two boats passed below {place} {weather}, one loaded with hay, the other empty.
The clock of {place} had stopped, so the {trade} asked the {other_trade} for the time.
Much has been written about {matter}, but the {trade} had read none of it.
""".splitlines()
_TRADES = "miller|tailor|cooper|ferryman|clerk|gardener|smith|teacher|weaver|mason|potter|printer|saddler|tanner"
_PLACES = (
    "the corn exchange|the old wharf|the toll house|the poplar row|the town well|the granary|the east gate|the inn "
    "by the ford|the chapel|the cattle market|the stone steps|the walled garden"
)
_MATTERS = (
    "the price of candles|the new bridge|a lost inheritance|the habits of swallows|the coming harvest|a song "
    "without an ending|the mayor's hat|the depth of the lake|the art of keeping silent|a wedding in the next valley"
)
_WEATHERS = (
    "when the fog lifted|on market days|during the thaw|after the first snow|on warm nights|before the storm|in a "
    "week of rain|towards the end of summer"
)


class Needle(NamedTuple):
    key: str
    value: str

    @property
    def head(self) -> str:
        return f"The code of {self.key}:"

    @property
    def sentence(self) -> str:
        return f"{self.head} {self.value}."


def needle(split: str, rng: Random) -> Needle:
    """A word pair as key, of which "dev" and "test" have no noun in common, and a 7-digit number as value."""
    adjectives, nouns = _words("adjectivelist.txt"), _words("nounlist.txt")[0 if split == "dev" else 1 :: 2]
    return Needle(f"{rng.choice(adjectives)}-{rng.choice(nouns)}", str(rng.randint(1_000_000, 9_999_999)))


def sentences(rng: Random) -> Iterator[str]:
    """Sentences without end, fully determined by the state of `rng`."""
    trades = _TRADES.split("|")
    places, matters, weathers = _PLACES.split("|"), _MATTERS.split("|"), _WEATHERS.split("|")
    while True:
        for pattern in rng.sample(_PATTERNS, len(_PATTERNS)):
            trade, other_trade = rng.sample(trades, 2)
            place, matter, weather = rng.choice(places), rng.choice(matters), rng.choice(weathers)
            sentence = pattern.format(trade=trade, other_trade=other_trade, place=place, matter=matter, weather=weather)
            yield sentence[0].upper() + sentence[1:]


@functools.cache
def _words(file_name: str) -> Sequence[str]:
    """Plain lower-case words of one of wonderwords' lists, without its list of profanities, sorted."""
    folder = files("wonderwords.assets")
    unwanted, words = ((folder / n).read_text(encoding="utf-8").split("\n") for n in ("profanitylist.txt", file_name))
    return sorted(word for word in {*words} - {*unwanted} if word.isascii() and word.isalpha() and word.islower())
