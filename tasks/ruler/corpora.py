"""Questions from files of SQuAD 2.0 (qa_1) and HotpotQA in its distractor setting (qa_2).

As in RULER: answerable questions in the order of the file; the documents of the question's own article (SQuAD) or
setting (HotpotQA) come before those of others. The first half of the questions is "test", the second "dev".
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tasks.ruler.questions import Document, Question

_PATTERNS = {"qa_1": ("squad.json", "dev-v2.0*.json", "*squad*.json"), "qa_2": ("hotpotqa.json", "*hotpot*.json")}
_NAMES = {"qa_1": "squad", "qa_2": "hotpotqa"}
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class _Item:
    question: str
    answers: tuple[str, ...]
    support: tuple[int, ...]
    near: tuple[int, ...]
    """Documents of the same article, which come first among the others."""


@dataclass(frozen=True)
class Corpus:
    """All documents of a file, and its answerable questions."""

    name: str
    documents: tuple[Document, ...]
    items: tuple[_Item, ...]
    digest: str

    def part(self, split: str) -> tuple[_Item, ...]:
        half = (len(self.items) + 1) // 2
        return self.items[half:] if split == "dev" else self.items[:half]

    def question(self, item: _Item, rng: Random) -> Question:
        first = (*item.support, *item.near)
        return Question(
            item.question,
            "",
            item.answers,
            tuple(self.documents[i] for i in item.support),
            self._others(item, rng),
            sum(len(document.sentences) for document in self.documents),
            f"{self.name}-{first[0]}",
            self.name,
        )

    def _others(self, item: _Item, rng: Random) -> Iterator[Document]:
        near = rng.sample(item.near, len(item.near))
        rest = sorted(set(range(len(self.documents))) - {*item.support, *near})
        for index in (*near, *rng.sample(rest, len(rest))):
            yield self.documents[index]


def find_file(folder: str, subset: str) -> Path:
    """The file of a subset in `folder` or below it. Raises ValueError if there is none, or more than one."""
    for pattern in _PATTERNS[subset]:
        found = sorted(Path(folder).rglob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{folder} has {len(found)} files for {subset}: {', '.join(map(str, found))}; point task.qa_data_dir "
                "to a folder with one"
            )
    raise ValueError(
        f"no data of {subset}: {folder} has no {' or '.join(_PATTERNS[subset])}; give a folder with SQuAD's "
        "dev-v2.0.json and HotpotQA's hotpot_dev_distractor_v1.json, or no task.qa_data_dir for generated articles"
    )


@functools.lru_cache(maxsize=4)
def read(folder: str, subset: str) -> Corpus:
    """The corpus of a subset. Raises ValueError for a file that is missing or of another form."""
    path = find_file(folder, subset)
    content = path.read_bytes()
    try:
        data = json.loads(content)
        corpus = _squad(data) if subset == "qa_1" else _hotpot(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a file of {_NAMES[subset]} ({type(error).__name__}: {error}); download it anew"
        ) from error
    documents, items = corpus
    if not items:
        raise ValueError(f"{path} has no answerable question; give the official file")
    return Corpus(_NAMES[subset], documents, items, hashlib.sha256(content).hexdigest())


def _squad(data: Any) -> tuple[tuple[Document, ...], tuple[_Item, ...]]:
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in data["data"]]
    texts = sorted({text for article in articles for text in article})
    number = {text: i for i, text in enumerate(texts)}
    items = []
    for article, own in zip(data["data"], articles, strict=True):
        for paragraph in article["paragraphs"]:
            support = number[paragraph["context"]]
            near = tuple(sorted({number[text] for text in own} - {support}))
            items += [
                _Item(qa["question"], tuple(answer["text"] for answer in qa["answers"]), (support,), near)
                for qa in paragraph["qas"]
                if not qa.get("is_impossible", False)
            ]
    return tuple(Document("", tuple(_SENTENCE_END.split(text))) for text in texts), tuple(items)


def _hotpot(data: Any) -> tuple[tuple[Document, ...], tuple[_Item, ...]]:
    """The official file has context [[title, sentences], ...], the Hub's {"title": [...], "sentences": [...]}."""
    settings = []
    for row in data:
        context = row["context"]
        pairs = list(zip(context["title"], context["sentences"], strict=True)) if isinstance(context, dict) else context
        facts = row["supporting_facts"]
        titles = set(facts["title"] if isinstance(facts, dict) else [title for title, _ in facts])
        settings.append([(Document(title, tuple(s.strip() for s in text)), title in titles) for title, text in pairs])
    documents = sorted({document for setting in settings for document, _ in setting})
    number = {document: i for i, document in enumerate(documents)}
    items = []
    for row, setting in zip(data, settings, strict=True):
        support = tuple(dict.fromkeys(number[document] for document, is_support in setting if is_support))
        near = tuple(sorted({number[document] for document, _ in setting} - set(support)))
        items.append(_Item(row["question"], (row["answer"],), support, near))
    return tuple(documents), tuple(items)
