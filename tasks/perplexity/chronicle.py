"""A chronicle of a village without end: prose that repeats itself, so that what was read before helps with what comes.

Every villager has a trade, a house, an animal and a habit that nobody else has, drawn once per text; sentences tell of
them again and again, in other words and another order. Who has forgotten the beginning can only guess at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple


def _items(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


_NAMES = _items(
    "Adela|Basil|Cosima|Desmond|Edda|Fritz|Gloria|Henrik|Isolde|Jasper|Klara|Lorenz|Marit|Norbert|Olga|Percy|Quirin|"
    "Ruth|Stefan|Tilda|Urban|Vera|Wolfram|Zita|Amos|Brigid|Cyril|Doris|Emil|Frida"
)
_SURNAMES = _items(
    "Abel|Brandt|Castle|Dunmore|Eklund|Falk|Garrow|Holt|Ibsen|Jarrow|Keller|Lund|Merton|Nash|Ostrow|Pike|Quill|Rowe|"
    "Sander|Thorne|Udall|Vance|Weller|York|Ziegler|Ashby|Bower|Crane|Dorn|Ember"
)
_TRADES = _items(
    "mends clocks|bakes bread|keeps the ferry|shoes horses|teaches the children|builds walls|prints the weekly paper|"
    "weaves blankets|cuts stone|brews beer|paints signs|binds books|digs wells|plays the organ|carves spoons"
)
_HOUSES = _items(
    "the house with green shutters|the cottage by the weir|the last house on the hill|the rooms above the dairy|the "
    "old customs post|the barn behind the church|the narrow house in Mill Lane|the farm below the wood|the "
    "gatehouse|the house without a chimney|the caravan in the orchard|the brick villa near the station"
)
_ANIMALS = _items(
    "a lame heron|two white goats|a parrot that swears|a very old tortoise|three geese|a blind greyhound|a tame crow|"
    "a grey mule|a cat called Bishop|a pig of great dignity|a pair of ferrets|a donkey that follows strangers"
)
_HABITS = _items(
    "counts the stairs aloud|never wears a hat|sleeps until noon|writes letters to the king|whistles in church|walks "
    "backwards up the hill|eats soup for breakfast|collects broken cups|talks to the weather vane|pays with old coins"
)
_TIMES = _items(
    "In March|On the day of the fair|Before the harvest|That winter|One Sunday|After the flood|In the dry year"
)

_PATTERNS = """{full}, who {trade}, lives in {house}.
{time} {name} of {house} was seen with {animal} again.
Nobody but {full} owns {animal}, and {other} would not take it as a gift.
"There goes the one who {habit}," people say of {full}.
{time} {full} came to see {other}, who {other_trade}, and stayed for supper.
If you look for {name}, who {trade}, ask at {house}.
{animal_start}, as everybody knows, belongs to {full} and to no other.
{time} the roof of {house} leaked, and {full} had to sleep at {other_house}, with {other}.
{other}, who {other_habit}, finds it odd that {name} {habit}.
The chronicle says of {full}: {trade}, {habit}, and keeps {animal}.
""".splitlines()
_VILLAGERS = 10


class _Villager(NamedTuple):
    name: str
    surname: str
    trade: str
    house: str
    animal: str
    habit: str

    @property
    def full(self) -> str:
        return f"{self.name} {self.surname}"


def sentences(rng: Random) -> Iterator[str]:
    """Sentences without end, fully determined by the state of `rng`."""
    people = [
        _Villager(*traits)
        for traits in zip(
            *(rng.sample(of, _VILLAGERS) for of in (_NAMES, _SURNAMES, _TRADES, _HOUSES, _ANIMALS, _HABITS)),
            strict=True,
        )
    ]
    while True:
        told, other = rng.sample(people, 2)
        yield rng.choice(_PATTERNS).format(
            time=rng.choice(_TIMES),
            animal_start=told.animal[0].upper() + told.animal[1:],
            full=told.full,
            other=other.full,
            other_trade=other.trade,
            other_house=other.house,
            other_habit=other.habit,
            **told._asdict(),
        )
