"""What a benchmark is to the engine: examples, prompts as token ids, and the Task interface.

Character offsets count code points of Python strings; token positions are absolute and start at 0.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# Some chat templates print today's date; a fixed one keeps prompts the same from day to day.
_TEMPLATE_DATE = "26 Jul 2024"


@dataclass(frozen=True)
class Example:
    """One benchmark item as text. The prompt reads context, question, answer_prefix, with nothing put in between."""

    id: str
    """Unique within (task, subset, seed, split), e.g. "niah_single_1-0003"."""
    subset: str
    context: str
    """Text before the question, its trailing separator included."""
    question: str
    answer_prefix: str
    """Text the answer continues, put after the assistant header; may be empty."""
    answers: tuple[str, ...]
    max_new_tokens: int
    answer_spans: tuple[tuple[int, int], ...]
    """Character spans [start, stop) of the answer values inside `context`; may be empty."""
    group: str = ""
    """Examples with the same group share a context (or part of it), so their scores are not independent draws and are
    resampled together; "" = it stands alone."""
    data_source: str = ""
    """Where the content comes from, e.g. "synthetic", "squad", "simonjegou/ruler"."""


@dataclass(frozen=True)
class Prompt:
    """One example as token ids of the evaluated model."""

    ids: tuple[int, ...]
    """The whole prompt; special tokens included exactly once."""
    answer_positions: tuple[int, ...]
    """Ascending token positions that hold (part of) an answer value."""
    truncated_tokens: int
    """Tokens that were cut; 0 unless something was."""
    context_tokens: int
    """Number of leading tokens that lie entirely in template head + context: ids[:context_tokens] tells nothing of
    the question, so query-agnostic protocols compress exactly these."""


@dataclass(frozen=True)
class Prompter:
    """Turns examples into prompts with the evaluated model's (fast) tokenizer."""

    tokenizer: Any
    chat: bool
    """Wrap context + question in the tokenizer's chat template. Otherwise BOS (if there is one) + plain text."""

    def encode(self, example: Example) -> Prompt:
        """Tokenise `example`.

        Raises ValueError if the chat template is missing or rewrites the user's text, or if the tokenizer cannot tell
        which characters a token covers.
        """
        text, context_start, context_stop = self._render(example)
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids: list[int] = encoding["input_ids"]
        offsets: list[tuple[int, int]] = encoding["offset_mapping"]
        if offsets and offsets[-1][1] < len(text.rstrip()):
            raise ValueError(
                f"the tokenizer's offsets end at character {offsets[-1][1]} of {len(text)}: answer positions would be "
                "wrong; use a newer version of `tokenizers`"
            )
        context_tokens = next((i for i, (_, stop) in enumerate(offsets) if stop > context_stop), len(offsets))
        spans = [(context_start + start, context_start + stop) for start, stop in example.answer_spans]
        positions = _overlapping(offsets, spans)
        bos = self.tokenizer.bos_token_id
        if not self.chat and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
            context_tokens += 1
            positions = [position + 1 for position in positions]
        return Prompt(tuple(ids), tuple(positions), 0, context_tokens)

    def count(self, example: Example) -> int:
        """len(encode(example).ids), without the positions that encode works out."""
        ids: list[int] = self.tokenizer(self._render(example)[0], add_special_tokens=False, verbose=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        return len(ids) + (not self.chat and bos is not None and ids[:1] != [bos])

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that decides how text becomes tokens."""
        parts = [self.tokenizer.backend_tokenizer.to_str(), str(self.tokenizer.chat_template if self.chat else "")]
        parts.append(str(self.tokenizer.bos_token_id))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _render(self, example: Example) -> tuple[str, int, int]:
        """Return the prompt's text, the offset in it that example.context[0] has (had, if stripped), and its end."""
        body = example.context + example.question
        if not self.chat:
            return body + example.answer_prefix, 0, len(example.context)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; load the model with chat=false")
        rendered: str = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": body}],
            tokenize=False,
            add_generation_prompt=True,
            date_string=_TEMPLATE_DATE,
        )
        # Templates may strip the user's text at both ends.
        kept = body.strip()
        kept_start = rendered.rfind(kept)
        if kept_start < 0:
            raise ValueError(
                f"the chat template changes the user's text of example {example.id!r}, so its context cannot be "
                "located in the prompt; load the model with chat=false"
            )
        start = kept_start - (len(body) - len(body.lstrip()))
        stop = min(start + len(example.context), kept_start + len(kept))
        return rendered + example.answer_prefix, start, stop


def _overlapping(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Indices of the tokens that share at least one character with a span; one pass, both in text order."""
    found: list[int] = []
    pending = sorted(spans)
    for index, (start, stop) in enumerate(offsets):
        while pending and pending[0][1] <= start:
            pending.pop(0)
        if not pending:
            break
        if start < stop and any(start < span_stop and span_start < stop for span_start, span_stop in pending):
            found.append(index)
    return found


class Task(ABC):
    """A benchmark. Subclasses are frozen dataclasses in tasks/ that hold hyper-parameters only.

    The properties may be overridden by dataclass fields, class variables or properties; a field needs a default.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """E.g. "ruler"."""

    @property
    @abstractmethod
    def prompt_source(self) -> str:
        """ "own" (wording of this project), "official" (official data), "redrawn" (official wording, our draws)."""

    @property
    @abstractmethod
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer; () = only the model's own EOS."""

    @property
    @abstractmethod
    def subsets(self) -> tuple[str, ...]:
        """Names of the parts, in the order in which `examples` yields them."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that `examples` can yield."""
        return ("test", "dev")

    @property
    def nominal_length(self) -> int:
        """Tokens that prompt + answer are meant to have at most; 0 = nothing is meant. What exceeds it is counted."""
        return 0

    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the data's identity: source, contents of files, what the generator produces."""

    @abstractmethod
    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        """Yield at most `limit` examples per subset, subset by subset; example i does not depend on `limit`.

        `split` is "test" (reported) or "dev" (for choosing hyper-parameters; shares no example with "test").
        """

    @abstractmethod
    def score(self, prediction: str, example: Example) -> float:
        """The headline metric in [0, 1]. `prediction` is the generated text alone, without prompt or prefix."""

    @abstractmethod
    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        """All metrics by name, the headline metric included."""
