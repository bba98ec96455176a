"""RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv 2404.06654).

Thirteen subtasks at any length, from one of four sources. `generate`: made with the evaluated model's own tokenizer,
structure as in the official table, wording of this project ("RULER-style (own wording)"). `ruler_repo`: made the same
way with the official wording, read from a checkout of RULER. `local`: files of the official generator. `hub`: sets in
kvpress' columns. Numbers of own and official wording are not comparable.

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
from qevict_bench.task import Example, Prompter, Task, check_source
from tasks.ruler import hub, official
from tasks.ruler.generate import Generator
from tasks.ruler.lengths import Lengths
from tasks.ruler.structure import MATCH_PART, SUBSETS

_LENGTHS = 512, 131_072
_FOLDERS = {"generate": "", "local": "data_dir", "ruler_repo": "ruler_dir", "hub": "hub_id"}
"""Source -> the field that it needs."""
_OWN = {"generate", "ruler_repo"}
"""Sources whose examples are made here."""


@dataclass(frozen=True)
class Ruler(Task):
    """RULER, generated or official. Raises ValueError for a bad field, with its value and what to write instead."""

    name: ClassVar[str] = "ruler"

    context_length: int = 1024
    """Tokens of the whole prompt + tokens to generate, 512..131072; a generated example fills 90 to 100 % of it. With
    source "local" the files decide, with "hub" it names the set; what exceeds it is counted in the rows."""
    subsets: tuple[str, ...] = SUBSETS
    source: str = "generate"
    """"generate", "ruler_repo", "local" or "hub"."""
    ruler_dir: str = ""
    """With source "ruler_repo": a checkout of https://github.com/NVIDIA/RULER with its downloads (essays, QA)."""
    data_dir: str = ""
    """With source "local": holds <subset>.jsonl or <subset>/validation.jsonl."""
    hub_id: str = ""
    """With source "hub": OWNER/NAME, or the path of a local copy."""
    qa_data_dir: str = ""
    """Made examples of qa_1 and qa_2 ask about SQuAD and HotpotQA from files in or below this folder; "" = about
    generated articles, or the files in the checkout of RULER."""

    def __post_init__(self) -> None:
        check_source(self, self.source, _FOLDERS)
        if isinstance(self.subsets, str):
            raise ValueError(f"subsets={self.subsets!r} is a string; write a list: [{self.subsets}]")
        object.__setattr__(self, "subsets", tuple(self.subsets))
        unknown = [subset for subset in self.subsets if subset not in SUBSETS]
        if unknown or not self.subsets:
            raise ValueError(
                f"subsets={list(self.subsets)}: {', '.join(map(str, unknown)) or 'empty'} is not valid; "
                f"choose from {', '.join(SUBSETS)}"
            )
        if len(set(self.subsets)) < len(self.subsets):
            raise ValueError(f"subsets={list(self.subsets)} names a subset twice; name each once")
        low, high = _LENGTHS
        if not low <= self.context_length <= high:
            raise ValueError(f"context_length={self.context_length} is out of range; use {low} to {high} tokens")
        if self.qa_data_dir and self.source not in _OWN:
            raise ValueError(f"qa_data_dir={self.qa_data_dir!r} is not used with source={self.source}; leave it out")

    @property
    def prompt_source(self) -> str:
        """ "own" for source "generate", "redrawn" (official sentences, our draws) for "ruler_repo", else "official"."""
        return {"generate": "own", "ruler_repo": "redrawn"}.get(self.source, "official")

    @property
    def stop(self) -> tuple[str, ...]:
        """An answer in own wording is one line. The official protocol never stops early."""
        return ("\n",) if self.source == "generate" else ()

    @property
    def splits(self) -> tuple[str, ...]:
        """Only made examples have a "dev" split: other random draws, other word keys, other questions."""
        return ("test", "dev") if self.source in _OWN else ("test",)

    @property
    def nominal_length(self) -> int:
        """For source "local" the longest of the files by the tokenizer they were made for."""
        return official.longest(self.data_dir, self.subsets) if self.source == "local" else self.context_length

    def fingerprint(self) -> str:
        """Hash of the files, or of one fixed draw per subset: it changes with wording, vocabulary, or random draws."""
        if self.source == "local":
            return official.hash_files(self.data_dir, self.subsets)[:16]
        if self.source == "hub":
            return hub.hash_rows(self.hub_id, self.context_length, self.subsets)[:16]
        digest, generator = hashlib.sha256(f"{self.context_length}".encode()), self._generator()
        for subset in self.subsets:
            digest.update(generator.data_hash(subset).encode())
            drawn = generator.draft(subset, "", "test", Random(0))
            digest.update(repr(drawn.build(min(drawn.min_units + 64, drawn.max_units))).encode())
        return digest.hexdigest()[:16]

    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        """Yield `limit` examples per subset, or as many as its files have.

        Raises ValueError for a bad split or limit, a length that does not suit a subset, or bad data.
        """
        if split not in self.splits:
            raise ValueError(
                f"split={split!r} is not to be had from source={self.source}; use {' or '.join(self.splits)}"
            )
        if limit < 1:
            raise ValueError(f"limit={limit} asks for no example; use 1 or more")
        if self.source in _OWN:
            generator = self._generator()
            lengths = Lengths(prompter, self.context_length, seed, split, f"{self.ruler_dir}/{self.qa_data_dir}")
        for subset in self.subsets:
            if self.source == "local":
                yield from official.examples(self.data_dir, subset, limit)
            elif self.source == "hub":
                yield from hub.examples(self.hub_id, self.context_length, subset, limit)
            else:
                yield from lengths.examples(generator.drafts(subset, limit, seed, split))

    def score(self, prediction: str, example: Example) -> float:
        """Return string_match_part for qa subsets, string_match_all for the others."""
        return next(iter(self.metrics(prediction, example).values()))

    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        """Return the subset's one official metric."""
        if example.subset in MATCH_PART:
            return {"string_match_part": string_match_part(prediction, example.answers)}
        return {"string_match_all": string_match_all(prediction, example.answers)}

    def _generator(self) -> Generator:
        return Generator(self.context_length, self.ruler_dir, self.qa_data_dir)
