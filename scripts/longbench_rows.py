"""HotpotQA files as rows in LongBench's form: python scripts/longbench_rows.py hotpot_dev_distractor.json --out DIR

Reads HotpotQA's JSON, as it was released (context = [[title, [sentence, ...]], ...]) or as the Hub has it (context =
{"title": [...], "sentences": [[...], ...]}), and writes DIR/hotpotqa.jsonl: input, context (passages "Passage 1:",
title and text in lines of their own, a blank line between), answers, length in words, dataset, language, all_classes,
_id. --words W adds passages of other questions, all in random order (--seed), until a row has W words; 0 keeps the
question's own passages in their order. 1,000 words are about 1,600 tokens; KIVI at a budget of 20 % needs 1,710 of
them with SmolLM2, so --words 1100.
Then: python run.py task=longbench task.source=local task.data_dir=DIR task.subsets=[hotpotqa]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

Passage = tuple[str, str]
"""Title and text."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder, made if it is not there")
    parser.add_argument("--limit", type=int, default=0, help="so many questions; 0 = all")
    parser.add_argument("--words", type=int, default=0, help="least words of a row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.limit, args.words) < 0:
        parser.error(f"--limit {args.limit} --words {args.words}: give 0 or more")
    try:
        questions = json.loads(args.file.read_text(encoding="utf-8"))
        made = list(rows(questions, args.words, args.seed))[: args.limit or None]
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "hotpotqa.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"error: {args.file}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    lengths = [row["length"] for row in made]
    print(f"{path}: {len(made)} rows of {min(lengths)} to {max(lengths)} words")
    return 0


def rows(questions: Sequence[Mapping[str, Any]], words: int = 0, seed: int = 0) -> Iterator[dict[str, Any]]:
    """One row per question; raises ValueError if there are not enough passages for `words`."""
    if not questions:
        raise ValueError("the file has no questions")
    everything = dict.fromkeys(passage for question in questions for passage in passages(question["context"]))
    for number, question in enumerate(questions):
        own = passages(question["context"])
        chosen = extended(own, list(everything), words, Random(f"{seed} {number}")) if words else own
        context = "\n\n".join(f"Passage {i}:\n{title}\n{text}" for i, (title, text) in enumerate(chosen, 1))
        asked, answer = question["question"], question["answer"]
        yield {
            "input": asked,
            "context": context,
            "answers": [answer],
            "length": len(f"{asked} {context} {answer}".split()),
            "dataset": "hotpotqa",
            "language": "en",
            "all_classes": None,
            "_id": hashlib.sha256(f"{number} {asked}".encode()).hexdigest()[:48],
        }


def passages(context: Any) -> list[Passage]:
    """The passages of a question in either form of the files."""
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
    return [(title, "".join(sentences)) for title, sentences in pairs]


def extended(own: Sequence[Passage], others: Sequence[Passage], words: int, rng: Random) -> list[Passage]:
    """`own` among as many of `others` as make `words` words; no title twice."""
    titles = {title for title, _ in own}
    spare = [passage for passage in rng.sample(others, len(others)) if passage[0] not in titles]
    chosen, total = list(own), sum(len(f"{title} {text}".split()) + 2 for title, text in own)
    while total < words:
        if not spare:
            raise ValueError(f"all passages of the file together have {total} words; give --words {total} or less")
        title, text = spare.pop()
        if title not in titles:
            titles.add(title)
            chosen.append((title, text))
            total += len(f"{title} {text}".split()) + 2
    rng.shuffle(chosen)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
