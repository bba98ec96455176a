"""Scores checked by hand, and against what the official RULER functions gave for the same texts."""

from __future__ import annotations

import pytest

from qevict_bench.metrics import ruler_postprocess, string_match_all, string_match_part


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
