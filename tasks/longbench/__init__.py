"""LongBench (Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding", arXiv
2308.14508): the 14 English datasets and 2 of code, and LongBench-E. The 5 Chinese ones are left out.

Items come from this project's generator (`own`), from the official files (`local`), or from the Hub (`hub`). Around
them stands the official wording, read from a checkout of the repository (`prompts_dir`) or in the data already (sets in
kvpress' columns), else this project's own: numbers of the two are not comparable. As in the official code the whole
prompt, cues such as "Answer:" included, is the user's turn; few-shot and code datasets have no chat template; a prompt
that is too long is cut in the middle, and its row counts the tokens; answers are as long as dataset2maxlen.json says.
Answers in own wording that are one line end with it, official ones with the model's EOS, samsum's with a newline.

Example (hotpotqa): passages on "Scott Derrickson" and "Ed Wood" among eight others, "Were Scott Derrickson and Ed Wood
of the same nationality?"; the answer is "yes": "Yes." scores 1, "Yes, both were American." 0.4.

A subset is a dataset; one of LongBench-E is a dataset's range of lengths, as it is reported: hotpotqa_e/0-4k. Rows of
the data that cannot be used do not end a run: their result rows have status error and name file and line (LongBench-E:
without a usable length they count to 0-4k). The macro average weighs datasets alike, as papers on KV caches do.

Metrics: https://github.com/THUDM/LongBench/blob/2e00731/LongBench/metrics.py and eval.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from qevict_bench import longbench_metrics as metrics
from qevict_bench.task import Ending, Example, Prompter, Task, check_source
from tasks.longbench.cut import fitted
from tasks.longbench.prompts import Prompts
from tasks.longbench.sources import NEEDS, Source
from tasks.longbench.structure import DATASETS, PRESETS, expanded, parts

_METRICS = {
    "qa_f1": (metrics.qa_f1,),
    "rouge_l": (metrics.rouge_l, metrics.rouge_score_l),
    "retrieval": (metrics.retrieval,),
    "count": (metrics.count,),
    "code_sim": (metrics.code_sim, metrics.code_sim_levenshtein),
}
"""The official one first."""


@dataclass(frozen=True)
class LongBench(Task):
    """LongBench v1. Raises ValueError for a bad field, with its value and what to write instead."""

    name: ClassVar[str] = "longbench"
    stop: ClassVar[tuple[str, ...]] = ()

    preset: str = "paper12"
    """"paper12", "kv16", "all_en" (= kv16) or "longbench_e"."""
    subsets: tuple[str, ...] = ()
    """Datasets in place of the preset's; hotpotqa_e stands for its three ranges of lengths."""
    source: str = "own"
    """"own", "local" or "hub"."""
    data_dir: str = ""
    """With source "local": holds NAME.jsonl and NAME_e.jsonl, or data.zip."""
    hub_id: str = ""
    """With source "hub": OWNER/NAME, or the path of a local copy."""
    prompts_dir: str = ""
    """A checkout of https://github.com/THUDM/LongBench, for the official wording."""
    max_length: int = 0
    """Most tokens of the bare prompt, without template and answer; 0 = as many as the model can take, never more."""

    def __post_init__(self) -> None:
        check_source(self, self.source, NEEDS)
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r} is unknown; use one of {', '.join(PRESETS)}")
        if isinstance(self.subsets, str):
            raise ValueError(f"subsets={self.subsets!r} is a string; write a list: [{self.subsets}]")
        object.__setattr__(self, "subsets", expanded(tuple(self.subsets)) or PRESETS[self.preset])
        if self.source == "own" and any(parts(subset)[2] for subset in self.subsets):
            raise ValueError("source=own has no items of LongBench-E; use source=local or hub")
        if self.max_length < 0 or self.max_length == 1:
            raise ValueError(f"max_length={self.max_length} is too small; use 2 or more, or 0 for what the model takes")

    @property
    def prompt_source(self) -> str:
        """ "official", "redrawn" (official wording around own items), or "own" (own wording)."""
        return self._prompts.origin

    @property
    def splits(self) -> tuple[str, ...]:
        """Only own items have a "dev" split: other draws."""
        return ("test", "dev") if self.source == "own" else ("test",)

    def ending(self, subset: str) -> Ending:
        """As in the official code; in own wording, an answer that is meant to be one line ends with it."""
        dataset = parts(subset)[0]
        if dataset == "samsum":
            return Ending(eos_texts=("\n",), min_new_tokens=1)
        one_line = self.prompt_source == "own" and DATASETS[dataset].metric not in ("rouge_l", "code_sim")
        return Ending(stop=("\n",) if one_line else ())

    def fingerprint(self) -> str:
        """Hash of data and wording. Raises ValueError if they are missing or damaged."""
        digest = hashlib.sha256()
        for subset in self.subsets:
            words, data = self._prompts.words(subset), self._prompts.source.fingerprint(subset)
            digest.update(repr([subset, words, data]).encode())
        return digest.hexdigest()[:16]

    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        """Yield the first `limit` items of every subset in the order of the data, or all if there are fewer.

        Raises ValueError for a bad split or limit, and for data that are missing.
        """
        if split not in self.splits:
            raise ValueError(f"split={split!r} is not there with source={self.source}; use {' or '.join(self.splits)}")
        if limit < 1:
            raise ValueError(f"limit={limit} asks for no example; use 1 or more")
        for subset in self.subsets:
            for item in islice(self._prompts.source.items(subset, seed, split), limit):
                example = self._prompts.example(subset, item)
                yield example if item.problem else fitted(example, prompter, self.max_length)

    def score(self, prediction: str, example: Example) -> float:
        """Return the official metric."""
        return next(iter(self.metrics(prediction, example).values()))

    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        """Return the official metric first, and another implementation of it where such a one is in use."""
        dataset = DATASETS[parts(example.subset)[0]]
        text = metrics.first_line(prediction) if dataset.first_line else prediction
        if dataset.metric == "classification":
            classes = example.classes or self._classes(example.subset)
            return {"classification": metrics.classification(text, example.answers, classes)}
        return {metric.__name__: metric(text, example.answers) for metric in _METRICS[dataset.metric]}

    def _classes(self, subset: str) -> tuple[str, ...]:
        """Those of the data, for a stored prediction that is scored again. Raises ValueError if they are missing."""
        items = self._prompts.source.items(subset, 0, "test")
        if found := next((item.classes for item in items if item.classes), ()):
            return found
        raise ValueError(f"no row of {subset} has classes; fetch the data anew")

    @property
    def _prompts(self) -> Prompts:
        place = {"local": self.data_dir, "hub": self.hub_id}.get(self.source, "")
        return Prompts(Source(self.source, place), self.prompts_dir)
