"""RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv 2404.06654).

`source="generate"` makes the eight needle-in-a-haystack subtasks with the evaluated model's own tokenizer, at any
length: structure as in the official table, wording of this project ("RULER-style (own wording)"). `source="local"`
reads files of the official generator, all 13 subtasks. Numbers of the two are not comparable.

A generated example, shortened: "... The river froze. The code of mellow-anchor: 4182093. Rosa went home ..." is asked
"What is the code of mellow-anchor?", its answer opens with "The code of mellow-anchor:", and " 4182093." scores 1.

Metrics: https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/eval/synthetic/constants.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from qevict_bench.metrics import string_match_all, string_match_part
from qevict_bench.task import Example, Prompter, Task
from tasks.ruler import generate, official
from tasks.ruler.structure import MATCH_PART, NIAH, OFFICIAL_NEW_TOKENS

_LENGTHS = 512, 131_072
_SOURCES = {"generate": tuple(NIAH), "local": tuple(OFFICIAL_NEW_TOKENS)}
_SPLITS = ("dev", "test")


@dataclass(frozen=True)
class Ruler(Task):
    """RULER, generated or official. Raises ValueError for a bad field, with its value and what to write instead."""

    name: ClassVar[str] = "ruler"

    context_length: int = 1024
    """Tokens of the whole prompt + tokens to generate, 512..131072; a generated example fills 90 to 100 % of it.
    With source "local" the files decide and this is not used."""
    subsets: tuple[str, ...] = tuple(NIAH)
    source: str = "generate"
    """"generate" or "local"."""
    data_dir: str = ""
    """With source "local": holds <subset>.jsonl or <subset>/validation.jsonl."""

    def __post_init__(self) -> None:
        if self.source not in _SOURCES:
            raise ValueError(f"source={self.source!r} is unknown; use one of {', '.join(_SOURCES)}")
        if isinstance(self.subsets, str):
            raise ValueError(f"subsets={self.subsets!r} is a string; write a list: [{self.subsets}]")
        object.__setattr__(self, "subsets", tuple(self.subsets))
        valid = _SOURCES[self.source]
        unknown = [subset for subset in self.subsets if subset not in valid]
        if unknown or not self.subsets:
            official_only = " (vt, cwe, fwe, qa_1, qa_2 need source=local)" if self.source == "generate" else ""
            raise ValueError(
                f"subsets={list(self.subsets)}: {', '.join(map(str, unknown)) or 'empty'} is not valid; "
                f"choose from {', '.join(valid)}{official_only}"
            )
        if len(set(self.subsets)) < len(self.subsets):
            raise ValueError(f"subsets={list(self.subsets)} names a subset twice; name each once")
        low, high = _LENGTHS
        if not low <= self.context_length <= high:
            raise ValueError(f"context_length={self.context_length} is out of range; use {low} to {high} tokens")
        if self.source == "local" and not self.data_dir:
            raise ValueError("source=local needs data_dir; set task.data_dir to the folder of RULER's .jsonl files")
        if self.source == "generate" and self.data_dir:
            raise ValueError(f"data_dir={self.data_dir!r} is not used with source=generate; set task.source=local")

    @property
    def prompt_source(self) -> str:
        """ "own" if generated, "official" if read from files."""
        return "own" if self.source == "generate" else "official"

    @property
    def stop(self) -> tuple[str, ...]:
        """A generated answer is one line. The official protocol never stops early."""
        return ("\n",) if self.source == "generate" else ()

    def fingerprint(self) -> str:
        """Hash of the files, or of one fixed draw per subset: it changes with wording, vocabulary, or random draws."""
        if self.source == "local":
            return official.hash_files(self.data_dir, self.subsets)[:16]
        digest = hashlib.sha256(f"{self.context_length}".encode())
        for subset in self.subsets:
            digest.update(repr(generate.draft(subset, 0, "test", Random(0)).build(64)).encode())
        return digest.hexdigest()[:16]

    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        """Yield `limit` examples per subset (source "local": fewer if the file has fewer).

        Split "dev" of source "generate" shares neither random draws nor word keys with "test". Official files have no
        "dev". Raises ValueError for a bad split or limit, a length too short for a subset, or bad data.
        """
        if split not in _SPLITS:
            raise ValueError(f"split={split!r} is unknown; use one of {', '.join(_SPLITS)}")
        if limit < 1:
            raise ValueError(f"limit={limit} asks for no example; use 1 or more")
        if self.source == "local" and split == "dev":
            raise ValueError("split='dev': official RULER files have only a test split; tune with source=generate")
        for subset in self.subsets:
            if self.source == "local":
                yield from official.examples(self.data_dir, subset, limit)
                continue
            for index in range(limit):
                yield generate.example(subset, index, self.context_length, seed, split, prompter)

    def score(self, prediction: str, example: Example) -> float:
        """Return string_match_part for qa subsets, string_match_all for the others."""
        return next(iter(self.metrics(prediction, example).values()))

    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        """Return the subset's one official metric."""
        if example.subset in MATCH_PART:
            return {"string_match_part": string_match_part(prediction, example.answers)}
        return {"string_match_all": string_match_all(prediction, example.answers)}
