"""LongBench's scores: worked examples, what the official script gives for the same texts, and odd predictions."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qevict_bench import longbench_metrics as metrics

_CLASSES = ("Date", "Number of something", "Other number", "Individual")


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("The Eiffel Tower, in Paris.", ["Eiffel Tower"], 2 / 3),
        ("He was born in Paris, France", ["Paris"], 2 / 7),
        ("He was born in Paris, France", ["Paris", "Paris, France"], 0.5),
        ("state-of-the-art", ["state of the art"], 0),
        ("an answer", ["the"], 0),
        ("yes", ["Yes."], 1),
        ("the the", ["a"], 0),  # nothing is left of either
        ("3,000", ["3000"], 1),
        ("x x y", ["x y y"], 2 / 3),
        ("“Paris”", ["Paris"], 0),  # only ASCII punctuation goes
    ],
)
def test_qa_f1(prediction: str, references: list[str], expected: float) -> None:
    assert metrics.qa_f1(prediction, references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "official", "other"),
    [
        ("the cat sat on the mat", "the cat lay on the mat", 0.79999999500, 5 / 6),
        ("The Cat sat.", "the cat sat", 0.33333332833, 1.0),
        ("It rained. We left early", "We left early. It rained", 0.999999995, 0.6),
        ("", "the cat", 0.0, 0.0),
        ("...", "the cat", 0.0, 0.0),
        ("  ", "the cat", 0.0, 0.0),
    ],
)
def test_rouge_l(prediction: str, reference: str, official: float, other: float) -> None:
    assert metrics.rouge_l(prediction, [reference]) == pytest.approx(official, abs=1e-10)
    assert metrics.rouge_score_l(prediction, [reference]) == pytest.approx(other)
    assert metrics.rouge_l(prediction, ["dog", reference]) == pytest.approx(official, abs=1e-10)


def test_the_other_rouge_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    assert metrics.rouge_score_l("said once", ["said twice"]) == 0.5
    assert not caplog.records


def numbered_words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


def test_long_texts_without_a_full_stop_score_0() -> None:
    for count, expected in ((700, 1.0), (1200, 0.0)):
        text = numbered_words(count)
        assert metrics.rouge_l(text, [text]) == pytest.approx(expected, abs=1e-8)
        assert metrics.rouge_score_l(text, [text]) == pytest.approx(1.0)


# As deep as the official script: main file, scorer, rouge_score, then the package. Its recursion goes through the words
# of the longer text, from the last one to the one that both share.
_SCRIPT = """
from rouge import Rouge
def rouge_score(prediction, truth):
    try:
        scores = Rouge().get_scores([prediction], [truth], avg=True)
    except:
        return 0.0
    return scores["rouge-l"]["f"]
def scorer(texts):
    for text in texts:
        print(rouge_score(text, "w0"))
