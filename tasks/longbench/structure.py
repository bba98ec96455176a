"""The datasets of LongBench: what scores them, how long answers may be, and which presets of them are reported.

Source: THUDM/LongBench 2e00731, LongBench/eval.py, pred.py, config/dataset2maxlen.json.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Dataset(NamedTuple):
    metric: str
    """ "qa_f1", "rouge_l", "classification", "retrieval", "count" or "code_sim"."""
    new_tokens: int
    chat: bool = True
    """Whether the official code puts a chat template around the prompt."""
    first_line: bool = False
    """Whether only the first line of an answer is scored."""


DATASETS = {
    "narrativeqa": Dataset("qa_f1", 128),
    "qasper": Dataset("qa_f1", 128),
    "multifieldqa_en": Dataset("qa_f1", 64),
    "hotpotqa": Dataset("qa_f1", 32),
    "2wikimqa": Dataset("qa_f1", 32),
    "musique": Dataset("qa_f1", 32),
    "gov_report": Dataset("rouge_l", 512),
    "qmsum": Dataset("rouge_l", 512),
    "multi_news": Dataset("rouge_l", 512),
    "trec": Dataset("classification", 64, chat=False, first_line=True),
    "triviaqa": Dataset("qa_f1", 32, chat=False, first_line=True),
    "samsum": Dataset("rouge_l", 128, chat=False, first_line=True),
    "passage_count": Dataset("count", 32),
    "passage_retrieval_en": Dataset("retrieval", 32),
    "lcc": Dataset("code_sim", 64, chat=False),
    "repobench-p": Dataset("code_sim", 64, chat=False),
}
"""The English and code datasets; the five Chinese ones are left out."""

GROUPS = {
    "single-doc QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-doc QA": ("hotpotqa", "2wikimqa", "musique"),
    "summarization": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
"""The benchmark's own, as in its README.md."""

BUCKETS = {"0-4k": (0, 4000), "4-8k": (4000, 8000), "8k+": (8000, math.inf)}
"""LongBench-E's ranges [least, bound) of the column `length`."""
_NOT_IN_E = {"narrativeqa", "musique", "qmsum"}
_E = tuple(f"{name}_e" for name in DATASETS if name not in _NOT_IN_E)

PRESETS = {
    "paper12": tuple(name for name in DATASETS if name not in (*GROUPS["synthetic"], *GROUPS["code"])),
    "kv16": tuple(DATASETS),
    "all_en": tuple(DATASETS),
    "longbench_e": tuple(f"{name}/{bucket}" for name in _E for bucket in BUCKETS),
}
"""paper12: four groups of three; kv16: with code and synthetic datasets, as SnapKV, PyramidKV and AdaKV report them,
which is all there is in English; longbench_e: each dataset's three ranges of length apart."""


def parts(subset: str) -> tuple[str, str, str]:
    """Dataset, name of its file, and range of lengths ("" = all): hotpotqa_e/0-4k is hotpotqa, hotpotqa_e, 0-4k."""
    file, _, bucket = subset.partition("/")
    return file.removesuffix("_e"), file, bucket


def expanded(subsets: tuple[str, ...]) -> tuple[str, ...]:
    """With hotpotqa_e in place of its three ranges. Raises ValueError for unknown, repeated or no names."""
    found = [name for subset in subsets for name in ([f"{subset}/{b}" for b in BUCKETS] if subset in _E else [subset])]
    known = {*DATASETS, *PRESETS["longbench_e"]}
    if unknown := [name for name in found if name not in known]:
        raise ValueError(
            f"subsets={list(subsets)}: {', '.join(map(str, unknown))} is not valid; choose from {', '.join(DATASETS)}, "
            f"of LongBench-E from {', '.join(_E)}, or a range such as hotpotqa_e/0-4k"
        )
    if len(set(found)) < len(found):
        raise ValueError(f"subsets={list(subsets)} names a subset twice; name each once")
    return tuple(found)
