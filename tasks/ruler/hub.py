"""RULER sets on the Hugging Face Hub in kvpress' columns, or a local copy of one in the same form.

Columns: context, question, answer_prefix, answer (list), task, max_new_tokens. A set has one configuration per length
("4096", split "test": simonjegou/ruler) or per subset (split = subset: xAlg-AI/att-hub-ruler-32k). The wording is
official; prompts were made for one tokenizer and are longer with another.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

from qevict_bench.task import Example
from tasks.ruler.official import occurrences
from tasks.ruler.structure import MATCH_PART, NIAH
from tasks.ruler.texts import Groups, checked, checked_answers

COLUMNS = ("context", "question", "answer_prefix", "answer", "max_new_tokens")


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
    names = _configurations(hub_id)
    if str(context_length) in names:
        rows = _load(hub_id, str(context_length), "test")
        if "task" not in rows.column_names:
            raise ValueError(f"{hub_id} has no column task; give a set in kvpress' form")
        kept = [i for i, task in enumerate(rows["task"]) if task == subset]
        rows = rows.select(kept)
    elif subset in names:
        rows = _load(hub_id, subset, subset)
    else:
        raise ValueError(
            f"{hub_id} has no {subset} at context_length={context_length}; its configurations: {', '.join(names)}"
        )
    if not len(rows):
        raise ValueError(f"{hub_id} has no row of {subset}; take it out of task.subsets")
    yield from rows


@functools.cache
def _configurations(hub_id: str) -> tuple[str, ...]:
    from datasets import get_dataset_config_names

    return tuple(_asked(hub_id, lambda: get_dataset_config_names(hub_id)))


@functools.lru_cache(maxsize=16)
def _load(hub_id: str, name: str, split: str) -> Any:
    from datasets import load_dataset

    return _asked(hub_id, lambda: load_dataset(hub_id, name, split=split))


def _asked(hub_id: str, ask: Any) -> Any:
    """What `ask` gives, without progress bars; whatever goes wrong is a ValueError."""
    from datasets import disable_progress_bars

    disable_progress_bars()
    try:
        return ask()
    except Exception as error:  # the library raises many kinds: missing, gated, offline, damaged
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"hub_id={hub_id!r} cannot be loaded ({type(error).__name__}: {reason}); check the name and the network, "
            "or give the path of a local copy"
        ) from error
