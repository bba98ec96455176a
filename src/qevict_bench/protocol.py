"""In which order a prompt is read and compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from qevict_bench.task import Prompt

Steps = tuple[tuple[int, ...], ...]
"""Token ids of one row, cut where the cache is compressed in between."""


class Turn(NamedTuple):
    """A question: its whole prompt, what stands behind an earlier answer instead, most tokens of the answer."""

    prompt: Prompt
    follow_up: Prompt
    max_new: int


@dataclass(frozen=True)
class Protocol:
    """Fields of configs/protocol/*.yaml, and `first_token`.

    name: query_aware compresses context and question together; query_agnostic the context before the question is known;
    multi_query so too, then asks all questions that its context has, each on a copy of the compressed cache (mode
    reset) or one after the other on the growing one (mode continue). answer_prefix_at: the opening of the answer is
    part of the question (in_prompt), or comes after_compression as a step of its own. instruction_at: what the task
    says before its context stays there (context), or moves behind it (question). first_token compressed: a prompt's
    last token runs alone, after everything else was routed, so that no answer token ever saw the full cache; full: it
    runs with what it belongs to, as in most official code.
    """

    name: Literal["query_aware", "query_agnostic", "multi_query"] = "query_aware"
    mode: Literal["reset", "continue"] = "reset"
    answer_prefix_at: Literal["in_prompt", "after_compression"] = "in_prompt"
    instruction_at: Literal["context", "question"] = "context"
    first_token: Literal["compressed", "full"] = "compressed"

    def __post_init__(self) -> None:
        if self.mode != "reset" and self.name != "multi_query":
            raise ValueError(f"mode={self.mode} belongs to protocol=multi_query; leave it out with {self.name}")

    @property
    def conversing(self) -> bool:
        """Whether the questions of a context are asked together."""
        return self.name == "multi_query"

    def steps(self, prompt: Prompt, context_tokens: int | None = None) -> Steps:
        """The ids of a prompt; the first step is the prefill. `context_tokens` replaces the prompt's own number.

        Raises ValueError if a context that is to be compressed alone is empty.
        """
        cuts = self._late_cuts(prompt)
        if self.name != "query_aware":
            cuts.add(prompt.context_tokens if context_tokens is None else context_tokens)
            if not min(cuts):
                raise ValueError(f"nothing stands before the question, as protocol={self.name} needs; use query_aware")
        return _cut(prompt.ids, cuts)

    def later_steps(self, prompt: Prompt) -> Steps:
        """The same for a further turn of a conversation, whose context is in the cache already."""
        return _cut(prompt.ids, self._late_cuts(prompt))

    def _late_cuts(self, prompt: Prompt) -> set[int]:
        cuts = {len(prompt.ids) - 1} if self.first_token == "compressed" else set()
        if self.answer_prefix_at == "after_compression":
            cuts.add(len(prompt.ids) - prompt.prefix_tokens)
        return cuts


def _cut(ids: tuple[int, ...], cuts: set[int]) -> Steps:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(ids)), len(ids)]
    return tuple(ids[start:stop] for start, stop in pairwise(edges))


def lengths(steps: Sequence[Sequence[int]], max_new: int) -> tuple[int, int]:
    """Tokens of the prefill, and the most that enter the cache after it; the last new token never does."""
    later = sum(len(step) for step in steps[1:])
    return len(steps[0]), later + max_new - (later > 0)
