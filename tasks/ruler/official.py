"""Read RULER data that the official generator wrote: one JSON object a line, wording and numbers untouched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from qevict_bench.task import Example
from tasks.ruler.structure import MATCH_PART, NIAH, OFFICIAL_NEW_TOKENS
from tasks.ruler.texts import Groups, checked, checked_answers

COLUMNS = ("input", "outputs", "answer_prefix")


def find_file(data_dir: str, subset: str) -> Path:
    """Return data_dir/<subset>.jsonl or data_dir/<subset>/validation.jsonl. Raises ValueError if neither exists."""
    candidates = Path(data_dir) / f"{subset}.jsonl", Path(data_dir) / subset / "validation.jsonl"
    for path in candidates:
        if path.is_file():
            return path
    raise ValueError(
        f"no data of {subset}: neither {candidates[0]} nor {candidates[1]} exists; point task.data_dir to the folder "
        "that RULER's prepare.py wrote, or take the subset out of task.subsets"
    )


def hash_files(data_dir: str, subsets: tuple[str, ...]) -> str:
    """Return a hash of the subsets' names and the bytes of their files."""
    digest = hashlib.sha256()
    for subset in subsets:
        content = find_file(data_dir, subset).read_bytes()
        digest.update(f"{subset}:{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def examples(data_dir: str, subset: str, limit: int) -> Iterator[Example]:
    """Yield the first `limit` examples of the file, or all if it has fewer.

    The id is the line number from 0: `index` of niah rows is a character position and can repeat.
    """
    path, groups = find_file(data_dir, subset), Groups()
    with path.open("rb") as lines:
        for index, line in enumerate(lines):
            if index >= limit:
                return
            yield _example(subset, index, line, f"{path}, line {index + 1}", groups)


def longest(data_dir: str, subsets: tuple[str, ...]) -> int:
    """The largest `length` of the files: prompt + answer in tokens of the tokenizer they were made for; 0 if unsaid."""
    most = 0
    for subset in subsets:
        for line in find_file(data_dir, subset).read_bytes().splitlines():
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                length = json.loads(line).get("length", 0)
                most = max(most, length if isinstance(length, int) else 0)
    return most


def _example(subset: str, index: int, line: bytes, where: str, groups: Groups) -> Example:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a JSON object ({error}); write the file anew with RULER's prepare.py"
        ) from error
    missing = [column for column in COLUMNS if not isinstance(row, dict) or column not in row]
    if missing:
        raise ValueError(
            f"{where}: no column {', '.join(missing)}; RULER writes {', '.join(COLUMNS)} since May 2025, older files "
            "keep the prefix inside input: write the data anew with today's RULER"
        )
    outputs = checked_answers(row["outputs"], f"{where}: outputs")
    for column in ("input", "answer_prefix"):
        checked(row[column], f"{where}: {column}")
    text = row["input"]
    boundary = _question_start(subset, text)
    context = text[:boundary]
    return Example(
        id=f"{subset}-{index:04d}",
        subset=subset,
        context=context,
        question=text[boundary:],
        answer_prefix=row["answer_prefix"],
        answers=outputs,
        max_new_tokens=OFFICIAL_NEW_TOKENS[subset],
        answer_spans=occurrences(context, outputs) if subset in NIAH else (),
        group=groups.name(context) if subset in MATCH_PART else "",
        data_source="official",
        instruction_chars=-1,
    )


def _question_start(subset: str, text: str) -> int:
    """Return where the question begins: the last line; for qa from where the first line (the task) is repeated."""
    if subset in MATCH_PART:
        task = text.split("\n", 1)[0]
        repeated = text.rfind(task)
        if repeated > 0:
            return repeated
    return text.rstrip().rfind("\n") + 1


def occurrences(context: str, answers: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Where the answers stand in `context`, as [start, stop) characters."""
    spans = []
    for answer in dict.fromkeys(answers):
        start = context.find(answer)
        while answer and start >= 0:
            spans.append((start, start + len(answer)))
            start = context.find(answer, start + 1)
    return tuple(sorted(spans))
