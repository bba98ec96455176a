"""Items of our own in LongBench's columns, without end: small stand-ins for the 16 datasets, of 300 to 1,000 words.

They exercise every metric, length and prompt form without any data; their numbers say nothing of LongBench's. "dev" and
"test" have other people and other draws.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import count
from random import Random
from typing import Any

from tasks.longbench import documents, series
from tasks.longbench.world import Draft, World

_MAKERS: dict[str, Callable[[World], Draft]] = {
    "narrativeqa": documents.chronicle,
    "qasper": documents.study,
    "multifieldqa_en": documents.chronicle,
    "hotpotqa": documents.passages,
    "2wikimqa": documents.passages,
    "musique": documents.passages,
    "gov_report": documents.report,
    "qmsum": documents.minutes,
    "multi_news": documents.news,
    "trec": series.kinds,
    "triviaqa": series.trivia,
    "samsum": series.dialogues,
    "passage_count": series.repeated,
    "passage_retrieval_en": series.retold,
    "lcc": series.code,
    "repobench-p": series.repository,
}


def rows(dataset: str, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """The items of a dataset; item i depends on nothing but its number, the seed and the split."""
    for number in count():
        key = f"longbench {dataset} {split} {seed} {number}"
        draft = _MAKERS[dataset](World(Random(key), split))
        words = f"{draft.input} {draft.context} {' '.join(draft.answers)}".split()
        yield {
            "input": draft.input,
            "context": draft.context,
            "answers": list(draft.answers),
            "length": len(words),
            "dataset": dataset,
            "language": "en",
            "all_classes": list(draft.classes) or None,
            "_id": hashlib.sha256(key.encode()).hexdigest()[:48],
        }
