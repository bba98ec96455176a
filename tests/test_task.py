"""Prompts as token ids: special tokens once, answers and the border of the context found behind any template."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from small_tokenizers import byte_tokenizer, merging_tokenizer

from qevict_bench.task import Example, Prompter

_CONTEXT = "  A naïve “quote” 🙂 comes first. The code of old-mill: 1234567. The code of old-mill: 7654321.\n\n"
_SPANS = tuple((_CONTEXT.index(value), _CONTEXT.index(value) + 7) for value in ("1234567", "7654321"))
_EXAMPLE = Example(
    "x-0000", "x", _CONTEXT, "What is the code of old-mill?\n", "The code:", ("1234567", "7654321"), 8, _SPANS
)
_TOKENIZERS = pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer])
_CHAT = pytest.mark.parametrize("chat", [True, False])


@_TOKENIZERS
@_CHAT
def test_answer_positions_decode_to_the_answers(make: Any, chat: bool) -> None:
    tokenizer = make()
    prompt = Prompter(tokenizer, chat).encode(_EXAMPLE)
    assert list(prompt.answer_positions) == sorted(set(prompt.answer_positions))
    text = tokenizer.decode([prompt.ids[i] for i in prompt.answer_positions])
    assert "1234567" in text
    assert "7654321" in text
    assert len(text) <= 14 + 4  # at most one neighbouring character at each of the four ends
    assert prompt.truncated_tokens == 0


@_TOKENIZERS
@_CHAT
def test_prompt_reads_head_context_question_prefix(make: Any, chat: bool) -> None:
    tokenizer = make()
    prompt = Prompter(tokenizer, chat).encode(_EXAMPLE)
    text = tokenizer.decode(prompt.ids)
    if chat:
        body = (_EXAMPLE.context + _EXAMPLE.question).strip()
        assert text == f"<s><|start|>user\n{body}<|end|>\n<|start|>assistant\nThe code:"
    else:
        assert text == f"<s>{_EXAMPLE.context}{_EXAMPLE.question}The code:"
    assert prompt.ids.count(tokenizer.bos_token_id) == 1


@_TOKENIZERS
@_CHAT
def test_context_tokens_do_not_depend_on_the_question(make: Any, chat: bool) -> None:
    prompter = Prompter(make(), chat)
    prompt = prompter.encode(_EXAMPLE)
    other = prompter.encode(dataclasses.replace(_EXAMPLE, question="Who ate the pears?\n", answer_prefix="It was"))
    assert prompt.ids[: prompt.context_tokens] == other.ids[: other.context_tokens]
    head = prompter.tokenizer.decode(prompt.ids[: prompt.context_tokens])
    assert head.endswith((_EXAMPLE.context.lstrip(), _EXAMPLE.context.lstrip()[:-1]))  # the last token may cross over
    rest = prompter.tokenizer.decode(prompt.ids[prompt.context_tokens :])
    assert _EXAMPLE.question.strip() in rest
    assert max(prompt.answer_positions) < prompt.context_tokens < len(prompt.ids)


def test_a_token_across_the_border_belongs_to_the_question() -> None:
    prompter = Prompter(merging_tokenizer(chat=False), chat=False)
    example = dataclasses.replace(_EXAMPLE, context="rain on the tab", question="le", answer_prefix="", answer_spans=())
    prompt = prompter.encode(example)
    pieces = [prompter.tokenizer.decode([token]) for token in prompt.ids]
    assert pieces[-1].endswith("table")  # or the test would not test a merge
    assert prompt.context_tokens == len(prompt.ids) - 1


def test_bos_written_in_the_context_is_not_doubled() -> None:
    tokenizer = byte_tokenizer(chat=False)
    prompt = Prompter(tokenizer, chat=False).encode(dataclasses.replace(_EXAMPLE, context="<s>a", answer_spans=()))
    assert prompt.ids.count(tokenizer.bos_token_id) == 1
    assert prompt.context_tokens == 2


def test_tokenizer_without_bos() -> None:
    tokenizer = byte_tokenizer(chat=False)
    tokenizer.bos_token = None
    example = dataclasses.replace(_EXAMPLE, context="ab", question="c", answer_prefix="d", answer_spans=((1, 2),))
    prompt = Prompter(tokenizer, chat=False).encode(example)
    assert tokenizer.decode(prompt.ids) == "abcd"
    assert (prompt.context_tokens, prompt.answer_positions) == (2, (1,))


def test_context_is_found_behind_a_system_text_that_repeats_it() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "<s>system: ab?{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
    example = dataclasses.replace(_EXAMPLE, context="ab", question="?", answer_spans=((1, 2),))
    prompt = Prompter(tokenizer, chat=True).encode(example)
    assert tokenizer.decode(prompt.ids[: prompt.context_tokens]) == "<s>system: ab?<|start|>ab"
    assert prompt.answer_positions == (prompt.context_tokens - 1,)


def test_template_that_strips_the_end_of_the_context() -> None:
    tokenizer = byte_tokenizer()
    example = dataclasses.replace(_EXAMPLE, context=" ab \n\n", question="", answer_spans=((2, 3),))
    prompt = Prompter(tokenizer, chat=True).encode(example)
    assert tokenizer.decode(prompt.ids[: prompt.context_tokens]).endswith("user\nab")
    assert prompt.answer_positions == (prompt.context_tokens - 1,)


def test_errors_name_the_remedy() -> None:
    tokenizer = byte_tokenizer(chat=False)
    with pytest.raises(ValueError, match="no chat template.*chat=false"):
        Prompter(tokenizer, chat=True).encode(_EXAMPLE)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ValueError, match="'x-0000'.*chat=false"):
        Prompter(tokenizer, chat=True).encode(_EXAMPLE)


# ---- answer prefix, instruction, shots ----


@_TOKENIZERS
@_CHAT
def test_prefix_tokens_are_the_end_of_the_prompt(make: Any, chat: bool) -> None:
    tokenizer = make()
    prompt = Prompter(tokenizer, chat).encode(_EXAMPLE)
    end = tokenizer.decode(prompt.ids[len(prompt.ids) - prompt.prefix_tokens :])
    assert "The code:".endswith(end)
    assert len("The code:") - len(end) < 3  # a token may cross the border
    bare = Prompter(tokenizer, chat).encode(dataclasses.replace(_EXAMPLE, answer_prefix=""))
    assert bare.prefix_tokens == 0


@_TOKENIZERS
@_CHAT
def test_the_instruction_moves_behind_the_context(make: Any, chat: bool) -> None:
    tokenizer, words = make(), "Read the text.\n\n"
    spans = tuple((start + len(words), stop + len(words)) for start, stop in _SPANS)
    example = dataclasses.replace(_EXAMPLE, context=words + _CONTEXT, answer_spans=spans, instruction_chars=len(words))
    at_head, moved = (Prompter(tokenizer, chat, where).encode(example) for where in ("context", "question"))
    plain = Prompter(tokenizer, chat).encode(dataclasses.replace(_EXAMPLE, question=words + _EXAMPLE.question))
    assert moved == plain
    assert words.strip() in tokenizer.decode(at_head.ids[: at_head.context_tokens])
    assert words.strip() not in tokenizer.decode(moved.ids[: moved.context_tokens])
    unknown = dataclasses.replace(example, instruction_chars=-1)
    assert Prompter(tokenizer, chat).encode(unknown) == at_head
    with pytest.raises(ValueError, match="of x-0000 does not say .*instruction_at=context"):
        Prompter(tokenizer, chat, "question").encode(unknown)


def test_shots_are_turns_of_a_chat_or_text_before_the_context() -> None:
    shots = (("Q: 1+1\nA:", " 2\n\n"), ("Q: 2+2\nA:", " 4\n\n"))
    example = Example("x-0001", "x", "", "Q: 3+3\nA:", "", ("6",), 8, (), shots=shots)
    plain, chat = (Prompter(byte_tokenizer(), chat).encode(example) for chat in (False, True))
    text = byte_tokenizer().decode(plain.ids)
    assert text == "<s>Q: 1+1\nA: 2\n\nQ: 2+2\nA: 4\n\nQ: 3+3\nA:"
    assert byte_tokenizer().decode(plain.ids[: plain.context_tokens]).endswith("A: 4\n\n")
    text = byte_tokenizer().decode(chat.ids)
    turns = "".join(
        f"<|start|>{role}\n{said}<|end|>\n"
        for role, said in (
            ("user", "Q: 1+1\nA:"),
            ("assistant", "2"),
            ("user", "Q: 2+2\nA:"),
            ("assistant", "4"),
            ("user", "Q: 3+3\nA:"),
        )
    )
    assert text == f"<s>{turns}<|start|>assistant\n"
    assert byte_tokenizer().decode(chat.ids[: chat.context_tokens]).endswith("<|start|>user\n")


def test_texts_that_spell_special_tokens_are_refused() -> None:
    for field in ("context", "question", "answer_prefix"):
        wrong = dataclasses.replace(_EXAMPLE, **{field: "one <|end|> two"}, answer_spans=())
        with pytest.raises(ValueError, match=r"x-0000 spells the special token <\|end\|>"):
            Prompter(byte_tokenizer(), True).encode(wrong)


def test_tokens_that_differ_where_the_parts_meet_are_counted() -> None:
    """Bytes never merge; a tokenizer with the word "tion" does so across a border in "act|ion" or "act|ions"."""
    assert Prompter(byte_tokenizer(), False).encode(_EXAMPLE).boundary_tokens == 0
    prompter = Prompter(merging_tokenizer(), False)
    context, rest = "The code of old-", "mill is what?"
    example = Example("x-0002", "x", context, rest, "", ("6",), 8, ())
    whole = prompter.encode(example)
    ids = [prompter.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (context, rest)]
    apart = [prompter.tokenizer.bos_token_id, *ids[0], *ids[1]]
    assert (whole.boundary_tokens == 0) == (list(whole.ids) == apart)
    assert whole.boundary_tokens <= 3
    far = Example("x-0003", "x", context[:-6], context[-6:] + rest, "", ("6",), 8, ())
    assert list(prompter.encode(far).ids) == list(whole.ids)
