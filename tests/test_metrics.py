"""Scores checked by hand, and against what the official functions gave for the same texts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict_bench.metrics import (
    GSM8K_INVALID,
    gsm8k_cot_strict,
    gsm8k_flexible,
    gsm8k_match,
    gsm8k_strict,
    ruler_postprocess,
    string_match_all,
    string_match_part,
)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        (
            "The numbers are 6692553, 4191175 and 5171761.",
            ["6692553", "4191175", "5171761", "7754864"],
            0.75,
        ),
        ("category", ["cat"], 1.0),  # no word boundary
        ("a b", ["a", "b", "z"], 2 / 3),
        ("", ["a"], 0.0),
        ("NEW york", ["New York"], 1.0),
        ("12\x0034", ["1234"], 0.0),  # a control character becomes a line break, it is not deleted
        ("x", ["x", "x", "y"], 2 / 3),  # duplicates count
    ],
)
def test_string_match_all(prediction: str, references: list[str], expected: float) -> None:
    assert string_match_all(prediction, references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("It is located in FRANCE.", ["France", "Western Europe"], 1.0),
        ("It is located in Spain.", ["France", "Western Europe"], 0.0),
        ("", ["yes"], 0.0),
    ],
)
def test_string_match_part(prediction: str, references: list[str], expected: float) -> None:
    assert string_match_part(prediction, references) == expected


@pytest.mark.parametrize(
    ("raw", "clean"),
    [("  a\tb ", "a\nb"), ("\x00a\x1f\n", "a"), (" \n\t", ""), ("a\r\nb", "a\n\nb"), ("a\x7fb", "a\x7fb")],
)
def test_ruler_postprocess(raw: str, clean: str) -> None:
    assert ruler_postprocess(raw) == clean


def test_mistaken_references_are_refused() -> None:
    with pytest.raises(ValueError, match="'1234567'.*sequence"):
        string_match_all("1234567", "1234567")
    with pytest.raises(ValueError, match="at least one answer"):
        string_match_part("a", [])


@pytest.mark.parametrize(
    ("prediction", "gold", "strict", "flexible"),
    [
        ("9 eggs * $2 = $18.\n#### 18", "18", 1, 1),
        ("She makes $18.00 per day.", "18", 0, 0),
        ("total\n#### 1,450,000.", "1,450,000", 1, 1),
        ("#### 18\nQuestion 2: 5+5\n#### 10", "18", 1, 0),  # strict takes the first, flexible the last
        ("...so 18 dollars...", "18", 0, 0),  # "..." looks like a number
        ("It is -3 degrees", "-3", 0, 1),
        ("#### $18", "18", 0, 1),
        ("####18", "18", 0, 1),
        ("#### -10", "-10", 1, 1),
        ("#### 18.", "18", 1, 1),
        ("#### 18..", "18", 0, 0),  # only one dot is dropped
        ("#### 1800", "1,800", 1, 1),
        ("#### 18 dollars, 5 left", "18", 1, 0),
        ("10-3", "-3", 0, 1),
        ("\u0661\u0668", "18", 0, 0),  # digits of other scripts are none
        ("\uff11\uff18", "18", 0, 0),
    ],
)
def test_gsm8k(prediction: str, gold: str, strict: int, flexible: int) -> None:
    assert gsm8k_match(gsm8k_strict(prediction), gold) == strict
    assert gsm8k_match(gsm8k_flexible(prediction), gold) == flexible


@pytest.mark.parametrize(
    ("prediction", "strict", "flexible", "cot"),
    [
        ("She makes $18.00 per day.", GSM8K_INVALID, "$18.00", GSM8K_INVALID),
        ("...so 18 dollars...", GSM8K_INVALID, "...", GSM8K_INVALID),
        ("The answer is 18.", GSM8K_INVALID, "18.", "18"),
        ("The answer is 18", GSM8K_INVALID, "18", "1"),  # the pattern wants one more character
        ("The answer is $18.", GSM8K_INVALID, "$18.", GSM8K_INVALID),
        ("The answer is 9", GSM8K_INVALID, "9", GSM8K_INVALID),
        ("The answer is 9\n", GSM8K_INVALID, "9", GSM8K_INVALID),  # a line break is no further character
        ("The answer is 18. The answer is 20.", GSM8K_INVALID, "20.", "18."),
        ("", GSM8K_INVALID, GSM8K_INVALID, GSM8K_INVALID),
        (".", GSM8K_INVALID, GSM8K_INVALID, GSM8K_INVALID),
        ("-", GSM8K_INVALID, GSM8K_INVALID, GSM8K_INVALID),
        ("#### ", GSM8K_INVALID, GSM8K_INVALID, GSM8K_INVALID),
        ("#### .", ".", GSM8K_INVALID, GSM8K_INVALID),
    ],
)
def test_what_is_extracted_for_gsm8k(prediction: str, strict: str, flexible: str, cot: str) -> None:
    assert (gsm8k_strict(prediction), gsm8k_flexible(prediction), gsm8k_cot_strict(prediction)) == (
        strict,
        flexible,
        cot,
    )


@pytest.mark.parametrize(("prediction", "score"), [("The answer is 18.", 1), ("The answer is 18", 0)])
def test_gsm8k_cot(prediction: str, score: int) -> None:
    assert gsm8k_match(gsm8k_cot_strict(prediction), "18") == score


def harness(prediction: str, pattern: str, which: int) -> str:
    """How lm-evaluation-harness' regex filter picks: all matches, one of them, its first group that is not empty."""
    matches = re.findall(pattern, prediction)
    if not matches:
        return "[invalid]"
    match = matches[which]
    if isinstance(match, tuple):
        match = next(group for group in match if group)
    return str(match).strip()


def harness_match(prediction: str, reference: str) -> bool:
    """And how it compares: patterns deleted one after the other from both sides."""
    texts = [prediction, reference]
    for ignored in (",", r"\$", "(?s).*#### ", r"\.$"):
        texts = [re.sub(ignored, "", text) for text in texts]
    return texts[0].lower() == texts[1].lower()


_PIECES = st.lists(st.sampled_from([*"-#$.,0189 \nAq", "#### ", "The answer is ", "18", "1,800", "\u4e2d", "\x00"]))


@given(pieces=_PIECES, gold=st.sampled_from(["18", "1,800", "-3", "1", "0"]))
def test_gsm8k_extraction_is_that_of_the_harness(pieces: list[str], gold: str) -> None:
    text = "".join(pieces)
    ours = gsm8k_strict(text), gsm8k_flexible(text), gsm8k_cot_strict(text)
    assert ours == (
        harness(text, r"#### (\-?[0-9\.\,]+)", 0),
        harness(text, r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1),
        harness(text, r"The answer is (\-?[0-9\.\,]+).", 0),
    )
    assert [gsm8k_match(found, gold) for found in ours] == [harness_match(found, gold) for found in ours]
    assert gsm8k_match(ours[0], f"worked\n#### {gold}") == gsm8k_match(ours[0], gold)


@pytest.mark.parametrize(
    "piece", ["7", "-", "$ ", ".", "#", "####", "#### ", "#### -", "The answer is ", "\ud83d", "\u4e2d"]
)
def test_a_million_characters_are_scored(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    for extract in (gsm8k_strict, gsm8k_flexible, gsm8k_cot_strict):
        assert gsm8k_match(extract(text), "18") == 0
        assert gsm8k_match(text, text) == 1
