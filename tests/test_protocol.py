"""Protocols: where prompts are cut, what is compressed before what, and several questions on one cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from presets import qevict
from tiny_models import family, prompt, random_ids

from methods.full_kv import FullKV
from methods.h2o import H2O
from methods.kivi import KIVI
from methods.random import Random
from methods.snapkv import SnapKV
from methods.streaming_llm import StreamingLLM
from methods.tova import TOVA
from methods.zipcache import ZipCache
from qevict_bench import runner
from qevict_bench.budget import Budget
from qevict_bench.conversation import converse
from qevict_bench.engine import Generation, generate
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy
from qevict_bench.protocol import Protocol, Turn, lengths
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.task import Prompt, Prompter

AGNOSTIC = Protocol("query_agnostic")
BUDGET = Budget("0.75")
METHODS = [SnapKV(window=4), StreamingLLM(), qevict(recent=8, omega=4), KIVI(group=8, residual=8), H2O(), Random()]


def asked(ids: Sequence[int], context: int, prefix: int = 0) -> Prompt:
    return replace(prompt(ids, (3, 4)), context_tokens=context, prefix_tokens=prefix)


def never_stopping(kind: str) -> LoadedModel:
    return replace(family(kind), eos_ids=())


def stopping(kind: str) -> LoadedModel:
    """Every fourth token ends an answer."""
    return replace(family(kind), eos_ids=tuple(range(0, 97, 4)))


def timeless(made: Generation) -> Generation:
    return replace(made, ttft_s=0.0, decode_s=0.0)


# ---- where prompts are cut ----

TEN = tuple(range(10))
CUTS = [
    (Protocol(), [9, 1]),
    (Protocol(first_token="full"), [10]),
    (AGNOSTIC, [6, 3, 1]),
    (Protocol("query_agnostic", first_token="full"), [6, 4]),
    (Protocol(answer_prefix_at="after_compression"), [7, 2, 1]),
    (Protocol(answer_prefix_at="after_compression", first_token="full"), [7, 3]),
    (Protocol("query_agnostic", answer_prefix_at="after_compression"), [6, 1, 2, 1]),
    (Protocol("multi_query", "continue"), [6, 3, 1]),
]


@pytest.mark.parametrize(("protocol", "sizes"), CUTS)
def test_every_protocol_feeds_the_same_ids_and_cuts_them_elsewhere(protocol: Protocol, sizes: list[int]) -> None:
    steps = protocol.steps(asked(TEN, 6, 3))
    assert sum(steps, ()) == TEN
    assert [len(step) for step in steps] == sizes
    first, later = lengths(steps, 5)
    assert first + later == len(TEN) + 5 - (len(sizes) > 1)  # the last new token never enters the cache


def test_a_prompt_without_prefix_has_no_step_for_it() -> None:
    assert Protocol(answer_prefix_at="after_compression").steps(asked(TEN, 6)) == Protocol().steps(asked(TEN, 6))


@pytest.mark.parametrize("name", ["query_agnostic", "multi_query"])
def test_a_question_without_context_cannot_be_asked_agnostically(name: str) -> None:
    with pytest.raises(ValueError, match="nothing stands before the question"):
        Protocol(name).steps(asked(TEN, 0))  # type: ignore[arg-type]


def test_a_mode_belongs_to_conversations() -> None:
    with pytest.raises(ValueError, match=r"mode=continue .*multi_query"):
        Protocol(mode="continue")


# ---- what the engine does with them ----


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("protocol", [protocol for protocol, _ in CUTS[:-1]])
def test_protocols_do_not_matter_where_nothing_moves(protocol: Protocol, kind: str) -> None:
    """FullKV answers the same however its prompt is cut: greedy tokens of transformers are those of query_aware."""
    prompts = [asked(random_ids(n, n), n - 12, 5) for n in (40, 61)]
    made = [
        generate(
            never_stopping(kind),
            FullKV(),
            Budget("1.0"),
            prompts,
            max_new_tokens=[8, 5],
            stop=(),
            protocol=each,
            seed=0,
            example_ids=["a", "b"],
            prefill_chunk=16,
        )
        for each in (Protocol(), protocol)
    ]
    assert [x.new_ids for x in made[0]] == [x.new_ids for x in made[1]]
    assert [len(x.new_ids) for x in made[1]] == [8, 5]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("protocol", [AGNOSTIC, CUTS[6][0], Protocol("query_agnostic", first_token="full")])
def test_rows_of_a_batch_are_what_they_are_alone(method: KVPolicy, protocol: Protocol) -> None:
    prompts = [asked(random_ids(n, n), n - q, p) for n, q, p in ((80, 12, 5), (64, 3, 0), (71, 20, 1))]
    limits, names = [6, 9, 3], ["a", "b", "c"]

    def run(*which: int) -> list[Generation]:
        made = generate(
            never_stopping("llama"),
            method,
            BUDGET,
            [prompts[i] for i in which],
            max_new_tokens=[limits[i] for i in which],
            stop=(),
            protocol=protocol,
            seed=0,
            example_ids=[names[i] for i in which],
        )
        return [replace(timeless(each), memory={**each.memory, "workspace": 0}) for each in made]

    assert run(0, 1, 2) == [*run(0), *run(1), *run(2)]


def test_agnostic_compression_does_not_depend_on_the_question() -> None:
    """The cache after the context is the same whatever is asked, and differs from what query_aware keeps."""
    context, questions = random_ids(48, 1), [random_ids(10, 2), random_ids(10, 3)]

    def kept(protocol: Protocol, question: list[int]) -> list[list[int]]:
        policy = SnapKV(window=4, every=4).fit(BUDGET, geometry_of(family("llama")), 48, 20)
        session = KVSession(family("llama"), policy, BUDGET, 1, max_new=20)
        session.prefill([protocol.steps(asked([*context, *question], 48))[0]])
        tables = [layer.table.rect().pos[0] for layer in session.layers.values()]
        return [pos[(pos >= 0) & (pos < 40)].tolist() for pos in tables]

    agnostic = [kept(AGNOSTIC, question) for question in questions]
    assert agnostic[0] == agnostic[1]
    aware = [kept(Protocol(), question) for question in questions]
    assert aware[0] != aware[1]


def test_the_basis_prompt_is_the_first_prefill() -> None:
    """0.5 of 48 context tokens under query_agnostic, of 59 prompt tokens under query_aware."""
    for protocol, tokens in ((AGNOSTIC, 48), (Protocol(), 59)):
        [made] = generate(
            never_stopping("llama"),
            StreamingLLM(),
            Budget("0.5", basis="prompt"),
            [asked(random_ids(60), 48)],
            max_new_tokens=[6],
            stop=(),
            protocol=protocol,
            seed=0,
            example_ids=["a"],
        )
        per_token = 3 * 2 * 2 * 16 * 4  # layers, KV heads, key and value, head dim, bytes
        assert made.memory["allowed"] == tokens * per_token // 2


# ---- several questions on one cache ----


def turns_of(context: list[int], questions: Sequence[list[int]], max_new: int = 6) -> list[Turn]:
    """The later questions of one token stand behind an answer as they are."""
    prompts = [asked([*context, *question], len(context)) for question in questions]
    follow_ups = [asked([7, *question] if len(question) > 1 else question, 0) for question in questions]
    return [Turn(first, later, max_new) for first, later in zip(prompts, follow_ups, strict=True)]


def talk(
    conversations: list[list[Turn]],
    method: KVPolicy,
    kind: str = "llama",
    mode: str = "reset",
    spec: str = "0.75",
    names: Sequence[str] = ("talk", "other"),
    model: Callable[[str], LoadedModel] = never_stopping,
) -> list[list[Generation]]:
    made = converse(
        model(kind),
        method,
        Budget(spec),
        conversations,
        stop=(),
        protocol=Protocol("multi_query", mode),  # type: ignore[arg-type]
        seed=0,
        names=names[: len(conversations)],
    )
    return [[timeless(each) for each in turns] for turns in made]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_reset_makes_every_question_the_only_one(method: KVPolicy, kind: str) -> None:
    """Answers, moves and bytes of question 2 after question 1 are those of question 2 alone; on sliding layers too."""
    context, questions = random_ids(50, 1), [random_ids(8, 2), random_ids(8, 3), random_ids(8, 4)]
    together = talk([turns_of(context, questions)], method, kind)[0]
    alone = [talk([turns_of(context, [question])], method, kind)[0][0] for question in questions]
    assert together == alone


def test_reset_batches_conversations_of_unequal_length() -> None:
    first, second = (
        turns_of(random_ids(50, 1), [random_ids(8, 2), random_ids(5, 3)]),
        turns_of(random_ids(50, 5), [random_ids(8, 6)]),
    )
    together = talk([first, second], SnapKV(window=4))
    alone = [*talk([first], SnapKV(window=4)), *talk([second], SnapKV(window=4), names=("other",))]
    assert [[x.new_ids for x in turns] for turns in together] == [[x.new_ids for x in turns] for turns in alone]
    assert [[x.fractions for x in turns] for turns in together] == [[x.fractions for x in turns] for turns in alone]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_growing_cache_equals_one_long_sequence(kind: str) -> None:
    """FullKV in mode continue: context, question, answer, question as one text, by FullKV's own logits."""
    context, questions = random_ids(30, 1), [random_ids(6, 2), random_ids(7, 3)]
    first, second = talk([turns_of(context, questions)], FullKV(), kind, "continue", "1.0")[0]
    loaded, text = never_stopping(kind), [*context, *questions[0]]
    for answer, follow_up in ((first.new_ids, [7, *questions[1]]), (second.new_ids, [])):
        for token in answer:
            session = KVSession(loaded, FullKV(), Budget("1.0"), 1)
            assert int(session.prefill([text])[0].argmax()) == token
            text = [*text, token]
        text = [*text, *follow_up]


