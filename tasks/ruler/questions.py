"""qa_1 and qa_2: a question whose document or documents lie among others, numbered and in random order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import NamedTuple

from tasks.ruler.fit import Body, Draft
from tasks.ruler.wording import Wording

_WORD = re.compile(r"\S+")


class Document(NamedTuple):
    """A title ("" = none) and a text."""

    title: str
    text: str

    @property
    def num_words(self) -> int:
        return len(self.text.split())

    def beginning(self, num_words: int) -> str:
        """The title, and the first `num_words` words of the text."""
        end = len(self.text)
        if num_words < self.num_words:
            end = next(islice(_WORD.finditer(self.text), num_words - 1, None)).end()
        return (f"{self.title}\n" if self.title else "") + self.text[:end]


class Question(NamedTuple):
    """A question with its supporting documents and an endless or finite stream of others, the closest first."""

    text: str
    opening: str
    """Beginning of a sentence that the answer completes, "" = none."""
    answers: tuple[str, ...]
    support: tuple[Document, ...]
    others: Iterator[Document]
    num_words: int
    """Words in `support` and `others` together; a large number if `others` never ends."""
    group: str
    data_source: str


class _Placed(NamedTuple):
    rank: float
    document: Document
    is_support: bool


def draft(subset: str, name: str, question: Question, rng: Random, wording: Wording) -> Draft:
    """A unit of the haystack is one word; the document that was added last may be cut after any word."""
    placed = [_Placed(rng.random(), document, True) for document in question.support]
    supporting = sum(document.num_words for document in question.support)
    taken = supporting

    def body(num_units: int) -> Body:
        nonlocal taken
        while taken < num_units:
            document = next(question.others)
            placed.append(_Placed(rng.random(), document, False))
            taken += document.num_words
        return _number(placed, num_units, question.answers, wording)

    return Draft(
        id=name,
        subset=subset,
        frame=wording.qa(question.text, question.opening),
        answers=question.answers,
        max_new_tokens=wording.new_tokens(subset),
        body=body,
        min_units=min(supporting + 1, question.num_words),
        max_units=question.num_words,
        group=question.group,
        data_source=question.data_source,
    )


def _number(placed: list[_Placed], num_words: int, answers: tuple[str, ...], wording: Wording) -> Body:
    shown = []
    for item in placed:
        if num_words <= 0:
            break
        shown.append((item, item.document.beginning(num_words)))
        num_words -= item.document.num_words
    shown.sort(key=lambda pair: pair[0].rank)
    pieces: list[str] = []
    spans = []
    length = 0
    for number, (item, text) in enumerate(shown, start=1):
        piece = wording.document(number, text)
        if item.is_support:
            for answer in dict.fromkeys(answers):
                start = piece.find(answer)
                if start >= 0:
                    spans.append((length + start, length + start + len(answer)))
        pieces.append(piece)
        length += len(piece) + 2
    return Body("\n\n".join(pieces), tuple(sorted(spans)))
