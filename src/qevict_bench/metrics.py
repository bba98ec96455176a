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


GSM8K_INVALID = "[invalid]"
"""What lm-evaluation-harness extracts from a prediction that holds no number."""
_GSM8K_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_GSM8K_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_GSM8K_COT_STRICT = re.compile(r"The answer is (-?[0-9.,]+).")


def gsm8k_strict(prediction: str) -> str:
    """The number after the first "#### ", or "[invalid]".

    Source: lm-evaluation-harness 4e7e0d4, lm_eval/tasks/gsm8k/gsm8k.yaml, filter ``strict-match``.
    """
    found = _GSM8K_STRICT.search(prediction)
    return found[1] if found else GSM8K_INVALID


def gsm8k_flexible(prediction: str) -> str:
    """The last number, or what looks like one ("..." does), or "[invalid]".

    Source: lm-evaluation-harness 4e7e0d4, lm_eval/tasks/gsm8k/gsm8k.yaml, filter ``flexible-extract``.
    """
    last = GSM8K_INVALID
    for found in _GSM8K_FLEXIBLE.finditer(prediction):
        last = found[0]
    return last


def gsm8k_cot_strict(prediction: str) -> str:
    """The number after the first "The answer is ", or "[invalid]"; what follows it takes one character, if need be its
    last digit.

    Source: lm-evaluation-harness 4e7e0d4, lm_eval/tasks/gsm8k/gsm8k-cot.yaml, filter ``strict-match``.
    """
    found = _GSM8K_COT_STRICT.search(prediction)
    return found[1] if found else GSM8K_INVALID


def gsm8k_match(extracted: str, reference: str) -> float:
    """1 if the two are the same text ("18.00" is not "18"), else 0.

    Ignored in both: "," and "$", all up to the last "#### ", one "." at the end, and case.
    Source: lm-evaluation-harness 4e7e0d4, lm_eval/tasks/gsm8k/gsm8k.yaml, ``exact_match``.
    """
    return float(_gsm8k_normal(extracted) == _gsm8k_normal(reference))


def _gsm8k_normal(text: str) -> str:
    return text.replace(",", "").replace("$", "").rpartition("#### ")[2].removesuffix(".").lower()
