"""RULER sets on the Hugging Face Hub in kvpress' columns, or a local copy of one in the same form.

Columns: context, question, answer_prefix, answer (list), task, max_new_tokens. A set has one configuration per length
("4096", split "test": simonjegou/ruler) or per subset (split = subset: xAlg-AI/att-hub-ruler-32k). The wording is
official; prompts were made for one tokenizer and are longer with another. A set is fetched whole, all lengths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from qevict_bench import hub
from qevict_bench.task import Example
from tasks.ruler.official import occurrences
from tasks.ruler.structure import MATCH_PART, NIAH
from tasks.ruler.texts import Groups, checked, checked_answers

COLUMNS = ("context", "question", "answer_prefix", "answer", "max_new_tokens")
_KNOWN = "simonjegou/ruler"


def hash_rows(hub_id: str, context_length: int, subsets: tuple[str, ...]) -> str:
    """Return a hash of the rows of `subsets`, whatever files they come in."""
    digest = hashlib.sha256()
    for subset in subsets:
        for row in _rows(hub_id, context_length, subset):
            digest.update(repr([subset, *(row.get(column) for column in COLUMNS)]).encode())
    return digest.hexdigest()


def examples(hub_id: str, context_length: int, subset: str, limit: int) -> Iterator[Example]:
    """Yield the first `limit` rows of a subset, or all if it has fewer. Raises ValueError for bad rows."""
    groups = Groups()
    for index, row in enumerate(_rows(hub_id, context_length, subset)):
        if index == limit:
            return
        where = f"{hub_id}, {subset}, row {index}"
        texts = {name: checked(row.get(name), f"{where}: {name}") for name in ("context", "question", "answer_prefix")}
        answers = checked_answers(row.get("answer"), f"{where}: answer")
        new_tokens = row.get("max_new_tokens")
        if not isinstance(new_tokens, int) or new_tokens < 1:
            raise ValueError(f"{where}: max_new_tokens is {new_tokens!r}; it must be a positive integer")
        yield Example(
            id=f"{subset}-{index:04d}",
            subset=subset,
            context=texts["context"],
            question=texts["question"],
            answer_prefix=texts["answer_prefix"],
            answers=answers,
            max_new_tokens=new_tokens,
            answer_spans=occurrences(texts["context"], answers) if subset in NIAH else (),
            group=groups.name(texts["context"]) if subset in MATCH_PART else "",
            data_source=hub_id,
            instruction_chars=-1,
        )


def _rows(hub_id: str, context_length: int, subset: str) -> Iterator[dict[str, Any]]:
    names, length = hub.names(hub_id, _KNOWN), str(context_length)
    if length in names:
        rows = _split(hub_id, length, "test")
        if "task" not in rows.column_names:
            raise ValueError(f"hub_id={hub_id!r} has no column task; give a set in kvpress' form")
        rows = rows.select([i for i, task in enumerate(rows["task"]) if task == subset])
    elif subset in names:
        rows = _split(hub_id, subset, subset)
    else:
        raise ValueError(
            f"hub_id={hub_id!r} has no {subset} at context_length={context_length}; its configurations: "
            f"{', '.join(names)}"
        )
    if not len(rows):
        raise ValueError(f"hub_id={hub_id!r} has no row of {subset}; take it out of task.subsets")
    yield from rows


def _split(hub_id: str, name: str, split: str) -> Any:
    splits = hub.splits(hub_id, name, _KNOWN)
    if split not in splits:
        raise ValueError(f"hub_id={hub_id!r}, {name} has no split {split}, only {', '.join(splits)}")
    return splits[split]
