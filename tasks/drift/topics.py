"""Prose on ten topics, each with words of its own, so that a question on one of them turns attention to its part.

No digits occur, so no number of a needle can be met by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple


class Topic(NamedTuple):
    """A topic's title and the words that its sentences are made of."""

    title: str
    things: tuple[str, ...]
    places: tuple[str, ...]
    actions: tuple[str, ...]


def _items(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


def _topic(title: str, things: str, places: str, actions: str) -> Topic:
    return Topic(title, _items(things), _items(places), _items(actions))


TOPICS = (
    _topic(
        "the herring fleet",
        "the torn drift net|a barrel of brine|the tide table|a coil of tarred rope|the anchor winch|a crate of ice",
        "the long quay|the slipway|the fish auction|the outer buoy|the smoke house",
        "splicing ropes|scraping the hull|salting the catch|reading the swell|sorting the boxes by weight",
    ),
    _topic(
        "the bakery",
        "the sourdough crock|a tray of rolls|the flour sieve|a burnt rye loaf|the proving basket|a sack of spelt",
        "the bread oven|the kneading table|the shop counter|the flour loft|the cooling rack by the door",
        "kneading before dawn|glazing the buns|weighing the dough|raking out the embers|feeding the starter",
    ),
    _topic(
        "the observatory",
        "the cracked mirror|a chart of faint stars|the eyepiece box|a notebook of comets|the clock drive|a red lamp",
        "the dome|the darkroom|the mounting pier|the hill path to the telescope|the library of plates",
        "timing an eclipse|polishing a lens|plotting an orbit|waiting for the clouds to part|measuring a double star",
    ),
    _topic(
        "the vineyard",
        "the pruning hook|a cask of young wine|the trellis wire|a basket of late grapes|the press screw|a tasting cup",
        "the south terrace|the pressing shed|the cellar stairs|the row of old vines|the cooper's bench",
        "tying the shoots|turning the must|topping up the casks|watching for frost|cutting the ripe bunches",
    ),
    _topic(
        "the railway",
        "the signal lever|a bundle of waybills|the guard's whistle|a wagon of coal|the points lamp|a bent rail spike",
        "the goods siding|the signal box|the engine shed|the level crossing|the platform under the clock",
        "shunting the wagons|oiling the axles|telegraphing the delay|walking the track|stoking the boiler",
    ),
    _topic(
        "the theatre",
        "the painted forest|a velvet cloak|the prompt book|a tin thunder sheet|the trapdoor bolt|a box of false beards",
        "the orchestra pit|the dressing room|the upper gallery|the scenery dock|the box office",
        "rehearsing the duel|mending the curtain|learning the second act|dimming the footlights|tuning the harp",
    ),
    _topic(
        "the hospital",
        "the fever chart|a jar of lint|the linen trolley|a bottle of iodine|the night bell|a pair of crutches",
        "the children's ward|the dispensary|the ambulance yard|the quiet corridor|the wash room",
        "changing the dressings|counting the pills|boiling the needles|listening to a cough|writing the night report",
    ),
    _topic(
        "the beekeepers",
        "the smoker|a frame of dark honey|the queen cage|a skep of straw|the wax melter|a veil with a hole in it",
        "the heather moor|the row of hives|the honey shed|the lime avenue|the swarm tree",
        "catching a swarm|spinning the combs|marking the queens|feeding syrup in autumn|counting the drones",
    ),
    _topic(
        "the glass works",
        "the blowing iron|a twisted goblet|the melting pot|a heap of broken panes|the cobalt tin|a pear wood mould",
        "the furnace hall|the annealing oven|the sand store|the engraver's desk|the packing room",
        "gathering the melt|cutting the rims|grinding a stopper|mixing sand and potash|pulling a thread of blue",
    ),
    _topic(
        "the mountain rescue",
        "the folding stretcher|a climbing rope|the storm lantern|a flask of hot broth|the avalanche pole|a torn map",
        "the high hut|the north gully|the glacier edge|the rope store|the pass below the cairn",
        "searching by lamplight|crossing the ice|belaying the doctor|training the young dogs|waxing the skis",
    ),
)

_NAMES = _items(
    "Agathe|Bertil|Carla|Dimitri|Elena|Fergus|Gudrun|Hector|Irma|Joachim|Katya|Linus|Mirela|Nestor|Odile|Pavel|Renata|"
    "Silas|Tabea|Ulrich|Valerie|Winfried|Yolanda|Zoltan|Astrid|Benno|Celeste|Dragan|Estelle|Florian"
)
_TIMES = _items("in a hard winter|on quiet mornings|towards evening|after the holidays|all that year|when it rained")
_TEMPERS = _items("patient|hasty|stubborn|cheerful|careful|silent|curious|gruff|generous|absent-minded|proud|thrifty")

_PATTERNS = """{time} {name} could be found at {place}, {action} and humming to nobody in particular.
{name} would never lend out {thing}, not even to {friend}, who asked every week.
Whoever works for {title} long enough ends up {action} in their sleep, or so {friend} says.
There was a quarrel at {place} about {thing}, and it lasted until {name} left the room.
{friend} had put {thing} beside {other_thing} and forgot which of the two was needed.
The visitors saw {place} first and {other_place} last, and liked {name} better than either.
"You are too {temper} for {title}," {name} told {friend}, and both of them laughed.
Without {thing} there is no sense in {action}, as {name} explained to a {temper} stranger.
{time} the talk at {place} was of {title} and of little else.
{name} learned {action} from {friend}, whose {temper} manner made it look easy.
Between {place} and {other_place} somebody had dropped {thing}, and {friend} went back for it.
It was a {temper} letter that {name} wrote about {title}, with a drawing of {thing} in the margin.
Nothing at {other_place} had changed except {thing}, which {name} had moved {time}.
{friend} gave up {action} and took charge of {thing} instead, to everyone's relief.
They agreed that {action} should wait until {thing} was back at {place}.
{name} described {other_place} so well that {friend} could have drawn it, down to {other_thing}.
""".strip().splitlines()


def sentences(topic: Topic, rng: Random) -> Iterator[str]:
    """Sentences on a topic without end, fully determined by the state of `rng`."""
    while True:
        for pattern in rng.sample(_PATTERNS, len(_PATTERNS)):
            name, friend = rng.sample(_NAMES, 2)
            thing, other_thing = rng.sample(topic.things, 2)
            place, other_place = rng.sample(topic.places, 2)
            sentence = pattern.format(
                title=topic.title,
                name=name,
                friend=friend,
                thing=thing,
                other_thing=other_thing,
                place=place,
                other_place=other_place,
                action=rng.choice(topic.actions),
                time=rng.choice(_TIMES),
                temper=rng.choice(_TEMPERS),
            )
            yield sentence[0].upper() + sentence[1:]