def test_a_growing_cache_goes_on_routing_and_counts_each_turn() -> None:
    questions = [random_ids(6, seed) for seed in (2, 3, 4)]
    turns = talk([turns_of(random_ids(90, 1), questions, 20)], qevict(), mode="continue", spec="0.6")[0]
    later = [turn.events for turn in turns[1:]]
    assert turns[0].events == 1 + 1 + 2  # context, question, two of 19 decoded tokens
    assert later == [1 + 2] * 2
    assert all(0 < turn.fractions["mean"] <= 0.6 for turn in turns)
    assert all(turn.demotions + turn.evictions > 0 for turn in turns)


GROWING = [
    *METHODS,
    TOVA(),
    ZipCache(gap=8),
    qevict(recent=8, omega=8, decode_scores="every_step", decay=0.8),
    qevict(recent=8, omega=8, decode_scores="last_step", aged_score="mean_candidate"),
    qevict(recent=8, omega=8, routing="random", head_scope="kv_head"),
]


@pytest.mark.parametrize("model", [never_stopping, stopping])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("method", GROWING, ids=lambda method: type(method).__name__)
def test_growing_conversations_side_by_side_are_what_they_are_alone(
    method: KVPolicy, kind: str, model: Callable[[str], LoadedModel]
) -> None:
    """Although they differ in length, in their number of turns, and end their answers within routing intervals."""
    conversations = [
        [turn._replace(max_new=new) for turn, new in zip(turns_of(context, questions), limits, strict=True)]
        for context, questions, limits in (
            (random_ids(90, 1), [random_ids(6, 2), random_ids(9, 3), random_ids(6, 4)], (21, 5, 19)),
            (random_ids(81, 5), [random_ids(7, 6), [8], random_ids(5, 7)], (3, 22, 12)),
            (random_ids(90, 8), [random_ids(6, 9)], (14,)),
        )
    ]
    names = ("talk", "other", "third")
    together = talk(conversations, method, kind, "continue", names=names, model=model)
    for turns, one, name in zip(together, conversations, names, strict=True):
        [alone] = talk([one], method, kind, "continue", names=(name,), model=model)
        for side_by_side, single in zip(turns, alone, strict=True):
            assert without_workspace(side_by_side) == without_workspace(single)
    assert sum(turn.evictions + turn.demotions for turns in together for turn in turns[1:]) > 0


