"""Official wording from a checkout of the RULER repository.

Draws (keys, depths, order) are this project's, so the sentences of a prompt are official but no prompt equals one of
RULER's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from tasks.ruler.checkout import Checkout
from tasks.ruler.structure import NIAH, Niah
from tasks.ruler.wording import Frame, Wording

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_FAMILIES = dict.fromkeys(NIAH, "niah") | {
    "vt": "variable_tracking",
    "cwe": "common_words_extraction",
    "fwe": "freq_words_extraction",
    "qa_1": "qa",
    "qa_2": "qa",
}


class RepoWording(Wording):
    """Sentences of one checkout."""

    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout
        self.noise_line = checkout.noise_line

    def niah(self, spec: Niah, keys: Sequence[str]) -> Frame:
        query = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        one = spec.queries * spec.values == 1
        kind = spec.value_type.removesuffix("s") if one else spec.value_type
        return self._frame("niah_single_1", one, type_needle_v=kind, query=query)

    def needle(self, spec: Niah, key: str, value: str) -> tuple[str, int]:
        sentence = self._checkout.needle.format(type_needle_v=spec.value_type, key=key, value=value)
        return sentence, sentence.rindex(value)

    def essay(self, rng: Random) -> Iterator[str]:
        """The essays from their beginning, again and again."""
        return cycle(essays(self._checkout.folder))

    def vt(self, value: str, count: int) -> Frame:
        return self._frame("vt", query=value, num_v=count)

    def assignment(self, name: str, value: str) -> str:
        return self._checkout.assignment.format(name, value)

    def copy(self, name: str, source: str) -> str:
        return self._checkout.copy.format(name, source)

    def cwe(self, count: int) -> Frame:
        return self._frame("cwe", query="", num_cw=count)

    def fwe(self) -> Frame:
        return self._frame("fwe", query="")

    def qa(self, question: str, opening: str) -> Frame:
        return self._frame("qa_1", query=question)

    def document(self, number: int, text: str) -> str:
        return self._checkout.document.format(i=number, document=text)

    def new_tokens(self, subset: str) -> int:
        return self._checkout.templates[_FAMILIES[subset]].new_tokens

    def _frame(self, subset: str, singular: bool = False, **values: Any) -> Frame:
        template = self._checkout.templates[_FAMILIES[subset]]
        texts = [template.text, template.answer_prefix]
        text, prefix = map(_singular, texts) if singular else texts
        before, after = text.split("{context}")
        question = after.lstrip()
        separator = after[: len(after) - len(question)]
        return Frame(before.format(**values), separator, question.format(**values), prefix.format(**values))


def _singular(text: str) -> str:
    """RULER's own rule for one needle that is asked for."""
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        text = text.replace(old, new)
    return text


@lru_cache(maxsize=2)
def essays(folder: Path) -> tuple[str, ...]:
    """Sentences of the essays that RULER downloads, split after full stops (RULER splits with NLTK's punkt)."""
    path = folder / "json" / "PaulGrahamEssays.json"
    try:
        words = json.loads(path.read_text(encoding="utf-8-sig"))["text"].split()
        return tuple(_SENTENCE_END.split(" ".join(words))) if words[0] else ()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(
            f"{path} is missing or damaged; run download_paulgraham_essay.py in its folder, or leave out subsets with "
            "essays"
        ) from None
