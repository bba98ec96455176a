"""What the runs of one process have in common and need not make again: the model, a task's examples, their prompts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from qevict_bench.task import Example, Prompt

MOST_BYTES = 2**30
"""Texts are kept up to this size, and token ids too; what is larger is made anew by each run."""
_ID_BYTES = 36  # an int and its place in a tuple


class Kept:
    """Keeps the newest model, the newest task's examples and prompts, and small facts, each under its key."""

    def __init__(self) -> None:
        self._facts: dict[Hashable, Any] = {}
        self._model_key: Hashable = None
        self._model: Any = None
        self._task_key: Hashable = None
        self._source: Iterator[Example] | None = None
        self._examples: list[Example] = []
        self._prompts: dict[str, Prompt] = {}
        self._text_bytes = self._prompt_bytes = 0

    def fact(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Something small."""
        if key not in self._facts:
            self._facts[key] = make()
        return self._facts[key]

    def model(self, key: Hashable, load: Callable[[], Any]) -> Any:
        """The model that `load` gives; another one is freed first."""
        if key != self._model_key:
            self._model_key = self._model = None
            gc.collect()
            if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._model, self._model_key = load(), key
        return self._model

    def examples(self, key: Hashable, make: Callable[[], Iterator[Example]]) -> Iterator[Example]:
        """The examples that `make` gives."""
        if key != self._task_key or self._source is None:
            self._forget()
            self._task_key, self._source = key, make()
        source, number = self._source, 0
        while True:
            if number < len(self._examples) and source is self._source:
                example = self._examples[number]
            else:
                try:
                    example = next(source)
                except StopIteration:
                    return
                except BaseException:
                    self._forget()
                    raise
                self._text_bytes += len(example.context) + len(example.question) + len(example.gold)
                if self._text_bytes > MOST_BYTES:
                    self._forget()
                else:
                    self._examples.append(example)
            number += 1
            yield example

    def prompt(self, example: Example, encode: Callable[[Example], Prompt]) -> Prompt:
        """The prompt of an example that `examples` has just given."""
        if example.id in self._prompts:
            return self._prompts[example.id]
        prompt = encode(example)
        self._prompt_bytes += _ID_BYTES * len(prompt.ids)
        if self._source is not None and self._prompt_bytes <= MOST_BYTES:
            self._prompts[example.id] = prompt
        return prompt

    def _forget(self) -> None:
        self._source, self._examples, self._prompts = None, [], {}
        self._text_bytes = self._prompt_bytes = 0
