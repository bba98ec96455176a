"""What stands around context and input: this project's own wording, or that of a checkout of the official repository.

A checkout's files are parsed as data and never run: LongBench/config/dataset2prompt.json (templates with {context} and
{input}) and dataset2maxlen.json.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from tasks.longbench.structure import DATASETS

_PLACES = "LongBench/config", "config", "."
_FILES = "dataset2prompt.json", "dataset2maxlen.json"


class Wording(NamedTuple):
    """Templates of what stands before the context and behind it, with {input}, and most tokens of an answer."""

    before: str
    behind: str
    new_tokens: int

    def split(self, context: str, asked: str) -> tuple[str, str, int]:
        """Example.context, Example.question, and the length of the instruction at the head of the context.

        Line breaks behind the context belong to it.
        """
        before, behind = self.before.format(input=asked), self.behind.format(input=asked)
        question = behind.lstrip("\n")
        return before + context + behind[: len(behind) - len(question)], question, len(before)


_SHORT = "Reply with the answer alone, in as few words as will do."
_TEXT = f"Below is a text, and after it a question on what it says. {_SHORT}\n\n{{context}}\n\nQuestion: {{input}}\n"
_PASSAGES = (
    f"Below are several passages, and after them a question that one or more of them settle. {_SHORT}\n\n"
    f"{{context}}\n\n{_SHORT}\nQuestion: {{input}}\nAnswer:"
)
_CODE = "Continue this program.\n{context}{input}What is its next line?\n"
_OWN = {
    "narrativeqa": f"{_TEXT}{_SHORT}\nAnswer:",
    "qasper": f"{_TEXT}{_SHORT} If the text does not say, reply: unanswerable.\nAnswer:",
    "multifieldqa_en": f"{_TEXT}{_SHORT}\nAnswer:",
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "gov_report": "Sum up this report on about a page.\n\n{context}\n\n"
    "Sum up the report above on about a page.\nSummary:",
    "qmsum": "Below are the minutes of a meeting. Say in a few sentences what is asked about it.\n\n{context}\n\n"
    "Say in a few sentences: {input}\nAnswer:",
    "multi_news": "Sum up all of these news items together on about a page.\n\n{context}\n\n"
    "Sum up all of the news above together on about a page.\nSummary:",
    "trec": "What kind of thing does a question ask for? First some questions whose kind is given.\n\n"
    "{context}\n{input}",
    "triviaqa": f"A passage settles each question. {_SHORT} First some examples.\n\n{{context}}\n\n{{input}}",
    "samsum": "Each conversation is retold in a sentence or two. First some examples.\n\n{context}\n\n{input}",
    "passage_count": "Some of these paragraphs stand here more than once. How many different ones are there?\n\n"
    "{context}\n\nHow many different paragraphs are there? Reply with the number alone.\nThe number is: ",
    "passage_retrieval_en": "One of these paragraphs is retold at the end. Find out which.\n\n{context}\n\n"
    "What is retold:\n\n{input}\n\nReply with its number, written like this: Paragraph 1.\nIt is: ",
    "lcc": _CODE,
    "repobench-p": _CODE,
}


def own(dataset: str) -> Wording:
    """The wording of this project."""
    return _wording(_OWN[dataset], DATASETS[dataset].new_tokens)


@functools.lru_cache(maxsize=64)
def official(prompts_dir: str, dataset: str) -> Wording:
    """The wording of a checkout. Raises ValueError, naming the file, if it is missing or has another form."""
    root = Path(prompts_dir)
    folder = next((root / place for place in _PLACES if os.path.isfile(root / place / _FILES[0])), root / _PLACES[0])
    (prompts, _), (lengths, length_file) = (_read(folder / name, prompts_dir) for name in _FILES)
    path = folder / _FILES[0]
    template, new_tokens = prompts.get(dataset), lengths.get(dataset)
    if not isinstance(template, str):
        raise ValueError(f"{path} has no template of {dataset}; take {dataset} out of task.subsets")
    if type(new_tokens) is not int or new_tokens < 1:
        raise ValueError(f"{length_file} has no length of answers for {dataset}; take {dataset} out of task.subsets")
    try:
        return _wording(template, new_tokens)
    except ValueError as error:
        raise ValueError(
            f"{path}: the template of {dataset} cannot be used ({error}); take a fresh checkout"
        ) from error


def _read(path: Path, prompts_dir: str) -> tuple[Mapping[str, Any], Path]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"prompts_dir={prompts_dir!r}: {path} is missing or damaged ({type(error).__name__}); it must be a "
            "checkout of https://github.com/THUDM/LongBench"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"prompts_dir={prompts_dir!r}: {path} holds no JSON object; take a fresh checkout")
    return found, path


def _wording(template: str, new_tokens: int) -> Wording:
    pieces = list(Formatter().parse(template))
    fields = [name for _, name, _, _ in pieces if name is not None]
    if fields.count("context") != 1 or set(fields) - {"context", "input"}:
        raise ValueError(f"it has the fields {', '.join(fields) or 'none'}; needed are context once, and input")
    if any(form or conversion for _, _, form, conversion in pieces):
        raise ValueError("a field has a format")
    at = next(i for i, piece in enumerate(pieces) if piece[1] == "context")
    literal = _escaped(pieces[at][0])
    return Wording(_joined(pieces[:at]) + literal, _joined(pieces[at + 1 :]), new_tokens)


def _joined(pieces: Sequence[tuple[str, str | None, str | None, str | None]]) -> str:
    return "".join(_escaped(text) + ("" if name is None else "{input}") for text, name, _, _ in pieces)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
