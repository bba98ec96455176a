"""Our own word problems, as texts in which numbers are filled in. The answers are what `results` computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Story(NamedTuple):
    question: str
    solution: str
    numbers: tuple[range, ...]
    """Where a, b, c are drawn from."""
    results: Callable[..., tuple[int, ...]]
    """Gives x, y, z from a, b, c; the last one is the answer."""


STORIES = (
    Story(
        "A baker fills {a} trays with {b} rolls each. By noon {c} rolls are sold. How many rolls are left?",
        "The trays hold {a} * {b} = {x} rolls.\nAfter noon {x} - {c} = {y} rolls are left.",
        (range(6, 12), range(15, 25), range(20, 80)),
        lambda a, b, c: (a * b, a * b - c),
    ),
    Story(
        "Nora reads {a} pages on Monday and {b} pages more on Tuesday. Her book has {c} pages. "
        "How many pages does she still have to read after Tuesday?",
        "On Tuesday she reads {a} + {b} = {x} pages.\nIn two days that is {a} + {x} = {y} pages.\n"
        "She still has {c} - {y} = {z} pages to read.",
        (range(20, 40), range(5, 20), range(150, 300)),
        lambda a, b, c: (a + b, a + a + b, c - (a + a + b)),
    ),
    Story(
        "A bus leaves with {a} people. At the first stop {b} people get on and {c} get off. "
        "At the second stop half of the people get off. How many people stay on the bus?",
        "After the first stop there are {a} + {b} - {c} = {x} people.\nHalf of them stay, {x} / 2 = {y} people.",
        (range(30, 50, 2), range(6, 16, 2), range(2, 12, 2)),
        lambda a, b, c: (a + b - c, (a + b - c) // 2),
    ),
    Story(
        "Tickets for the fair cost ${a} for adults and ${b} for children. A club buys {c} tickets of each kind. "
        "How many dollars does the club pay?",
        "One ticket of each kind costs {a} + {b} = ${x}.\nThe club pays {x} * {c} = ${y}.",
        (range(9, 15), range(3, 8), range(12, 40)),
        lambda a, b, c: (a + b, (a + b) * c),
    ),
    Story(
        "A gardener plants {a} rows of {b} tulips. One row is eaten by deer. "
        "Each tulip that is left sells for ${c}. How many dollars do they bring?",
        "Rows that are left: {a} - 1 = {x}.\nThey hold {x} * {b} = {y} tulips.\nThese bring {y} * {c} = ${z}.",
        (range(5, 12), range(8, 20), range(2, 5)),
        lambda a, b, c: (a - 1, (a - 1) * b, (a - 1) * b * c),
    ),
    Story(
        "Sam saves ${a} every week. After {b} weeks he buys a lamp for ${c}. How many dollars does he keep?",
        "He saves {a} * {b} = ${x}.\nHe keeps {x} - {c} = ${y}.",
        (range(11, 25), range(6, 14), range(25, 60)),
        lambda a, b, c: (a * b, a * b - c),
    ),
    Story(
        "A mill grinds {a} sacks of flour an hour and works {b} hours a day. How many sacks does it grind in {c} days?",
        "In a day it grinds {a} * {b} = {x} sacks.\nIn {c} days it grinds {x} * {c} = {y} sacks.",
        (range(25, 60), range(7, 12), range(8, 20)),
        lambda a, b, c: (a * b, a * b * c),
    ),
    Story(
        "Lena is {a} years old. Her uncle is {b} times as old as she is. How old will he be in {c} years?",
        "Her uncle is {a} * {b} = {x} years old.\nIn {c} years he will be {x} + {c} = {y}.",
        (range(8, 15), range(3, 5), range(2, 12)),
        lambda a, b, c: (a * b, a * b + c),
    ),
    Story(
        "A rope of {a} meters is cut in {b} equal pieces. Then {c} meters are cut off one piece. "
        "How many meters long is that piece?",
        "Each piece has {a} / {b} = {x} meters.\nWhat is left of it is {x} - {c} = {y} meters.",
        (range(120, 480, 60), range(3, 7), range(2, 9)),
        lambda a, b, c: (a // b, a // b - c),
    ),
    Story(
        "A cook needs {a} eggs for one cake. She bakes {b} cakes and has {c} eggs. How many eggs must she buy?",
        "She needs {a} * {b} = {x} eggs.\nShe must buy {x} - {c} = {y} eggs.",
        (range(4, 8), range(6, 13), range(3, 20)),
        lambda a, b, c: (a * b, a * b - c),
    ),
    Story(
        "At noon it is {a} degrees. The temperature falls by {b} degrees every hour. How many degrees is it at {c} PM?",
        "In {c} hours it falls by {b} * {c} = {x} degrees.\nThen it is {a} - {x} = {y} degrees.",
        (range(4, 12), range(2, 5), range(3, 7)),
        lambda a, b, c: (b * c, a - b * c),
    ),
    Story(
        "A printer makes {a} posters. {b} percent of them are spoiled. The rest goes to {c} schools in equal parts. "
        "How many posters does a school get?",
        "Spoiled are {a} * {b} / 100 = {x} posters.\nLeft are {a} - {x} = {y} posters.\n"
        "A school gets {y} / {c} = {z} posters.",
        (range(400, 1300, 100), range(10, 60, 10), range(2, 6, 3)),
        lambda a, b, c: (a * b // 100, a - a * b // 100, (a - a * b // 100) // c),
    ),
    Story(
        "A box holds {a} red and {b} blue marbles. Kim takes {c} marbles out. How many marbles are in the box then?",
        "At first there are {a} + {b} = {x} marbles.\nThen there are {x} - {c} = {y}.",
        (range(20, 50), range(20, 50), range(5, 30)),
        lambda a, b, c: (a + b, a + b - c),
    ),
    Story(
        "Omar walks {a} minutes to school and {a} minutes back, on {b} days a week. "
        "How many minutes does he walk in {c} weeks?",
        "In a day he walks {a} * 2 = {x} minutes.\nIn a week that is {x} * {b} = {y} minutes.\n"
        "In {c} weeks it is {y} * {c} = {z} minutes.",
        (range(9, 20), range(3, 6), range(2, 7)),
        lambda a, b, c: (a * 2, a * 2 * b, a * 2 * b * c),
    ),
    Story(
        "A shop sells {a} pens in packs of {b}. A pack costs ${c}. How many dollars does the shop earn with all packs?",
        "There are {a} / {b} = {x} packs.\nThey bring {x} * {c} = ${y}.",
        (range(60, 301, 60), range(4, 7), range(3, 9)),
        lambda a, b, c: (a // b, a // b * c),
    ),
    Story(
        "A tank holds {a} liters. A pump takes out {b} liters a minute. How many liters are left after {c} minutes?",
        "The pump takes out {b} * {c} = {x} liters.\nLeft are {a} - {x} = {y} liters.",
        (range(1500, 4000, 100), range(15, 40), range(10, 25)),
        lambda a, b, c: (b * c, a - b * c),
    ),
    Story(
        "Ida has {a} stamps and gives {b} to each of {c} friends. How many stamps does she keep?",
        "She gives away {b} * {c} = {x} stamps.\nShe keeps {a} - {x} = {y} stamps.",
        (range(90, 150), range(4, 10), range(3, 8)),
        lambda a, b, c: (b * c, a - b * c),
    ),
    Story(
        "A farm has {a} goats and {b} times as many sheep. How many animals are there after {c} more goats are born?",
        "There are {a} * {b} = {x} sheep.\nTogether that is {a} + {x} = {y} animals.\nLater there are {y} + {c} = {z}.",
        (range(12, 30), range(2, 6), range(3, 12)),
        lambda a, b, c: (a * b, a + a * b, a + a * b + c),
    ),
    Story(
        "A coat costs ${a} and a hat ${b}. In a sale the two together cost ${c} less. What is the price in dollars?",
        "Before the sale both cost {a} + {b} = ${x}.\nIn the sale they cost {x} - {c} = ${y}.",
        (range(60, 120), range(15, 30), range(10, 25)),
        lambda a, b, c: (a + b, a + b - c),
    ),
    Story(
        "Three friends pick {a}, {b} and {c} apples and share all of them equally. How many apples does each one get?",
        "Together they pick {a} + {b} + {c} = {x} apples.\nEach one gets {x} / 3 = {y} apples.",
        (range(12, 40, 3), range(15, 40, 3), range(18, 40, 3)),
        lambda a, b, c: (a + b + c, (a + b + c) // 3),
    ),
)