def without_workspace(made: Generation) -> Generation:
    """Unequal rows need other scratch memory than one alone."""
    return replace(made, memory={name: value for name, value in made.memory.items() if name != "workspace"})


def test_conversations_that_do_not_fit_the_context_are_refused() -> None:
    loaded = replace(never_stopping("llama"), max_context=70)
    with pytest.raises(ValueError, match="talk"):
        converse(
            loaded,
            FullKV(),
            Budget("1.0"),
            [turns_of(random_ids(50), [random_ids(8)] * 3)],
            stop=(),
            protocol=Protocol("multi_query", "continue"),
            seed=0,
            names=["talk"],
        )


# ---- the runner ----


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, object]]]:
    monkeypatch.setattr(runner, "describe", fakes.describe)

    def rows(**changes: object) -> list[dict[str, object]]:
        summary = runner.run(fakes.config(tmp_path, **changes), fakes.ENGINE)
        lines = (tmp_path / summary.run_id / "rows.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return rows


def test_the_protocol_is_in_the_row_and_in_the_id(run: Callable[..., list[dict[str, object]]]) -> None:
    changes = [
        {},
        {"protocol__name": "query_agnostic"},
        {"protocol__name": "multi_query"},
        {"protocol__name": "multi_query", "protocol__mode": "continue"},
        {"protocol__answer_prefix_at": "after_compression"},
        {"protocol__instruction_at": "question"},
    ]
    rows = [run(**change)[0] for change in changes]
    assert len({row["run_id"] for row in rows}) == len(changes)
    names = ("protocol", "mode", "answer_prefix_at", "instruction_at")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("query_aware", "reset", "in_prompt", "context"),
        ("query_agnostic", "reset", "in_prompt", "context"),
        ("multi_query", "reset", "in_prompt", "context"),
        ("multi_query", "continue", "in_prompt", "context"),
        ("query_aware", "reset", "after_compression", "context"),
        ("query_aware", "reset", "in_prompt", "question"),
    ]


