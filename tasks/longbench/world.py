"""People, towns and sentences for our own items."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

NUMBERS = "two", "three", "four", "five", "six", "seven", "eight", "nine"


class Draft(NamedTuple):
    """An item before it is counted and named."""

    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()


def words(text: str, between: str = " ") -> tuple[str, ...]:
    """The items of a line."""
    return tuple(text.split(between))


_FIRST = words(
    "Ada Bert Cleo Dora Emil Fritz Gerd Hilda Ilse Jakob Karla Lars Mona Nils Ottilie Paula Ralf Sonja Theo Ulla Vera"
)
_SURNAME_STARTS = words("Ber Dal El Fal Gar Hol Jen Kol Lin Mar Nor Ols Pel Ros Sten Tal Vol Wal Zel Brem")
_SURNAME_ENDS = words("ander berg dorf ert feld ing kamp lund mann quist rup sen stad vik wald")
_TOWN_STARTS = words("Alm Birk Dorn Eich Falk Grun Hasel Isar Kalk Linden Moor Nessel Ober Reh Sand Tannen Ulm Wies")
_TOWN_ENDS = words("ach au bach brunn burg eck hain haven hof horst ried see stein tal")
TRADES = words("baker carpenter cooper dyer glazier hatter joiner locksmith mason miller potter saddler tailor weaver")
_SUBJECTS = words(
    "The old bridge|A narrow lane|The northern gate|The weekly market|A row of limes|The public well", "|"
)
_STATES = words(
    "was repaired more than once|had seen better days|drew visitors from all around|gave little shade at noon|"
    "stayed much as it had been|was quiet for most of the year",
    "|",
)
_REASONS = words(
    "as the older people liked to say|though few took notice of it|and nobody thought that strange|"
    "whatever the weather was like|until the season turned|which the children found funny",
    "|",
)


class World:
    """Draws of one item; no person and no town comes twice."""

    def __init__(self, rng: Random, split: str) -> None:
        self.rng = rng
        starts = _SURNAME_STARTS[::2] if split == "dev" else _SURNAME_STARTS[1::2]
        surnames = [start + end for start in starts for end in _SURNAME_ENDS]
        towns = [start + end for start in _TOWN_STARTS for end in _TOWN_ENDS]
        self._surnames, self._towns = iter(rng.sample(surnames, len(surnames))), iter(rng.sample(towns, len(towns)))

    def person(self) -> str:
        return f"{self.rng.choice(_FIRST)} {next(self._surnames)}"

    def town(self) -> str:
        return next(self._towns)

    def year(self) -> str:
        return str(self.rng.randint(1650, 1930))

    def trade(self) -> str:
        return self.rng.choice(TRADES)

    def filler(self, count: int) -> str:
        """So many sentences that say nothing of people, towns or numbers."""
        return " ".join(self._sentences(count))

    def _sentences(self, count: int) -> Iterator[str]:
        for _ in range(count):
            yield f"{self.rng.choice(_SUBJECTS)} {self.rng.choice(_STATES)}, {self.rng.choice(_REASONS)}."
