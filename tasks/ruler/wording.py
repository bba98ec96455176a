"""What a set of sentences for prompts must provide: `own.OwnWording` and `repo.RepoWording` are two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from tasks.ruler.structure import OFFICIAL_NEW_TOKENS, Niah


class Frame(NamedTuple):
    """What surrounds the haystack of a prompt: `before` haystack `after` `question` `answer_prefix`."""

    before: str
    after: str
    """Separator between haystack and question; the context ends with it."""
    question: str
    answer_prefix: str


class Wording(ABC):
    """Sentences of all subtasks. `noise_line` fills haystacks; `noise_word` stands for rank 1 in fwe."""

    noise_line: str
    noise_word = "..."

    @abstractmethod
    def niah(self, spec: Niah, keys: Sequence[str]) -> Frame: ...

    @abstractmethod
    def needle(self, spec: Niah, key: str, value: str) -> tuple[str, int]:
        """The sentence that gives `key` its `value`, and the offset of the value in it."""

    @abstractmethod
    def essay(self, rng: Random) -> Iterator[str]:
        """Sentences without end."""

    @abstractmethod
    def vt(self, value: str, count: int) -> Frame: ...

    @abstractmethod
    def assignment(self, name: str, value: str) -> str:
        """The line that gives variable `name` a number."""

    @abstractmethod
    def copy(self, name: str, source: str) -> str:
        """The line that gives variable `name` the value of variable `source`."""

    @abstractmethod
    def cwe(self, count: int) -> Frame: ...

    @abstractmethod
    def fwe(self) -> Frame: ...

    @abstractmethod
    def qa(self, question: str, opening: str) -> Frame:
        """`opening` begins a sentence that the answer completes ("" = none); official wording has no use for it."""

    @abstractmethod
    def document(self, number: int, text: str) -> str: ...

    def new_tokens(self, subset: str) -> int:
        return OFFICIAL_NEW_TOKENS[subset]
