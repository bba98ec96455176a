"""LongBench's metrics: pure functions that map one prediction and its references to [0, 1], quirks included.

Of several references the best counts. No prediction raises an exception. Source: THUDM/LongBench 2e00731,
LongBench/metrics.py and eval.py (there x100 over samples); each function names the official one.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from threading import Thread

from rapidfuzz import fuzz
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NUMBER = re.compile(r"\d+")
_ROUGE_SCORE = RougeScorer(["rougeL"], tokenizer=DefaultTokenizer(use_stemmer=False))  # unnamed, it logs a line a call
_PARAGRAPH = re.compile(r"Paragraph (\d+)")


def first_line(prediction: str) -> str:
    """What is scored of answers to few-shot datasets: up to the first newline that something stands before."""
    return prediction.lstrip("\n").split("\n")[0]


def qa_f1(prediction: str, references: Sequence[str]) -> float:
    """F1 of the bags of words, in lower case, without ASCII punctuation and the articles; ``qa_f1_score``."""
    return _best(_qa_f1, prediction, references)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L of the package `rouge`: of whole summaries, over sets of words, sentences cut at "."; ``rouge_score``.

    0 where the package raises: an empty text, dots alone, a recursion deeper than Python's limit (1,200 words alike and
    no full stop).
    """
    return _best(_rouge_l, prediction, references)


def rouge_score_l(prediction: str, references: Sequence[str]) -> float:
    """ROUGE-L of the package `rouge-score`, without stemming: not LongBench's, but what other harnesses report."""
    return _best(_rouge_score_l, prediction, references)


def classification(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 / (number of the classes in the prediction) if the reference is one of them, else 0; ``classification_score``.

    Classes that are part of the reference do not count, but the official loop removes from the list it runs over, so
    what follows a removed one is passed over.
    """
    return _best(lambda text, reference: _classification(text, reference, classes), prediction, references)


def retrieval(prediction: str, references: Sequence[str]) -> float:
    """Share of the prediction's numbers that are the N of the reference's "Paragraph N"; ``retrieval_score``."""
    return _best(
        lambda text, reference: _share(text, (_PARAGRAPH.findall(reference) or [""])[0]), prediction, references
    )


def count(prediction: str, references: Sequence[str]) -> float:
    """Share of the prediction's numbers that are the reference; ``count_score``."""
    return _best(_share, prediction, references)


def code_sim(prediction: str, references: Sequence[str]) -> float:
    """Similarity of the first line that is no comment, in whole percents; ``code_sim_score``.

    The official requirements name `fuzzywuzzy` and no `python-Levenshtein`; without that it takes difflib's ratio.
    """
    return _best(_code_sim, prediction, references)


def code_sim_levenshtein(prediction: str, references: Sequence[str]) -> float:
    """The same where `python-Levenshtein` is installed: twice the longest common subsequence, as a share of both."""
    return _best(lambda text, reference: round(fuzz.ratio(_code_line(text), reference)) / 100, prediction, references)


def _best(metric: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    if isinstance(references, str):
        raise ValueError(f"references is the string {references!r}; pass a sequence of strings")
    if not references:
        raise ValueError("references is empty: there is nothing to match; give at least one answer")
    return max(metric(prediction, reference) for reference in references)


def _qa_f1(prediction: str, reference: str) -> float:
    words, gold = (Counter(_normal(text).split()) for text in (prediction, reference))
    same = (words & gold).total()
    if not same:
        return 0.0
    precision, recall = same / words.total(), same / gold.total()
    return 2 * precision * recall / (precision + recall)


def _normal(text: str) -> str:
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION))


class _Scoring(Thread):
    """A thread of its own: at which depth of the recursion the score becomes 0 must not depend on the caller.

    `run` calls the package from as deep as the official script does.
    """

    def __init__(self, prediction: str, reference: str) -> None:
        super().__init__(daemon=True)
        self.texts, self.score = (prediction, reference), 0.0

    def run(self) -> None:
        try:
            self.score = Rouge(["rouge-l"]).get_scores(*([text] for text in self.texts), avg=True)["rouge-l"]["f"]
        except (ValueError, RecursionError):
            self.score = 0.0


@lru_cache(maxsize=64)
def _rouge_l(prediction: str, reference: str) -> float:
    scoring = _Scoring(prediction, reference)
    scoring.start()
    scoring.join()
    return scoring.score


@lru_cache(maxsize=64)
def _rouge_score_l(prediction: str, reference: str) -> float:
    return float(_ROUGE_SCORE.score(reference, prediction)["rougeL"].fmeasure)


def _classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    found = [name for name in classes if name in prediction]
    at = 0
    while at < len(found):
        if found[at] in reference and found[at] != reference:
            found.remove(found[at])  # and the one behind it moves to where the loop has been
        at += 1
    return 1 / len(found) if reference in found else 0.0


def _share(prediction: str, number: str) -> float:
    numbers = _NUMBER.findall(prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def _code_sim(prediction: str, reference: str) -> float:
    line = _code_line(prediction)
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def _code_line(prediction: str) -> str:
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
