"""Text metrics: pure functions that map one prediction and its references to [0, 1]. Each cites its official source."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f]")


def ruler_postprocess(prediction: str) -> str:
    """Clean a prediction as RULER does: strip, turn every character 0x00-0x1f into a newline, strip again.

    Source: NVIDIA/RULER c3f5e3b, scripts/eval/evaluate.py, ``postprocess_pred``.
    """
    return _CONTROL_CHARACTER.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the prediction as substrings, ignoring case.

    Post-processing included. No word boundary: "cat" matches "category".
    Source: NVIDIA/RULER c3f5e3b, scripts/eval/synthetic/constants.py, ``string_match_all`` (there x100 over samples).
    """
    found = _found(prediction, references)
    return sum(found) / len(found)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 if any reference occurs in the prediction as a substring, ignoring case; else 0.

    Post-processing included. lm-eval divides by the number of references instead: not the official metric.
    Source: NVIDIA/RULER c3f5e3b, scripts/eval/synthetic/constants.py, ``string_match_part`` (there x100 over samples).
    """
    return float(any(_found(prediction, references)))


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    if isinstance(references, str):
        raise ValueError(f"references is the string {references!r}; pass a sequence of strings")
    if not references:
        raise ValueError("references is empty: there is nothing to match; give at least one answer")
    text = ruler_postprocess(prediction).lower()
    return [reference.lower() in text for reference in references]
