"""Checks on texts from files, and which of the files' prompts share documents."""

from __future__ import annotations

import re
from collections.abc import Sequence

_DOCUMENT = re.compile(r"^\S{0,12} ?\d+:\n", re.MULTILINE)
_SHARED = 0.5


def checked(text: object, where: str) -> str:
    """`text` if it is text that can be written as UTF-8. Raises ValueError, naming where it was found."""
    if not isinstance(text, str):
        raise ValueError(f"{where} is {text!r:.60}; it must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a character ({error.reason}); write the data anew") from None
    return text


def checked_answers(answers: object, where: str) -> tuple[str, ...]:
    """At least one answer, none of them blank: a blank one is found in every prediction."""
    if not isinstance(answers, Sequence) or isinstance(answers, str) or not answers:
        raise ValueError(f"{where} is {answers!r:.60}; it must be a non-empty list of texts")
    found = tuple(checked(answer, where) for answer in answers)
    if not all(answer.strip() for answer in found):
        raise ValueError(f"{where} is {answers!r:.60}; a blank answer would be found in every prediction")
    return found


class Groups:
    """Names for prompts that share most of their documents with an earlier one; documents are headed "Word 1:"."""

    def __init__(self) -> None:
        self._known: list[frozenset[int]] = []

    def name(self, context: str) -> str:
        """The group of a prompt, "" if no documents are found in it."""
        documents = frozenset(hash(text.strip()) for text in _DOCUMENT.split(context)[1:])
        if len(documents) < 2:
            return ""
        for number, known in enumerate(self._known):
            if len(documents & known) > _SHARED * min(len(documents), len(known)):
                return f"documents-{number}"
        self._known.append(documents)
        return f"documents-{len(self._known) - 1}"