# ---- prompts ----


@pytest.mark.parametrize("name", ["query_aware", "multi_query"])
def test_the_task_says_how_long_answers_are_at_least(run: Callable[..., list[dict[str, object]]], name: str) -> None:
    assert {row["new_tokens"] for row in run(protocol__name=name, task__min_new_tokens=7)} == {7}


@pytest.mark.parametrize("config", ["smollm2", "gemma3"])
def test_a_follow_up_is_what_the_template_puts_after_an_answer(config: str, request: pytest.FixtureRequest) -> None:
    loaded: LoadedModel = request.getfixturevalue(config)
    prompter = Prompter(loaded.tokenizer, loaded.chat)
    example = fakes_example("What is it?", "It is")
    later = prompter.follow_up(example)
    text = loaded.tokenizer.decode(later.ids)
    assert text.endswith("It is")
    assert "What is it?" in text
    assert loaded.tokenizer.decode(later.ids[-later.prefix_tokens :]).strip() == "It is"
    if loaded.chat:
        turns = [("user", "a"), ("assistant", "b"), ("user", "What is it?")]
        messages = [{"role": role, "content": content} for role, content in turns]
        whole = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert whole.split("assistant\nb", 1)[1] + "It is" == text


def fakes_example(question: str, prefix: str) -> object:
    from qevict_bench.task import Example

    return Example("x-0", "x", "A text. ", question, prefix, ("a",), 4, ())