scorer([" ".join(f"w{i}" for i in range(n)) for n in range(975, 1000)])
"""


def test_the_score_becomes_0_at_the_official_length_from_any_depth() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)
    official = [float(line) for line in done.stdout.split()]
    assert 5 < official.count(0.0) < 20
    texts = [numbered_words(count) for count in range(975, 1000)]

    def called(depth: int) -> list[float]:
        return called(depth - 1) if depth else [metrics._rouge_l.__wrapped__(text, "w0") for text in texts]

    assert called(0) == official
    assert called(200) == official


def test_classification() -> None:
    raw, gold = "\n\nNumber of something\nQuestion: What is X ?\nType: Date", ["Number of something"]
    assert metrics.classification(metrics.first_line(raw), gold, _CLASSES) == 1.0
    assert metrics.classification(raw, gold, _CLASSES) == 0.5
    text = "Description of a person"
    assert metrics.classification(text, [text], ("Description", "of", "a", "person", text)) == pytest.approx(1 / 3)
    assert metrics.classification("date", ["Date"], _CLASSES) == 0.0


@given(
    prediction=st.lists(st.sampled_from("abc "), max_size=8).map("".join),
    reference=st.lists(st.sampled_from("abc "), max_size=5).map("".join),
    classes=st.lists(st.lists(st.sampled_from("abc"), max_size=3).map("".join), max_size=6),
)
def test_classification_removes_while_it_iterates(prediction: str, reference: str, classes: list[str]) -> None:
    found = [name for name in classes if name in prediction]
    for name in found:
        if name in reference and name != reference:
            found.remove(name)
    expected = 1 / len(found) if reference in found else 0.0
    assert metrics.classification(prediction, [reference], classes) == expected


@given(st.text("ab ,.the", max_size=20), st.text("ab ,.the", max_size=20))
def test_qa_f1_is_the_overlap_of_bags(prediction: str, reference: str) -> None:
    bags = [
        Counter(
            word
            for word in "".join(letter for letter in text if letter not in ",.").split()
            if word not in ("a", "the")
        )
        for text in (prediction, reference)
    ]
    same = sum(min(bags[0][word], bags[1][word]) for word in bags[0])
    expected = 2 * same / (bags[0].total() + bags[1].total()) if same else 0.0
    assert metrics.qa_f1(prediction, [reference]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "reference", "expected"),
    [
        ("Paragraph 12 or Paragraph 3", "Paragraph 3", 0.5),
        ("3", "Paragraph 3", 1.0),
        ("Paragraph 13", "Paragraph 3", 0.0),
        ("Paragraph three", "Paragraph 3", 0.0),
        ("03", "Paragraph 3", 0.0),
    ],
)
def test_retrieval(prediction: str, reference: str, expected: float) -> None:
    assert metrics.retrieval(prediction, [reference]) == expected


def test_count() -> None:
    assert metrics.count("There are 17 unique", ["17"]) == 1.0
    assert metrics.count("17, no, 18", ["17"]) == 0.5
    assert metrics.count("17.5", ["17"]) == 0.5
    assert metrics.count("many", ["17"]) == 0.0


@pytest.mark.parametrize(
    ("prediction", "reference", "official", "other"),
    [
        ("# c\n    return x + 1\n", "return x+1", 0.77, 0.77),
        ("abcabba", "cbabac", 0.46, 0.62),
        ("\n\nx = 1\ny = 2", "x = 1", 1.0, 1.0),
        ("```python\n// c\nx = 1", "x = 1", 1.0, 1.0),
        ("# only a comment", "x = 1", 0.0, 0.0),
        ("\t\n# c\nx = 1", "x = 1", 0.0, 0.0),  # a line of blanks is a line
        ("# c\n\nx = 1", "x = 1", 0.0, 0.0),  # an empty one behind a comment too
    ],
)
def test_code_sim(prediction: str, reference: str, official: float, other: float) -> None:
    assert metrics.code_sim(prediction, [reference]) == official
    assert metrics.code_sim_levenshtein(prediction, [reference]) == other


def common(left: str, right: str) -> int:
    """Length of the longest common subsequence, by its recurrence."""
    row = [0] * (len(right) + 1)
    for a in left:
        above = list(row)
        for j, b in enumerate(right, 1):
            row[j] = above[j - 1] + 1 if a == b else max(above[j], row[j - 1])
    return row[-1]


@settings(max_examples=50)
@given(st.text("abcx= ", min_size=1, max_size=30), st.text("abcx= ", min_size=1, max_size=30))
def test_the_other_code_sim_is_that_of_levenshtein(line: str, reference: str) -> None:
    expected = round(100 * 2 * common(line, reference) / (len(line) + len(reference))) / 100
    assert metrics.code_sim_levenshtein(line, [reference]) == expected


@pytest.mark.parametrize(
    ("raw", "line"), [("\n\na\nb", "a"), ("a", "a"), ("", ""), ("\n", ""), (" \na", " "), ("\r\na", "\r")]
)
def test_first_line(raw: str, line: str) -> None:
    assert metrics.first_line(raw) == line


ODD = {
    "empty": "",
    "a dot": ".",
    "dots": "." * 5000,
    "blanks": " \t\n  \r\n",
    "newlines": "\n" * 100_000,
    "one word": "x" * 100_000,
    "words": "word " * 20_000,
    "sentences": "One. Two. " * 1000,
    "digits": "9" * 100_000,
    "numbers": "1 " * 5000,
    "CJK": "答案是四十二。" * 100,
    "control": "\x00\x1b\x7f\x0b\x0c\x85\u2028",
    "half a character": "\ud83d and \udc00",
    "quotes": "`#//" * 1000,
    "brackets": "{context}%s\\",
}
_CALLS: dict[str, Callable[[str], float]] = {
    "qa_f1": lambda text: metrics.qa_f1(text, ["The answer."]),
    "rouge_l": lambda text: metrics.rouge_l(text, ["The answer. It is long."]),
    "rouge_score_l": lambda text: metrics.rouge_score_l(text, ["The answer. It is long."]),
    "classification": lambda text: metrics.classification(text, ["Date"], _CLASSES),
    "retrieval": lambda text: metrics.retrieval(text, ["Paragraph 30"]),
    "count": lambda text: metrics.count(text, ["30"]),
    "code_sim": lambda text: metrics.code_sim(text, ["    return z"]),
    "code_sim_levenshtein": lambda text: metrics.code_sim_levenshtein(text, ["    return z"]),
}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_any_text_gets_a_score(call: Callable[[str], float], text: str) -> None:
    assert 0 <= call(text) <= 0.5
    assert 0 <= call(metrics.first_line(text)) <= 0.5


@settings(max_examples=50)
@given(st.text(max_size=60), st.text(max_size=60))
def test_scores_lie_between_0_and_1(prediction: str, reference: str) -> None:
    for metric in (
        metrics.qa_f1,
        metrics.rouge_l,
        metrics.rouge_score_l,
        metrics.count,
        metrics.retrieval,
        metrics.code_sim,
        metrics.code_sim_levenshtein,
    ):
        assert 0 <= metric(prediction, [reference]) <= 1


@pytest.mark.parametrize(("references", "message"), [("abc", "is the string 'abc'"), ([], "at least one answer")])
def test_mistaken_references_are_refused(references: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.qa_f1("a", references)
