"""What a benchmark is to the engine: examples, prompts as token ids, and the Task interface.

Character offsets count code points of Python strings; token positions are absolute and start at 0.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

# Some chat templates print today's date; a fixed one keeps prompts the same from day to day.
_TEMPLATE_DATE = "26 Jul 2024"


@dataclass(frozen=True)
class Example:
    """One benchmark item as text. The prompt reads shots, context, question, answer_prefix, with nothing in between.

    `Task.turns` consecutive examples of a subset with the same shots and context are one conversation: multi_query asks
    their questions one after the other.
    """

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
    shots: tuple[tuple[str, str], ...] = ()
    """Solved examples before the context, (user, assistant) each: turns of a chat, else text as it stands."""
    instruction_chars: int = 0
    """Leading characters of `context` that say what to do, with their separator; -1 = unknown."""
    gold: str = ""
    """A text that continues the prompt as it should; "" = the answers, one after the other."""
    chat: bool = True
    """Whether a model's chat template is put around it; False = bare text, begun as the tokenizer itself begins one."""
    classes: tuple[str, ...] = ()
    """Labels that an answer may have, for classification."""
    truncated_tokens: int = 0
    """Tokens that the task has cut out of the prompt."""
    problem: str = ""
    """What is wrong with this item of the data, and where it stands; it is not run, and its row says so."""

    @property
    def continuation(self) -> str:
        """The text on which predictions of a model can be compared token by token."""
        return self.gold or ", ".join(self.answers)


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
    """Number of leading tokens that lie entirely in template head, shots and context: ids[:context_tokens] tells
    nothing of the question, so query-agnostic protocols compress exactly these."""
    prefix_tokens: int = 0
    """Number of trailing tokens that lie entirely in the answer prefix."""
    boundary_tokens: int = 0
    """Tokens by which context, question and answer prefix, tokenized apart, would differ from the whole."""


@dataclass(frozen=True)
class Prompter:
    """Turns examples into prompts with the evaluated model's (fast) tokenizer.

    The whole prompt is tokenized once, and cut between tokens: every protocol uses the same ids.
    """

    tokenizer: Any
    chat: bool
    """Wrap shots, context + question in the tokenizer's chat template. Otherwise BOS (if there is one) + plain text."""
    instruction_at: str = "context"
    """Where the task's instruction stands: at the head of the `context`, or before the `question`."""
    max_tokens: int = 0
    """Tokens of prompt + answer that the model can take; 0 = unknown."""

    def encode(self, example: Example) -> Prompt:
        """Tokenise `example`.

        Raises ValueError if the chat template is missing or rewrites the user's text, if the tokenizer cannot tell
        which characters a token covers, or if the text of the example spells a special token.
        """
        example = self._moved(example)
        text, context_start, context_stop = self._render(example)
        prefix_start = len(text) - len(example.answer_prefix)
        ids, offsets = self._tokens(text)
        if offsets and offsets[-1][1] < len(text.rstrip()):
            raise ValueError(
                f"the tokenizer's offsets end at character {offsets[-1][1]} of {len(text)}: answer positions would be "
                "wrong; use a newer version of `tokenizers`"
            )
        question_stop = context_start + len((example.context + example.question).rstrip())
        self._refuse_special(example, ids, offsets, ((context_start, question_stop), (prefix_start, len(text))))
        spans = [(context_start + start, context_start + stop) for start, stop in example.answer_spans]
        head = self._head(example, ids)
        return Prompt(
            ids=(*head, *ids),
            answer_positions=tuple(len(head) + position for position in _overlapping(offsets, spans)),
            truncated_tokens=example.truncated_tokens,
            context_tokens=len(head) + _before(offsets, context_stop),
            prefix_tokens=sum(start >= prefix_start for start, _ in offsets),
            boundary_tokens=sum(self._differing(text, ids, at) for at in {context_stop, prefix_start}),
        )

    def follow_up(self, example: Example) -> Prompt:
        """The question of `example` as a further turn, after an answer: the text that comes behind that answer."""
        mark = "(answer)"
        if self.chat and example.chat:
            turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
            rendered = self._template([*turns, {"role": "user", "content": example.question}])
            text = rendered[rendered.rindex(mark) + len(mark) :] + example.answer_prefix
        else:
            text = "\n\n" + example.question + example.answer_prefix
        ids, offsets = self._tokens(text)
        prefix_start = len(text) - len(example.answer_prefix)
        return Prompt(tuple(ids), (), 0, 0, sum(start >= prefix_start for start, _ in offsets))

    def continuation(self, example: Example) -> tuple[int, ...]:
        """Ids of the text that should follow the prompt of `example`, a space before it where the prompt has none."""
        prompt_end = self._render(self._moved(example))[0][-1:]
        space = "" if not prompt_end or prompt_end.isspace() else " "
        return tuple(self._tokens(space + example.continuation.strip())[0])

    def count(self, example: Example) -> int:
        """len(encode(example).ids), without the positions that encode works out."""
        text = self._render(self._moved(example))[0]
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return len(ids) + len(self._head(example, ids))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all that decides how text becomes tokens."""
        parts = [self.tokenizer.backend_tokenizer.to_str(), str(self.tokenizer.chat_template if self.chat else "")]
        parts += [str(self.tokenizer.bos_token_id), self.instruction_at]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(number for number, token in added if token.special) - {self.tokenizer.unk_token_id}

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoding["input_ids"], encoding["offset_mapping"]

    @cached_property
    def _begin(self) -> list[int]:
        """Ids that the tokenizer itself puts before a text."""
        whole, bare = (self.tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
        return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(bare)] == bare), [])

    def _head(self, example: Example, ids: Sequence[int]) -> list[int]:
        if not example.chat:
            head = self._begin
        else:
            bos = self.tokenizer.bos_token_id
            head = [bos] if not self.chat and bos is not None else []
        return head if list(ids[: len(head)]) != head else []

    def _moved(self, example: Example) -> Example:
        """The example with its instruction where it is wanted."""
        if self.instruction_at == "context" or not example.instruction_chars:
            return example
        if (chars := example.instruction_chars) < 0:
            raise ValueError(
                f"the data of {example.id} does not say which part of the context is the instruction; use "
                "protocol.instruction_at=context"
            )
        return replace(
            example,
            context=example.context[chars:],
            question=example.context[:chars] + example.question,
            answer_spans=tuple((start - chars, stop - chars) for start, stop in example.answer_spans),
            instruction_chars=0,
        )

    def _differing(self, text: str, ids: Sequence[int], at: int) -> int:
        """Tokens of the whole that are not those of text[:at] and text[at:] tokenized apart."""
        apart = [*self._tokens(text[:at])[0], *self._tokens(text[at:])[0]] if 0 < at < len(text) else list(ids)
        same = next((i for i, (a, b) in enumerate(zip(ids, apart, strict=False)) if a != b), min(len(ids), len(apart)))
        if same == len(ids) == len(apart):
            return 0
        rest, other = ids[same:][::-1], apart[same:][::-1]
        tail = next(
            (i for i, (a, b) in enumerate(zip(rest, other, strict=False)) if a != b), min(len(rest), len(other))
        )
        return max(len(rest), len(other)) - tail

    def _refuse_special(
        self,
        example: Example,
        ids: Sequence[int],
        offsets: Sequence[tuple[int, int]],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        begin = int(ids[:1] == [self.tokenizer.bos_token_id])  # data may begin with it
        said = [
            token
            for token, (start, stop) in zip(ids[begin:], offsets[begin:], strict=True)
            if any(start < last and first < stop for first, last in spans)
        ]
        said += [token for shot in example.shots for text in shot for token in self._tokens(text)[0]]
        if spelled := [token for token in said if token in self._special]:
            token = self.tokenizer.convert_ids_to_tokens(spelled[0])
            raise ValueError(
                f"the text of {example.id} spells the special token {token}; take it out of the data, or leave this "
                "example out"
            )

    def _template(self, messages: list[dict[str, str]]) -> str:
        rendered: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string=_TEMPLATE_DATE
        )
        return rendered

    def _render(self, example: Example) -> tuple[str, int, int]:
        """Return the prompt's text, the offset in it that example.context[0] has (had, if stripped), and its end."""
        body = example.context + example.question
        if not (self.chat and example.chat):
            shots = "".join(user + assistant for user, assistant in example.shots)
            return shots + body + example.answer_prefix, len(shots), len(shots) + len(example.context)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; load the model with chat=false")
        turns = [
            {"role": role, "content": text.strip()}
            for shot in example.shots
            for role, text in zip(("user", "assistant"), shot, strict=True)
        ]
        rendered = self._template([*turns, {"role": "user", "content": body}])
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


