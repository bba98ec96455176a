"""The sentences of generated prompts. They are this project's own; the official wording is never retyped.

A needle ends in "KEY: VALUE" and so does the answer's opening: with the key right before the value, models of 135M and
270M parameters find words and UUIDs alike, where "the code of KEY is VALUE" lost the first character of UUIDs.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.ruler.structure import NUMBERS, Niah

NOISE_LINE = (
    "The kettle hums. Rain taps on the glass. A cat sleeps by the stove. Nobody is in a hurry. The clock goes on."
)


def intro(spec: Niah) -> str:
    """Return the task, put before the haystack."""
    return f"Read the text below. Somewhere in it a {_noun(spec)} is given for a name; you will need it at the end.\n\n"


def needle(spec: Niah, key: str, value: str) -> tuple[str, str, int]:
    """Return the sentence that gives `key` its `value`, the value, and the offset of the value in the sentence."""
    head = f"The {_noun(spec)} of {key}: "
    return f"{head}{value}.", value, len(head)


def question(spec: Niah, keys: Sequence[str]) -> str:
    """Return the question about `keys`, put after the haystack."""
    noun = _noun(spec)
    if len(keys) > 1:
        return f"What are the {noun}s of {', '.join(keys[:-1])} and {keys[-1]}? Write them all on one line.\n"
    if spec.values > 1:
        return f"What are the {spec.values} different {noun}s of {keys[0]}? Write them all on one line.\n"
    return f"What is the {noun} of {keys[0]}?\n"


def answer_prefix(spec: Niah, keys: Sequence[str]) -> str:
    """Return the opening of the answer, which the model completes."""
    noun = _noun(spec)
    if len(keys) > 1:
        return f"The {noun}s are, one after the other: the {noun} of {keys[0]}:"
    if spec.values > 1:
        return f"The {spec.values} different {noun}s of {keys[0]}:"
    return f"The {noun} of {keys[0]}:"


def max_new_tokens(spec: Niah) -> int:
    """Return room for the answers at up to one token per character; RULER's 128 only where keys are repeated too.

    Generation ends at the first line break, so more would only lengthen wrong answers.
    """
    if spec.queries > 1:
        return 128
    if spec.values > 1:
        return 64
    return 32 if spec.value_type == NUMBERS else 64


def _noun(spec: Niah) -> str:
    return "code" if spec.value_type == NUMBERS else "serial"
