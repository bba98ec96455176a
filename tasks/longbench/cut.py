"""Prompts that are too long, cut in the middle as the official code does.

The bare prompt is tokenized with the tokenizer's special tokens; of more than max_length ids the first and the last
int(max_length / 2) are decoded without special tokens and joined. Template and answer come on top of max_length.

Source: THUDM/LongBench 2e00731, LongBench/pred.py, ``get_pred``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qevict_bench.task import Example, Prompter


def fitted(example: Example, prompter: Prompter, max_length: int) -> Example:
    """`example` with at most `max_length` tokens of bare prompt (0: any number), or as many as the model can take."""
    asked = example
    if max_length and len(ids := _ids(example, prompter)) > max_length:
        asked = _halves(example, prompter, ids, max_length // 2)
    room = prompter.max_tokens - example.max_new_tokens
    if not prompter.max_tokens:
        return asked
    try:
        total = prompter.count(asked)
    except ValueError:  # it cannot be encoded either, and its row will say so
        return asked
    if total <= room:
        return asked
    ids = _ids(example, prompter)
    keep = room - (total - (len(ids) - asked.truncated_tokens))
    while keep >= 2:
        found = _halves(example, prompter, ids, keep // 2)
        excess = prompter.count(found) - room  # halves that are tokenized anew can have other tokens
        if excess <= 0:
            return found
        keep -= excess
    return asked


def _ids(example: Example, prompter: Prompter) -> list[int]:
    ids: list[int] = prompter.tokenizer(example.context + example.question, verbose=False)["input_ids"]
    return ids


def _halves(example: Example, prompter: Prompter, ids: Sequence[int], half: int) -> Example:
    """The parts of the text that is left: its length behind the cut says where the question begins.

    That is exact unless decoding changes the text, or the cut goes through the question.
    """
    head, tail = (prompter.tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    text = head + tail
    border = min(len(example.context), len(text) - min(len(example.question), len(tail)))
    instruction = example.context[: max(0, example.instruction_chars)]
    known = border >= len(instruction) and text.startswith(instruction)
    return replace(
        example,
        context=text[:border],
        question=text[border:],
        instruction_chars=example.instruction_chars if known else -1,
        answer_spans=(),
        truncated_tokens=len(ids) - 2 * half,
    )
