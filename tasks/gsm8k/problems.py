"""Problems in the official columns: `question`, and `answer`, a worked solution that ends with "#### NUMBER"."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_ANNOTATION = re.compile(r"<<[^<>]*>>")
_SENTENCE_END = re.compile(r"(?<=[.?!])[\"'”’)]*(?=\s+\S)")


class Problem(NamedTuple):
    question: str
    solution: str
    """Without calculator annotations; ends with "#### " and the number."""
    number: str
    """As written: "18", "1,450,000", "-3"."""


class Data(NamedTuple):
    test: tuple[Problem, ...]
    train: tuple[Problem, ...]
    """Empty if there is none. No question twice, none of `test`."""


def data(test: Iterable[Problem], train: Iterable[Problem]) -> Data:
    """Leave out of `train` what is asked in `test`, and repeated questions."""
    tested = tuple(test)
    asked = {problem.question for problem in tested}
    return Data(tested, tuple({p.question: p for p in train if p.question not in asked}.values()))


def read(folder: Path) -> Data:
    """Problems of folder/test.jsonl and, if it exists, folder/train.jsonl. Raises ValueError for damaged files."""
    train = folder / "train.jsonl"
    found = data(_lines(folder / "test.jsonl"), _lines(train) if train.is_file() else ())
    if train.is_file() and not found.train:
        raise ValueError(f"{train} has no problem that test.jsonl does not have; take the official train.jsonl")
    return found


def asked(problem: Problem) -> str:
    return f"Question: {problem.question}\nAnswer:"


def last_sentence(problem: Problem) -> int:
    """Where in `asked` the last sentence begins, the space before it included: tokens rarely cross that border."""
    label = "Question:"
    ends = _SENTENCE_END.finditer(problem.question)
    return max((len(label) + 1 + found.end() for found in ends), default=len(label))


def problem(row: object, where: str) -> Problem:
    """Check one row. `where` begins the message of the ValueError that a bad one raises."""
    if not isinstance(row, Mapping) or not {"question", "answer"} <= row.keys():
        raise ValueError(f"{where}: no column question or answer; write the file anew in the form of GSM8K")
    question, answer = (_text(row, column, where) for column in ("question", "answer"))
    solution, mark, number = _ANNOTATION.sub("", answer).rpartition("####")
    if not mark or not re.search("[0-9]", number) or "\n" in number.strip():
        raise ValueError(f"{where}: answer does not end with '#### NUMBER', but with {answer[-40:]!r}")
    return Problem(question, f"{solution}#### {number.strip()}", number.strip())


def _lines(path: Path) -> Iterator[Problem]:
    """The problems of a JSONL file; blank lines are none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"data_dir={str(path.parent)!r} has no readable {path.name} ({type(error).__name__}); take it "
            "from https://github.com/openai/grade-school-math, grade_school_math/data"
        ) from None
    if not content.strip():
        raise ValueError(f"{path} is empty; take it anew from https://github.com/openai/grade-school-math")
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield problem(_json(line, f"{path}, line {number}"), f"{path}, line {number}")


def _json(line: bytes, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON object ({error}); write the file anew") from error


def _text(row: Mapping[str, object], column: str, where: str) -> str:
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: {column} is {text!r:.60}; it must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {column} holds half a character ({error.reason}); write the file anew") from None
    return text.strip()