def _before(offsets: Sequence[tuple[int, int]], stop: int) -> int:
    """Number of leading tokens that end at or before a character."""
    return next((i for i, (_, end) in enumerate(offsets) if end > stop), len(offsets))


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


class Ending(NamedTuple):
    """What ends an answer, beside the model's EOS and the most tokens it may have."""

    stop: tuple[str, ...] = ()
    """Strings; the answer is what stands before them."""
    eos_texts: tuple[str, ...] = ()
    """The last token of each counts as an EOS."""
    min_new_tokens: int = 0
    """Before so many tokens no EOS is chosen."""


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
    def scored(self) -> bool:
        """Whether answers are judged; if not, the fidelity of predictions is all there is."""
        return True

    @property
    def min_new_tokens(self) -> int:
        """Before so many tokens the model's EOS does not end an answer: it is never chosen."""
        return 0

    def ending(self, subset: str) -> Ending:
        """What ends the answers of a subset: `stop` and `min_new_tokens`, unless subsets differ."""
        return Ending(self.stop, (), self.min_new_tokens)

    @property
    @abstractmethod
    def subsets(self) -> tuple[str, ...]:
        """Names of the parts, in the order in which `examples` yields them."""

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits that `examples` can yield."""
        return ("test", "dev")

    @property
    def turns(self) -> int:
        """How many consecutive examples share a context, in every subset: the questions of one conversation."""
        return 1

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


def check_source(task: Task, chosen: str, needs: Mapping[str, str]) -> None:
    """Raise ValueError unless the source `chosen` is a key of `needs`, which names the field each source reads ("" for
    none), and of these fields the task has set the chosen source's and no other.
    """
    if chosen not in needs:
        raise ValueError(f"source={chosen!r} is unknown; use one of {', '.join(needs)}")
    for source, field in needs.items():
        value = getattr(task, field) if field else ""
        if field and chosen == source and not value:
            raise ValueError(f"{field} is empty, but source={source} needs it; set task.{field}")
        if value and chosen != source:
            raise ValueError(f"{field}={value!r} is not used with source={chosen}; set task.source={source}")
