"""Our own items with solved examples, numbered paragraphs, or code."""

from __future__ import annotations

from tasks.longbench.world import Draft, World, words

_KINDS = {
    "Person": ("Who built the {} of {}?", "Which painter came from the {} of {}?", "Who owned the {} at {}?"),
    "Year": (
        "When was the {} of {} opened?",
        "In what year did the {} of {} burn down?",
        "Since when is the {} at {}?",
    ),
    "Amount": ("How many steps has the {} of {}?", "How much did the {} of {} cost?", "How far is the {} from {}?"),
    "Place": ("Where is the {} of {}?", "What town is the {} near {} in?", "Where was the {} of {} made?"),
    "Reason": ("Why was the {} of {} sold?", "Why does the {} of {} lean?", "What made the {} of {} famous?"),
    "Description": ("What is the {} of {}?", "What does the {} of {} look like?", "What is a {} in {} like?"),
}
_THINGS = words("tower bridge mill chapel harbour market gate school well barn")
_FIELDS = words("name size weight color price owner origin season grade shelf")


def kinds(world: World) -> Draft:
    """Questions and what they ask for, 36 of them solved."""
    lines, order = [], [kind for kind in _KINDS for _ in range(6)]
    world.rng.shuffle(order)
    for kind in [*order, world.rng.choice(list(_KINDS))]:
        question = world.rng.choice(_KINDS[kind]).format(world.rng.choice(_THINGS), world.town())
        lines.append((f"Question: {question}\nType:", kind))
    solved = "\n".join(f"{question} {kind}" for question, kind in lines[:-1])
    return Draft(solved, lines[-1][0], (lines[-1][1],), tuple(_KINDS))


def trivia(world: World) -> Draft:
    """Passages with a question each, four of them solved."""
    found = []
    for _ in range(5):
        name, trade, town = world.person(), world.trade(), world.town()
        asked = world.rng.choice(((f"Which {trade} lived in {town}?", name), (f"In which town did {name} live?", town)))
        passage = f"{world.filler(2)} The {trade} {name} lived in {town}. {world.filler(2)}"
        found.append((f"Passage:\n{passage}\nQuestion:\n{asked[0]}\nAnswer:", asked[1]))
    return Draft("\n\n".join(f"{text} {answer}" for text, answer in found[:-1]), found[-1][0], (found[-1][1],))


def dialogues(world: World) -> Draft:
    """Conversations in which two people agree to meet, six of them retold."""
    found = []
    for _ in range(7):
        one, other = world.person().split()[0], world.person().split()[0]
        town, thing = world.town(), world.rng.choice(_THINGS)
        day = world.rng.choice(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"))
        lines = (
            f"{one}: Shall we see the {thing} in {town}?",
            f"{other}: Gladly, but not tomorrow.",
            f"{one}: What about {day}?",
            f"{other}: {day} is fine, see you there!",
        )
        found.append(("\n".join(lines), f"{one} and {other} will see the {thing} in {town} on {day}."))
    solved = [f"Dialogue: {talk}\nSummary: {told}" for talk, told in found[:-1]]
    return Draft("\n\n".join(solved), f"Dialogue: {found[-1][0]}\nSummary: ", (found[-1][1],))


def repeated(world: World) -> Draft:
    """Sixteen paragraphs, some of them copies."""
    number = world.rng.randint(6, 14)
    different = [f"{world.person()} came to {world.town()} in {world.year()}. {world.filler(2)}" for _ in range(number)]
    texts = [*different, *world.rng.choices(different, k=16 - number)]
    world.rng.shuffle(texts)
    return Draft(_numbered(texts), "", (str(number),))


def retold(world: World) -> Draft:
    """Thirty paragraphs, and one of them in other words."""
    people = [(world.person(), world.trade(), world.town()) for _ in range(30)]
    texts = [f"{name}, a {trade}, spent a long life in {town}. {world.filler(1)}" for name, trade, town in people]
    at = world.rng.randrange(len(people))
    name, trade, town = people[at]
    return Draft(
        _numbered(texts), f"This is about somebody from {town} who was a {trade}: {name}.", (f"Paragraph {at + 1}",)
    )


def code(world: World) -> Draft:
    """A class of functions that all have one form; the body of the last one is to come."""
    names = world.rng.sample([f"{one}_{other}" for one in _FIELDS for other in _FIELDS if one != other], 24)
    lines = ["class Record:"]
    for name in names:
        lines += [f"    def read_{name}(self):", f'        return self.values["{name}"]', ""]
    return Draft("\n".join(lines[:-2]) + "\n", "", (lines[-2],))


def repository(world: World) -> Draft:
    """Functions of one file, and another file that calls one after the other."""
    names = world.rng.sample([f"{one}_{other}" for one in _FIELDS for other in _FIELDS if one != other], 16)
    library = "\n\n".join(f"def count_{name}(table):\n    return len(table.column('{name}'))" for name in names)
    calls = [f"    totals['{name}'] = count_{name}(table)" for name in names[:9]]
    here = "from counts import *\n\n\ndef totals_of(table):\n    totals = {}\n" + "\n".join(calls[:-1]) + "\n"
    return Draft(f"counts.py\n{library}\n\ntotals.py\n", here, (calls[-1],))


def _numbered(texts: list[str]) -> str:
    return "\n\n".join(f"Paragraph {i}: {text}" for i, text in enumerate(texts, 1))
