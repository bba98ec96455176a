"""Perplexity: how well a long text is continued, token by token, on a compressed cache. Own design.

An example is a window of a text: its first `context_length` tokens are the prompt, without any question, and what
follows, `new_tokens` tokens, is `Example.gold`. One token is generated and not judged. The result is the negative
log-likelihood of the gold text that metrics.fidelity=true measures, in nats per token, one decode step per token
(`gold.nll` in a row's `fidelity`; metrics.fidelity_tokens says of how many tokens), and exp(nll) is the perplexity.

The text is a generated chronicle whose facts come back (tasks/perplexity/chronicle.py), or a file (source "local").
With a chat model the context is a user's message and the gold text the reply; `model.chat=plain` leaves the text as it
is.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import ClassVar

from qevict_bench.task import Example, Prompter, Task
from tasks.perplexity.chronicle import sentences

_LENGTHS, _NEW_TOKENS = (64, 131_072), (2, 8192)
_SENTENCE_WORDS = 6  # no sentence has fewer


@dataclass(frozen=True)
class Perplexity(Task):
    """Windows of long texts. Raises ValueError for a bad field, with its value and what to write instead."""

    name: ClassVar[str] = "perplexity"
    prompt_source: ClassVar[str] = "own"
    stop: ClassVar[tuple[str, ...]] = ()
    scored: ClassVar[bool] = False
    subsets: ClassVar[tuple[str, ...]] = ("text",)

    context_length: int = 1024
    """Tokens of the prompt, 64..131072; filled up to the last word."""
    new_tokens: int = 256
    """Tokens of the text that follows, 2..8192, up to the last word."""
    source: str = "generate"
    """"generate" or "local"."""
    text_file: str = ""
    """With source "local": a UTF-8 text to cut into windows, which follow on each other and do not overlap; every
    second one is of split "dev". The seed changes nothing."""

    def __post_init__(self) -> None:
        if self.source not in ("generate", "local"):
            raise ValueError(f"source={self.source!r} is unknown; use generate, or local with a text_file")
        if self.source == "local" and not self.text_file:
            raise ValueError("text_file is empty, but source=local needs it; set task.text_file")
        if self.source != "local" and self.text_file:
            raise ValueError(
                f"text_file={self.text_file!r} is not used with source={self.source}; set task.source=local"
            )
        for field, (low, high) in {"context_length": _LENGTHS, "new_tokens": _NEW_TOKENS}.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise ValueError(f"{field}={value} is out of range; use {low} to {high} tokens")

    @property
    def nominal_length(self) -> int:
        return self.context_length + 1

    def fingerprint(self) -> str:
        """Hash of the file, or of one fixed draw."""
        text = self._read() if self.text_file else " ".join(islice(sentences(Random(0)), 64))
        return hashlib.sha256(f"{self.context_length}/{self.new_tokens}/{text}".encode()).hexdigest()[:16]

    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        """Yield `limit` windows, or as many as the file has.

        Raises ValueError for a bad split or limit, or a text file that cannot be read or has no such window.
        """
        if split not in self.splits:
            raise ValueError(f"split={split!r} is not to be had; use {' or '.join(self.splits)}")
        if limit < 1:
            raise ValueError(f"limit={limit} asks for no example; use 1 or more")
        if not self.text_file:
            for index in range(limit):
                words = self._chronicle(f"{seed}/{split}/perplexity/{index}")
                yield next(self._windows(words, prompter, f"text-{index:04d}", "synthetic"))
            return
        words = re.findall(r"\S+\s*", self._read())
        windows = self._windows(words, prompter, "", Path(self.text_file).name)
        found = [*islice(windows, int(split == "dev"), 2 * limit, 2)]
        if not found:
            raise ValueError(
                f"text_file={self.text_file} has {len(words)} words, too few for split={split}; give a longer text, or "
                f"a smaller context_length (now {self.context_length}) or new_tokens (now {self.new_tokens})"
            )
        yield from (replace(example, id=f"text-{index:04d}") for index, example in enumerate(found))

    def score(self, prediction: str, example: Example) -> float:
        """Return 0, which stands for nothing: there are no metrics."""
        return 0.0

    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        """Return nothing: the result is the row's fidelity."""
        return {}

    def _read(self) -> str:
        try:
            return Path(self.text_file).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"text_file={self.text_file} cannot be read ({error}); give a UTF-8 text file") from None

    def _chronicle(self, seeded: str) -> list[str]:
        """Words, with the space behind each, that are enough for a window: a word has at least one token."""
        rng = Random(int.from_bytes(hashlib.sha256(seeded.encode()).digest()[:8], "big"))
        count = (self.context_length + self.new_tokens) // _SENTENCE_WORDS + 2
        return re.findall(r"\S+\s*", " ".join(islice(sentences(rng), count)))

    def _windows(self, words: Sequence[str], prompter: Prompter, name: str, data_source: str) -> Iterator[Example]:
        """Full windows from the first word on."""

        def window(start: int, middle: int, end: int) -> Example:
            return Example(
                id=name,
                subset="text",
                context="".join(words[start:middle]).rstrip(),
                question="",
                answer_prefix="",
                answers=(),
                max_new_tokens=1,
                answer_spans=(),
                data_source=data_source,
                gold="".join(words[middle:end]).rstrip(),
            )

        start, total = 0, len(words)
        while True:
            middle = _last(start, self.context_length, total, key=lambda at: prompter.count(window(start, at, at)))
            end = _last(
                middle, self.new_tokens, total, key=lambda at: len(prompter.continuation(window(start, middle, at)))
            )
            if middle <= start or end <= middle or end == total:
                return
            yield window(start, middle, end)
            start = end


def _last(first: int, most: int, total: int, key: Callable[[int], int]) -> int:
    """The last word, of `total`, up to which `key` gives at most `most` tokens; every word from `first` has one."""
    return first + bisect_right(range(first, min(total, first + most) + 1), most, key=key) - 1
