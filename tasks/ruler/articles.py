"""Generated articles with checkable answers: towns for qa_1, workshops and their founders for qa_2.

Every name is drawn once per example, so a question has one answer. "dev" and "test" build names from disjoint parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from random import Random
from typing import NamedTuple

from tasks.ruler import draws, prose
from tasks.ruler.questions import Document, Question

_STARTS = prose.choices("""
Ald|Ash|Barn|Beck|Birch|Bram|Brock|Carl|Chil|Cran|Dal|Dun|Elder|Fen|Fern|Gale|Gar|Glen|Hart|Hazel|Helm|Hollow|
Ing|Kel|Kirk|Lang|Lark|Lind|Lock|Mal|Marl|Mere|Mill|Nether|Oak|Orm|Pend|Quarn|Raven|Red|Rush|Sal|Sedge|Shel|
Stan|Stern|Swin|Tarn|Thorn|Thresh|Ul|Wald|Wens|West|Whit|Wil|Winter|Wood|Yar|Yew""")
_TOWN_ENDS = prose.choices("""
bridge|burn|bury|by|cester|combe|dale|den|field|ford|gate|ham|holm|hurst|leigh|ley|low|mouth|port|sea|shaw|
stead|stoke|stow|thorpe|ton|wade|wick|worth""")
_SURNAME_ENDS = prose.choices("""
acre|aker|bard|cott|croft|ell|er|ett|grave|ings|kin|man|mark|ridge|sen|son|stone|well|wright""")
_CRAFTS = prose.choices("""
Bell Foundry|Boatyard|Bookbindery|Brewery|Candle Works|Clockworks|Cutlery|Dye House|Flour Mill|Furnace|
Glassworks|Instrument Works|Iron Works|Lens Works|Lime Kiln|Locksmiths|Map Press|Needle Works|Organ Works|Paper Mill|
Pottery|Printing House|Ropewalk|Saddlery|Salt Works|Sail Loft|Shoe Works|Silk Mill|Slate Works|Spinning Mill|Tannery|
Tile Works|Toy Works|Type Foundry|Umbrella Works|Violin Workshop|Wagon Works|Wax Works|Weaving Mill|Wire Works""")
_MONTHS = prose.choices("January|February|March|April|May|June|July|August|September|October|November|December")
_UNBOUNDED = 1 << 20


def question(subset: str, split: str, rng: Random) -> Question:
    """A question of qa_1 (one document answers it) or qa_2 (two are needed), with endless other documents."""
    others: Iterator[Document]
    if subset == "qa_1":
        towns = _towns(split, rng)
        documents, asked, support = next(towns)
        siblings = [document for document in documents if document is not support]
        gold: tuple[Document, ...] = (support,)
        others = chain(siblings, (document for found, *_ in towns for document in found))
    else:
        pairs = _workshops(split, rng)
        gold, asked = next(pairs)
        others = (document for documents, _ in pairs for document in documents)
    return Question(asked.text, asked.opening, (asked.answer,), gold, others, _UNBOUNDED, "", "synthetic")


class _Asked(NamedTuple):
    text: str
    opening: str
    answer: str


def _names(ends: tuple[str, ...], split: str, rng: Random) -> Iterator[str]:
    """Distinct names: a start and an end, later two starts and an end."""
    starts = _STARTS[0 if split == "dev" else 1 :: 2]
    for index in draws.distinct(len(starts) * len(ends), rng):
        yield starts[index // len(ends)] + ends[index % len(ends)]
    for index in draws.distinct(len(starts) ** 2 * len(ends), rng):
        first, rest = divmod(index, len(starts) * len(ends))
        yield f"{starts[first]} {starts[rest // len(ends)]}{ends[rest % len(ends)]}"


def _people(split: str, rng: Random) -> Iterator[str]:
    for surname in _names(_SURNAME_ENDS, split, rng):
        yield f"{rng.choice(prose.NAMES)} {surname}"


def _document(title: str, facts: tuple[str, str], rng: Random) -> Document:
    """Two facts and two sentences of prose."""
    return Document(title, " ".join((*facts, *islice(prose.sentences(rng), 2))))


def _towns(split: str, rng: Random) -> Iterator[tuple[list[Document], _Asked, Document]]:
    """Per town its six paragraphs, a question on one of them, and that paragraph."""
    names, people = _names(_TOWN_ENDS, split, rng), _people(split, rng)
    while True:
        town, neighbour, river = islice(names, 3)
        architect, founder, painter, donor = islice(people, 4)
        year, trade, month = str(rng.randint(1150, 1890)), rng.choice(prose.TRADES), rng.choice(_MONTHS)
        by_year = _Asked(f"In which year was {town} founded?", f"{town} was founded in", year)
        by_founder = _Asked(f"Who founded {town}?", f"The founder of {town} was", founder)
        facts = [
            (
                (f"{town} is a town on the river {river}.", f"The road to {neighbour} leaves it in the north."),
                _Asked(f"On which river is {town}?", f"{town} is a town on the river", river),
            ),
            (
                (f"{town} was founded in {year}.", f"The founder of {town} was {founder}, who came from {neighbour}."),
                rng.choice((by_year, by_founder)),
            ),
            (
                (f"The town hall of {town} was built by {architect}.", "It has two towers of unequal height."),
                _Asked(f"Who built the town hall of {town}?", f"The town hall of {town} was built by", architect),
            ),
            (
                (f"The people of {town} have long lived by {trade}.", "Half of what they make is sold abroad."),
                _Asked(f"What do the people of {town} live by?", f"The people of {town} have long lived by", trade),
            ),
            (
                (f"The yearly fair of {town} is held in {month}.", "It lasts for nine days."),
                _Asked(f"In which month is the yearly fair of {town}?", f"The yearly fair of {town} is held in", month),
            ),
            (
                (f"The museum of {town} shows pictures by {painter}.", f"They were a gift of {donor}."),
                _Asked(f"Whose pictures are in {town}?", f"The museum of {town} shows pictures by", painter),
            ),
        ]
        documents = [_document("", sentences, rng) for sentences, _ in facts]
        chosen = rng.randrange(len(facts))
        yield documents, facts[chosen][1], documents[chosen]


def _workshops(split: str, rng: Random) -> Iterator[tuple[tuple[Document, Document], _Asked]]:
    """Per workshop two documents, on it and on its founder, and a question that needs both."""
    owners, people = _names(_SURNAME_ENDS, split, rng), _people(split, rng)
    towns = _names(_TOWN_ENDS, split, rng)
    while True:
        workshop, person = f"{next(owners)} {rng.choice(_CRAFTS)}", next(people)
        seat, town, other = islice(towns, 3)
        founder, year = f"the founder of the {workshop}", str(rng.randint(1640, 1880))
        fact, text, answer = rng.choice(
            [
                ("was born in", f"In which town was {founder} born?", town),
                ("was born in", f"In which year was {founder} born?", year),
                ("went to school in", f"In which town did {founder} go to school?", town),
            ]
        )
        age = rng.randint(20, 90)
        about = (f"The {workshop} stood in {seat}.", f"It was founded by {person} and closed after {age} years.")
        life = (f"{person} {fact} {answer}.", f"Later {person} moved to {other}.")
        asked = _Asked(text, f"{founder[0].upper()}{founder[1:]} {fact}", answer)
        yield (_document(workshop, about, rng), _document(person, life, rng)), asked
