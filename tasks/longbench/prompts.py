"""From an item to a prompt: its wording, and where context and question part."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from qevict_bench.task import Example
from tasks.longbench import wording
from tasks.longbench.items import Item
from tasks.longbench.sources import Source
from tasks.longbench.structure import DATASETS, parts


class Prompts(NamedTuple):
    """The wording of a source's items; `prompts_dir` "" = this project's, unless the data have theirs."""

    source: Source
    prompts_dir: str

    @property
    def origin(self) -> str:
        """ "official", "redrawn" (official wording around own items), or "own" (own wording)."""
        if not self.prompts_dir and not self.source.worded:
            return "own"
        return "redrawn" if self.source.kind == "own" else "official"

    def words(self, subset: str) -> wording.Wording:
        """Raises ValueError if `prompts_dir` is of no use."""
        if self.prompts_dir and self.source.worded:
            raise ValueError(
                f"prompts_dir={self.prompts_dir!r} is not used: {self.source.place} has its wording in the data; leave "
                "it out"
            )
        dataset = parts(subset)[0]
        return wording.official(self.prompts_dir, dataset) if self.prompts_dir else wording.own(dataset)

    def example(self, subset: str, item: Item) -> Example:
        """The item as it is asked, at full length; a bad one has no text but its `problem`."""
        words = self.words(subset)
        context, question, instruction = words.split(item.context, item.input)
        if self.source.worded:
            context, question, instruction = item.context, item.question + item.prefix, -1
        if item.problem:
            context, question, instruction = "", "", 0
        return Example(
            id=f"{subset}-{item.number:04d}",
            subset=subset,
            context=context,
            question=question,
            answer_prefix="",
            answers=item.answers,
            max_new_tokens=words.new_tokens,
            answer_spans=(),
            group=hashlib.sha256(item.context.encode()).hexdigest()[:12] if item.context else "",
            data_source={"own": "own", "local": "longbench"}.get(self.source.kind, self.source.place),
            instruction_chars=instruction,
            chat=DATASETS[parts(subset)[0]].chat,
            classes=item.classes,
            problem=item.problem,
        )
