"""Prompts of every task with the tokenizers of the embedded models, against a tokenization by hand."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import pytest
from conftest import spec_of
from transformers import AutoTokenizer

from qevict_bench.protocol import Protocol
from qevict_bench.task import Example, Prompter, Task
from tasks.drift import Drift
from tasks.gsm8k import Gsm8k
from tasks.longbench import LongBench
from tasks.needle import NeedleGrid
from tasks.perplexity import Perplexity
from tasks.ruler import Ruler

BORDER = "(border)"
TASKS: dict[str, tuple[Task, int]] = {
    "ruler": (Ruler(), 2),
    "gsm8k": (Gsm8k(), 20),
    "gsm8k without shots": (Gsm8k(shots=0), 20),
    "needle": (NeedleGrid(lengths=(512,)), 4),
    "perplexity": (Perplexity(context_length=512, new_tokens=64), 20),
    "drift": (Drift(), 20),
    "longbench": (LongBench(preset="all_en"), 1),
}
"""With the examples per subset."""


@pytest.fixture(scope="module", params=["smollm2_135m chat", "smollm2_135m plain", "gemma3_270m plain"])
def prompter(request: pytest.FixtureRequest) -> Prompter:
    model, form = request.param.split()
    spec = spec_of(model)
    try:
        importlib.metadata.distribution(spec.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {spec.package} is not installed: {spec.install}")
    return Prompter(AutoTokenizer.from_pretrained(spec.locate()[0]), chat=form == "chat")


def pieces(prompter: Prompter, example: Example) -> list[str]:
    """The prompt as text up to the end of the context, to the end of the question with what closes it, and the rest."""
    users, assistants = [user for user, _ in example.shots], [assistant for _, assistant in example.shots]
    if prompter.chat and example.chat:
        body = templated(prompter, users, assistants, example.context + BORDER + example.question)
        assert body.replace(BORDER, "") == templated(prompter, users, assistants, example.context + example.question)
    else:
        solved = "".join(user + assistant for user, assistant in example.shots)
        body = solved + example.context + BORDER + example.question
    return [*body.split(BORDER), example.answer_prefix]


def templated(prompter: Prompter, users: list[str], assistants: list[str], last: str) -> str:
    turns = [
        turn
        for user, assistant in zip(users, assistants, strict=True)
        for turn in ({"role": "user", "content": user.strip()}, {"role": "assistant", "content": assistant.strip()})
    ]
    messages = [*turns, {"role": "user", "content": last}]
    rendered: str = prompter.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return rendered


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def shared(ids: Iterable[int], others: Iterable[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False))))


def differing(whole: list[int], apart: list[int]) -> int:
    """Tokens between what the two share at the begin and at the end."""
    start = shared(whole, apart)
    return max(len(whole), len(apart)) - start - shared(whole[start:][::-1], apart[start:][::-1])


@pytest.mark.parametrize("name", TASKS)
def test_borders_and_special_tokens(prompter: Prompter, name: str) -> None:
    task, limit = TASKS[name]
    tokenizer = prompter.tokenizer
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    for example in task.examples(prompter, limit, 0, "test"):
        prompt = prompter.encode(example)
        chat = prompter.chat and example.chat
        begin = [] if chat or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        if not example.chat:  # bare text begins as the tokenizer begins one
            begin = [token for token in tokenizer("")["input_ids"] if token in special]
        texts = pieces(prompter, example)
        whole = ids_of(tokenizer, "".join(texts))
        assert list(prompt.ids) == begin + whole
        borders = {len(texts[0]), len(texts[0] + texts[1])} - {0, len("".join(texts))}
        cut = [("".join(texts)[:border], "".join(texts)[border:]) for border in borders]
        off = [differing(whole, [token for part in parts for token in ids_of(tokenizer, part)]) for parts in cut]
        assert prompt.boundary_tokens == sum(off)
        own = templated(prompter, ["."] * len(example.shots), ["."] * len(example.shots), ".") if chat else ""
        expected = begin + [token for token in ids_of(tokenizer, own) if token in special]
        assert [token for token in prompt.ids if token in special] == expected
        assert not special & set(prompter.continuation(example))
        for protocol in (Protocol(), Protocol("query_agnostic")):
            assert tuple(token for step in protocol.steps(prompt) for token in step) == prompt.ids
