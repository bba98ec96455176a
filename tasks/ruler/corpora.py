"""Questions from files of SQuAD 2.0 (qa_1) and HotpotQA in its distractor setting (qa_2).

As in RULER: answerable questions in the order of the file; the documents of the question's own article (SQuAD) or
setting (HotpotQA) come before those of others. The first half of the articles is "test", the rest "dev". Questions of
one article are one group. Where HotpotQA's answer is "yes" or "no", it need not occur in the prompt.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tasks.ruler.questions import Document, Question
from tasks.ruler.texts import checked, checked_answers

_PATTERNS = {"qa_1": ("squad.json", "dev-v2.0*.json", "*squad*.json"), "qa_2": ("hotpotqa.json", "*hotpot*.json")}
_NAMES = {"qa_1": "squad", "qa_2": "hotpotqa"}


@dataclass(frozen=True)
class _Item:
    question: str
    answers: tuple[str, ...]
    support: tuple[int, ...]
    near: tuple[int, ...]
    """Documents of the same article or setting, which come first among the others."""
    article: str


@dataclass(frozen=True)
class Corpus:
    """All documents of a file, and its answerable questions."""

    name: str
    documents: tuple[Document, ...]
    items: tuple[_Item, ...]
    digest: str

    def part(self, split: str) -> tuple[_Item, ...]:
        """Halves that share no article, if there is more than one."""
        half = (len(self.items) + 1) // 2
        ends = [i for i in range(half, len(self.items)) if self.items[i].article != self.items[i - 1].article]
        cut = ends[0] if ends else half
        return self.items[cut:] if split == "dev" else self.items[:cut]

    def question(self, item: _Item, rng: Random) -> Question:
        support = tuple(self.documents[i] for i in item.support)
        return Question(
            item.question, "", item.answers, support, self._others(item, rng), self.num_words, item.article, self.name
        )

    @functools.cached_property
    def num_words(self) -> int:
        return sum(document.num_words for document in self.documents)

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
        documents, items = _squad(data) if subset == "qa_1" else _hotpot(data)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a file of {_NAMES[subset]} ({type(error).__name__}: {error}); download it anew"
        ) from error
    if not items:
        raise ValueError(f"{path} has no answerable question; give the official file")
    return Corpus(_NAMES[subset], documents, items, hashlib.sha256(content).hexdigest())


def _squad(data: Any) -> tuple[tuple[Document, ...], tuple[_Item, ...]]:
    articles = [
        [checked(paragraph["context"], f"context of article {i}") for paragraph in article["paragraphs"]]
        for i, article in enumerate(data["data"])
    ]
    texts = sorted({text for article in articles for text in article if text.strip()})
    number = {text: i for i, text in enumerate(texts)}
    items = []
    for i, (article, own) in enumerate(zip(data["data"], articles, strict=True)):
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                if qa.get("is_impossible", False) or not qa["answers"]:
                    continue
                where = f"question {qa['question']!r:.60}"
                answers = checked_answers([answer["text"] for answer in qa["answers"]], f"{where}: answers")
                support = number[paragraph["context"]]
                near = tuple(sorted({number[text] for text in own if text in number} - {support}))
                items.append(_Item(checked(qa["question"], where), answers, (support,), near, f"article-{i}"))
    return tuple(Document("", text) for text in texts), tuple(items)


def _hotpot(data: Any) -> tuple[tuple[Document, ...], tuple[_Item, ...]]:
    """The official file has context [[title, sentences], ...], the Hub's {"title": [...], "sentences": [...]}."""
    settings = []
    for i, row in enumerate(data):
        context, facts, where = row["context"], row["supporting_facts"], f"row {i}"
        pairs = list(zip(context["title"], context["sentences"], strict=True)) if isinstance(context, dict) else context
        titles = set(facts["title"] if isinstance(facts, dict) else [title for title, _ in facts])
        setting = []
        for title, sentences in pairs:
            if not isinstance(sentences, list):
                raise ValueError(f"{where}: sentences are {sentences!r:.60}; they must be a list")
            text = "".join(checked(sentence, f"{where}: a sentence") for sentence in sentences)
            setting.append((Document(checked(title, f"{where}: a title"), text), title in titles))
        if not any(is_support for _, is_support in setting):
            raise ValueError(f"{where}: none of its supporting facts {sorted(titles)} is among its documents")
        settings.append(setting)
    documents = sorted({document for setting in settings for document, _ in setting})
    number = {document: i for i, document in enumerate(documents)}
    items = []
    for i, (row, setting) in enumerate(zip(data, settings, strict=True)):
        support = tuple(dict.fromkeys(number[document] for document, is_support in setting if is_support))
        near = tuple(sorted({number[document] for document, _ in setting} - set(support)))
        answers = checked_answers([row["answer"]], f"row {i}: answer")
        items.append(_Item(checked(row["question"], f"row {i}: question"), answers, support, near, f"setting-{i}"))
    return tuple(documents), tuple(items)
