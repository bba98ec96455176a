"""This project's sentences; the official wording is never retyped.

A needle ends in "KEY: VALUE" and so does the answer's opening: with the key right before the value, models of 135M and
270M parameters find words and UUIDs alike, where "the code of KEY is VALUE" lost the first character of UUIDs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from tasks.ruler import prose
from tasks.ruler.structure import NUMBERS, OFFICIAL_NEW_TOKENS, Niah
from tasks.ruler.wording import Frame, Wording


class OwnWording(Wording):
    """This project's sentences."""

    noise_line = (
        "The kettle hums. Rain taps on the glass. A cat sleeps by the stove. Nobody is in a hurry. The clock goes on."
    )

    def niah(self, spec: Niah, keys: Sequence[str]) -> Frame:
        noun = _noun(spec)
        before = f"Read the text below. Somewhere in it a {noun} is given for a name; you will need it at the end.\n\n"
        first = f"The {noun} of {keys[0]}:"
        if len(keys) > 1:
            names = f"{', '.join(keys[:-1])} and {keys[-1]}"
            question = f"What are the {noun}s of {names}? Write them all on one line.\n"
            prefix = f"The {noun}s are, one after the other: the {noun} of {keys[0]}:"
        elif spec.values > 1:
            question = f"What are the {spec.values} different {noun}s of {keys[0]}? Write them all on one line.\n"
            prefix = f"The {spec.values} different {noun}s of {keys[0]}:"
        else:
            question, prefix = f"What is the {noun} of {keys[0]}?\n", first
        return Frame(before, "\n\n", question, prefix)

    def needle(self, spec: Niah, key: str, value: str) -> tuple[str, int]:
        head = f"The {_noun(spec)} of {key}: "
        return f"{head}{value}.", len(head)

    def essay(self, rng: Random) -> Iterator[str]:
        return prose.sentences(rng)

    def vt(self, value: str, count: int) -> Frame:
        return Frame(
            "Some lines below give a number a name, others give a name a second name. Keep track of them.\n\n",
            "\n\n",
            f"Which {count} names stand for {value}? Write them all on one line.\n",
            f"The {count} names for {value}:",
        )

    def assignment(self, name: str, value: str) -> str:
        return f"Let {name} be {value}."

    def copy(self, name: str, source: str) -> str:
        return f"Let {name} be {source}."

    def cwe(self, count: int) -> Frame:
        return Frame(
            "Count the words of this list: a few of them come back much more often than the rest.\n\n",
            "\n\n",
            f"Which {count} words come back most often? Write them as a numbered list on one line.\n",
            f"The {count} most repeated words:",
        )

    def fwe(self) -> Frame:
        return Frame(
            "The text below is written in invented words, with dots in between. Count each word.\n\n",
            "\n\n",
            "Leave out the dots. Which three invented words occur most often? Write them on one line.\n",
            "The three words that occur most often are",
        )

    def qa(self, question: str, opening: str) -> Frame:
        return Frame(
            "Use the documents below to answer a question.\n\n",
            "\n\n",
            f"Question: {question}\n",
            f"Answer: {opening}" if opening else "Answer:",
        )

    def document(self, number: int, text: str) -> str:
        return f"[{number}] {text}"

    def new_tokens(self, subset: str) -> int:
        """Room for the answers at up to one token per character; RULER's 128 only where keys are repeated too.

        Generation ends at the first line break, so more would only lengthen wrong answers.
        """
        fewer = {"niah_single_3": 64, "niah_multikey_3": 64, "niah_multivalue": 64, "niah_multiquery": 128}
        return fewer.get(subset, 32) if subset.startswith("niah") else OFFICIAL_NEW_TOKENS[subset]


def _noun(spec: Niah) -> str:
    return "code" if spec.value_type == NUMBERS else "serial"
