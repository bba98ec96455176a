"""Items in LongBench's columns: input, context, answers, length, all_classes, _id. What is wrong with one is named.

A bad row does not end a run: it becomes an example with a `problem`, so its row has status error and says which line
of which file it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tasks.longbench.structure import DATASETS


class Found(NamedTuple):
    """A row as it was read: `row`, or why there is none."""

    where: str
    row: object
    problem: str = ""


class Item(NamedTuple):
    """A checked row, or with `problem` what is wrong with it; `question` and `prefix` are "" but for kvpress' form."""

    number: int
    """Rows of the dataset before it, bad ones included."""
    problem: str = ""
    context: str = ""
    input: str = ""
    answers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    length: int = 0
    """Words; -1 = unknown."""
    question: str = ""
    prefix: str = ""


OFFICIAL, KVPRESS = ("input",), ("question", "answer_prefix")
"""Columns of text beside `context`, in the two forms."""


def items(found: Iterable[Found], dataset: str, columns: Sequence[str], sized: bool) -> Iterator[Item]:
    """Check the rows of a dataset; `sized`: they need a `length`."""
    ids: dict[str, str] = {}
    for number, (where, row, problem) in enumerate(found):
        if not problem:
            try:
                item = _item(number, row, dataset, columns, sized)
                assert isinstance(row, Mapping)
                _check_id(row.get("_id"), ids, where)
            except ValueError as error:
                problem = str(error)
            else:
                yield item
                continue
        yield Item(number, f"{where}: {problem}; left out", length=_length(row))


def _item(number: int, row: object, dataset: str, columns: Sequence[str], sized: bool) -> Item:
    needed = ["context", *columns, "answers", *["length"] * sized]
    needed += ["all_classes"] * (DATASETS[dataset].metric == "classification")
    if not isinstance(row, Mapping):
        raise ValueError(f"it is no JSON object, but {row!r:.40}")
    if missing := [name for name in needed if row.get(name) is None]:
        raise ValueError(f"no {', '.join(missing)}")
    if sized and _length(row) < 0:
        raise ValueError(f"length is {row['length']!r:.40}; it must be a number of words")
    answers = _texts(row["answers"], "answers")
    if DATASETS[dataset].metric == "retrieval" and not all(re.search(r"Paragraph \d", x) for x in answers):
        raise ValueError(f"answers is {list(answers)!r:.60}; each must name a paragraph, such as Paragraph 7")
    return Item(
        number=number,
        context=_text(row["context"], "context"),
        answers=answers,
        classes=_texts(row["all_classes"], "all_classes") if "all_classes" in needed else (),
        length=_length(row),
        **{name.removeprefix("answer_"): _text(row[name], name) for name in columns},
    )


def _check_id(name: object, ids: dict[str, str], where: str) -> None:
    if isinstance(name, str | int) and (first := ids.setdefault(str(name), where)) != where:
        raise ValueError(f"_id {name!r:.60} is that of {first} again")


def _length(row: Any) -> int:
    length = row.get("length") if isinstance(row, Mapping) else None
    return length if isinstance(length, int) and type(length) is not bool and length >= 0 else -1


def _texts(values: object, name: str) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ValueError(f"{name} is {values!r:.40}; it must be a non-empty list of texts")
    return tuple(_text(value, name) for value in values)


def _text(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name} is {text!r:.40}; it must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half a character ({error.reason})") from None
    return text
