"""Endless plain English prose from our own sentence patterns: the "essay" haystack.

A scene picks two people, two places and two trades, and five to nine sentences tell of them; then the
next scene begins. No digits occur, so no number of a needle can be met by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random


def choices(text: str) -> tuple[str, ...]:
    """The items between bars, without the line breaks."""
    return tuple(" ".join(item.split()) for item in text.split("|"))


NAMES = choices("""
Agnes|Albert|Amara|Anselm|Beatrix|Bruno|Carmen|Cedric|Clara|Conrad|Dalia|Edith|Elias|Farid|Flora|Gideon|
Greta|Hamza|Harriet|Hugo|Ines|Isaac|Ivy|Jonas|Judith|Kasimir|Leila|Leopold|Lydia|Magnus|Malika|Martha|Matteo|Nadia|
Noor|Olive|Oscar|Petra|Quentin|Rosa|Rufus|Salma|Simon|Tamar|Tobias|Ursula|Viktor|Wanda|Xenia|Yusuf""")

PLACES = choices("""
the harbour|the old mill|the upper valley|the market square|the ferry landing|the orchard|the north
road|the town library|the quarry|the river bend|the railway yard|the salt marsh|the chapel hill|the print shop|the
glass house|the stone bridge|the fishing village|the eastern pasture|the weaving hall|the lighthouse|the school
garden|the ridge above the lake|the boat shed|the bakery on the corner|the drained canal|the observatory|the timber
yard|the winter barn""")

TRADES = choices("""
mending nets|grinding lenses|keeping bees|binding books|drawing maps|tuning pianos|growing pears|carving
spoons|dyeing wool|repairing clocks|baking rye bread|breeding sheep|painting signs|pressing cider|building small
boats|casting bells|collecting ferns|restoring organs|measuring the tides|teaching arithmetic|cutting slate|training
dogs|copying old songs|planting hedges|blowing glass|sorting letters|surveying roads|making paper""")

SEASONS = choices("""
in early spring|late in the summer|during the first frost|in the wet months|at harvest time|when the
snow had gone|in the long dry autumn|around midsummer|on the shortest days|while the wind came from the sea|before
the rains began|in a mild winter""")

QUALITIES = choices("""
patient|careless|generous|stubborn|quiet|curious|cautious|proud|clever|honest|restless|cheerful|
strict|gentle|practical|forgetful|modest|bold|thorough|absent-minded""")

THINGS = choices("""
a worn ledger|three sharp knives|a borrowed ladder|two sacks of barley|a brass lamp|a roll of canvas|an
unfinished letter|a basket of plums|a cracked mirror|a set of copper weights|a bundle of dry reeds|a heavy iron key|
a pair of good boots|a tin of varnish|a faded photograph|a jar of honey|a length of tarred rope|a wooden rule|a
sheet of blotting paper|an almanac without its cover|a folded blanket|a box of bent nails""")

LESSONS = choices("""
that good work is mostly a matter of returning to it|that haste costs more than it saves|that a plain
answer is often the kindest one|that tools last as long as the care they get|that nobody learns much from being
right|that the weather decides more than the calendar does|that small repairs are cheaper than large regrets|that a
neighbour is worth more than a bargain|that most quarrels begin with a guess|that the eye tires long before the
hand|that old habits are easier to bend than to break|that a thing explained twice is half understood|that waiting
is also a kind of labour|that the best plans leave room for accidents""")

EVENTS = choices("""
the bridge was closed for repairs|a stranger asked for lodging|the price of flour had doubled|the well
ran low|a storm took the roof of the shed|the council met until midnight|the last ferry left without them|a letter
arrived from the coast|the orchard flowered twice|the lamp went out and nobody noticed|two carts collided by the
gate|the river froze from bank to bank|a travelling choir filled the square|the new apprentice mixed up the labels""")

PATTERNS = """{season}, {name} spent most mornings at {place}, {trade} and saying very little.
{name} had learned {trade} from an aunt who believed {lesson}.
People at {place} thought {name} rather {quality}, and {friend} did nothing to correct them.
One evening {event}, and {name} had to leave {thing} behind at {other_place}.
It was {friend} who first remarked {lesson}.
Nobody could say why {name} kept {thing} beside the door, least of all {friend}.
The road from {place} to {other_place} is short, yet {name} seldom walked it without stopping to talk.
{friend}, who was more {quality} than {name}, preferred {other_trade} to anything that needed an audience.
When {event}, the two of them were still arguing about {thing}.
There is a story told at {place} about {name}, {thing} and a very {quality} goat.
{name} once wrote to a cousin {lesson}, and then crossed the sentence out.
After {event}, {friend} gave up {other_trade} for a whole season and helped at {place} instead.
A {quality} person would have sold {thing} at once, but {name} carried it as far as {other_place}.
{season} the light at {place} changes so slowly that {friend} could tell the hour by it.
Those who tried {trade} for a living soon found {lesson}.
"You are too {quality} for {other_trade}," said {friend}, and {name} laughed about it for days.
What {name} liked about {place} was that no one there asked after {thing}.
They agreed, as they often did, {lesson}, and went home by way of {other_place}.
Since {trade} pays badly, {name} also looked after {place} for a few hours every week.
By the time {event}, {friend} had already packed {thing} and said goodbye.
Some visitors came to {place} only to watch {name} {trade}, which made the work slower but pleasanter.
{name} kept a diary that mentions {thing} far more often than it mentions {friend}.
It takes a {quality} temper to go on {trade} while {event}.
Years later {friend} would still describe {other_place} as it looked {season}, and always add {lesson}.
Between {place} and {other_place} there was a bench where {name} left {thing} for whoever needed it.
{friend} doubted it, yet everyone else accepted {lesson}.
The children of the district called {name} the most {quality} neighbour they had, mostly because of {thing}.
On the day {event}, nothing else happened at {place}, and {name} noted even that.
Neither {trade} nor {other_trade} can be hurried, which {friend} found out {season}.
So {name} went back to {trade}, and {place} went back to its {quality} silence.
""".strip().splitlines()


def sentences(rng: Random) -> Iterator[str]:
    """Yield sentences without end, fully determined by the state of `rng`."""
    while True:
        name, friend = rng.sample(NAMES, 2)
        place, other_place = rng.sample(PLACES, 2)
        trade, other_trade = rng.sample(TRADES, 2)
        for pattern in rng.sample(PATTERNS, rng.randint(5, 9)):
            sentence = pattern.format(
                name=name,
                friend=friend,
                place=place,
                other_place=other_place,
                trade=trade,
                other_trade=other_trade,
                season=rng.choice(SEASONS),
                quality=rng.choice(QUALITIES),
                thing=rng.choice(THINGS),
                lesson=rng.choice(LESSONS),
                event=rng.choice(EVENTS),
            )
            yield sentence[0].upper() + sentence[1:]
