"""Drift: what its conversations consist of, and that dropping a span fails exactly the turns that ask it."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import spec_of
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from processes import made_elsewhere
from small_tokenizers import byte_tokenizer, merging_tokenizer
from tiny_models import engine
from transformers import AutoTokenizer

from qevict_bench import attention
from qevict_bench.budget import Budget
from qevict_bench.conversation import converse
from qevict_bench.engine import Generation
from qevict_bench.models import LoadedModel
from qevict_bench.policy import EVICTED, Allowance, KVPolicy, LayerView, Placement
from qevict_bench.protocol import Protocol, Turn
from qevict_bench.task import Example, Prompter
from tasks.drift import Drift
from tasks.drift.topics import TOPICS

ROOT = Path(__file__).parents[1]
BYTES = Prompter(byte_tokenizer(), chat=True)
MERGES = Prompter(merging_tokenizer(chat=False), chat=False)
TASK = Drift(context_length=4096)
SPLIT_SENTENCES = re.compile(r"(?<=\.) (?=[A-Z\"])")
SMALL = Drift(context_length=4096, turns=6, topics=3, reasked=0.5, max_new_tokens=16)


def made(task: Drift = TASK, count: int = 5, prompter: Prompter = MERGES, **draw: Any) -> list[list[Example]]:
    """The first `count` conversations."""
    seed, split = draw.get("seed", 0), draw.get("split", "test")
    examples = list(task.examples(prompter, count * task.turns, seed, split))
    return [examples[i : i + task.turns] for i in range(0, len(examples), task.turns)]


def parts(context: str) -> dict[str, list[str]]:
    """Title -> sentences, needles included, read off the text."""
    found = re.findall(r"^Part [A-J]: (.*)\.\n(.*)\n\n", context, flags=re.MULTILINE)
    return {title: SPLIT_SENTENCES.split(text) for title, text in found}


def asked(example: Example) -> tuple[str, str]:
    """Key and title, read off the question."""
    found = re.fullmatch(r"What is the code of (\S+)\? And what does the text say about (.*)\?\n", example.question)
    assert found is not None
    return found[1], found[2]


@pytest.mark.parametrize("prompter", [BYTES, MERGES], ids=["bytes_chat", "merges_plain"])
def test_structure(prompter: Prompter) -> None:
    for conversation in made(prompter=prompter):
        [context] = {example.context for example in conversation}
        [group] = {example.group for example in conversation}
        assert group
        read = parts(context)
        assert len(read) == TASK.topics
        assert set(read) <= {topic.title for topic in TOPICS}
        values = re.findall(r"\b\d{7}\b", context)
        assert len(set(values)) == len(values)
        assert re.findall(r"\d+", context[conversation[0].instruction_chars :]) == values
        for title, sentences in read.items():
            at = [i for i, sentence in enumerate(sentences) if sentence.startswith("The code of ")]
            n, m = len(at), len(sentences) - len(at)
            assert n >= 1
            assert at == [round((j + 1) * m / (n + 1)) + j for j in range(n)]
            prose = [sentence for i, sentence in enumerate(sentences) if i not in at]
            for example in conversation:
                if asked(example)[1] == title:
                    assert example.gold == " ".join([f"{example.answers[0]}.", *prose[:4]])


@pytest.mark.parametrize("prompter", [BYTES, MERGES], ids=["bytes_chat", "merges_plain"])
def test_an_answer_stands_once_in_the_part_that_is_asked(prompter: Prompter) -> None:
    for conversation in made(prompter=prompter):
        for example in conversation:
            key, title = asked(example)
            [value] = example.answers
            assert example.context.count(value) == 1
            assert f"The code of {key}: {value}." in parts(example.context)[title]
            assert value not in example.question + example.answer_prefix
            assert example.answer_prefix == f"The code of {key}:"
            [(start, stop)] = example.answer_spans
            assert example.context[start:stop] == value
            prompt = prompter.encode(example)
            decoded = prompter.tokenizer.decode([prompt.ids[position] for position in prompt.answer_positions])
            assert value in decoded
            assert max(prompt.answer_positions) < prompt.context_tokens
            assert len(prompter.follow_up(example).ids) < 150


@pytest.mark.parametrize("turns", [6, 7, 8, 9, 10])
@pytest.mark.parametrize("reasked", [0.0, 0.5, 1.0])
def test_distances_are_those_that_the_text_shows(turns: int, reasked: float) -> None:
    task = Drift(context_length=4096, turns=turns, reasked=reasked)
    repeats = []
    for conversation in made(task, count=8):
        questions = [asked(example) for example in conversation]
        metrics = [task.metrics("", example) for example in conversation]
        for turn, ((key, title), of_turn) in enumerate(zip(questions, metrics, strict=True)):
            before = [t for t in range(turn) if questions[t][1] == title]
            assert of_turn["turn"] == turn
            assert of_turn["distance"] == (turn - before[-1] if before else 0)
            assert of_turn["first"] == (not before)
            assert of_turn["reasked"] == (key in [questions[t][0] for t in before])
            if of_turn["reasked"]:
                assert questions[before[-1]][0] == key
            if before:
                repeats.append(of_turn["reasked"])
        found = [of_turn["distance"] for of_turn in metrics]
        assert set(found) == {0, 1, 2, 4}
        counts = [found.count(distance) for distance in (1, 2, 4)]
        assert max(counts) - min(counts) <= 1
    assert (min(repeats), max(repeats)) == {0.0: (0, 0), 0.5: (0, 1), 1.0: (1, 1)}[reasked]


def test_orders_vary() -> None:
    found = {tuple(example.id[10:] for example in conversation) for conversation in made(count=12)}
    assert len(found) > 6


@pytest.mark.parametrize("prompter", [BYTES, MERGES], ids=["bytes_chat", "merges_plain"])
@pytest.mark.parametrize("length", [3000, 9000])
def test_the_longest_prompt_fills_the_length(prompter: Prompter, length: int) -> None:
    task = Drift(context_length=length)
    for conversation in made(task, count=2, prompter=prompter):
        longest = max(len(prompter.encode(example).ids) for example in conversation)
        assert 0.9 * length <= longest <= length
    assert task.nominal_length == length + task.max_new_tokens
    assert task.turns * task.max_new_tokens >= 2048


@pytest.mark.parametrize("model", ["smollm2_135m", "gemma3_270m"])
def test_tokenizers_of_the_embedded_models(model: str) -> None:
    prompter = embedded_prompter(model)
    task = Drift(context_length=1024)
    for conversation in made(task, count=2, prompter=prompter):
        prompts = [prompter.encode(example) for example in conversation]
        assert 900 <= max(len(prompt.ids) for prompt in prompts) <= 1024
        assert len({prompt.ids[: prompt.context_tokens - 1] for prompt in prompts}) == 1
        whole = len(prompts[0].ids) + task.turns * task.max_new_tokens
        assert whole + sum(len(prompter.follow_up(example).ids) for example in conversation[1:]) < 8192


def embedded_prompter(model: str) -> Prompter:
    spec = spec_of(model)
    try:
        importlib.metadata.distribution(spec.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {spec.package} is not installed: {spec.install}")
    tokenizer = AutoTokenizer.from_pretrained(spec.locate()[0])
    return Prompter(tokenizer, chat=bool(tokenizer.chat_template))


def test_examples_do_not_depend_on_the_limit() -> None:
    few, many = (list(TASK.examples(MERGES, limit, 3, "test")) for limit in (11, 24))
    assert few == many[:11]
    assert len({example.id for example in many}) == 24
    assert len({example.context for example in many}) == 3


def test_every_process_makes_the_same() -> None:
    assert made_elsewhere("tasks.drift:Drift(context_length=4096)").startswith(TASK.fingerprint())


def test_seed_and_split_share_nothing() -> None:
    drawn = [made(seed=seed, split=split) for seed, split in [(0, "test"), (1, "test"), (0, "dev")]]
    keys = [{asked(example)[0] for c in conversations for example in c} for conversations in drawn]
    values = [{example.answers for c in conversations for example in c} for conversations in drawn]
    for other in (1, 2):
        assert not keys[0] & keys[other]
        assert not values[0] & values[other]
    nouns = [{key.split("-")[1] for key in found} for found in keys]
    assert not (nouns[0] | nouns[1]) & nouns[2]


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        (" {}.", 1),
        ("\n\n {}, and then\nmore", 1),
        ("", 0),
        (" I do not know.\n{}", 0),
        (" it may be found in the text, if one looks: {}", 0),
        (" \x07{}", 1),
        ("数" * 9, 0),
    ],
)
def test_only_the_opening_of_an_answer_counts(prediction: str, score: int) -> None:
    example = made(count=1)[0][0]
    assert TASK.score(prediction.format(example.answers[0]), example) == score
    assert TASK.metrics(prediction.format(example.answers[0]), example)["string_match"] == score


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"context_length": 511}, "context_length=511 is out of range; use 512 to 131072"),
        ({"source": "hub"}, "source='hub' is unknown; conversations can only be generated: use generate"),
        ({"turns": 5}, "turns=5 is out of range; use 6 to 10"),
        ({"topics": 11}, "topics=11 is out of range; use 2 to 10"),
        ({"reasked": 1.5}, "reasked=1.5 is out of range; use 0 to 1"),
        ({"max_new_tokens": 8}, "max_new_tokens=8 is out of range; use 16 to 8192"),
        ({"distances": ()}, r"distances=\[\]: give one or more"),
        ({"distances": (1, 1)}, r"distances=\[1, 1\]: give one or more different"),
        ({"distances": (0, 1)}, r"distances=\[0, 1\]: .*from 1 on"),
        ({"distances": 2}, r"distances=2 is no list; write \[2\]"),
        ({"distances": (9,)}, r"distances=\[9\] cannot all occur.*turns=8.*distances=\[1,2,4\]"),
    ],
)
def test_mistaken_fields_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Drift(**changed)


def test_mistaken_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="limit=0 asks for no example"):
        next(TASK.examples(MERGES, 0, 0, "test"))
    with pytest.raises(ValueError, match="split='train' is not to be had; use test or dev"):
        next(TASK.examples(MERGES, 1, 0, "train"))
    with pytest.raises(
        ValueError, match="context_length=512 is too short for topics=4 .*use context_length="
    ) as caught:
        next(Drift(context_length=512).examples(BYTES, 1, 0, "test"))
    least = int(re.search(r"use context_length=(\d+)", str(caught.value)).group(1))  # type: ignore[union-attr]
    assert len(list(Drift(context_length=least).examples(BYTES, 40, 0, "test"))) == 40


def test_yaml_takes_the_length_of_the_profile() -> None:
    config = OmegaConf.load(ROOT / "configs" / "task" / "drift.yaml")
    assert isinstance(config, DictConfig)
    root = OmegaConf.create({"profile": {"context_length": 2048}, "task": config})
    assert instantiate(root.task, distances=[1, 4]) == Drift(context_length=2048, distances=(1, 4))


# ---- a policy that drops a span ----


@dataclass(frozen=True)
class DropSpan(KVPolicy):
    """Evicts the tokens start .. stop - 1 once `since` tokens have been seen, and nothing else."""

    start: int = 0
    stop: int = 0
    since: int = 0

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        inside = (view.pos_BHU >= self.start) & (view.pos_BHU < self.stop)
        due = view.seq_len_B[:, None, None] >= self.since
        return [Placement(torch.where(inside & due, EVICTED, view.tier_BHU))]


def ask(loaded: LoadedModel, conversation: Sequence[Example], policy: DropSpan) -> list[Generation]:
    prompter = Prompter(loaded.tokenizer, loaded.chat)
    turns = [Turn(prompter.encode(e), prompter.follow_up(e), e.max_new_tokens) for e in conversation]
    protocol, names = Protocol("multi_query", "continue"), [conversation[0].group]
    [made] = converse(loaded, policy, Budget("1.0"), [turns], stop=(), protocol=protocol, seed=0, names=names)
    return made


def span(loaded: LoadedModel, example: Example, text: str) -> tuple[int, int]:
    """First token and end of a piece of the context."""
    start = example.context.index(text)
    marked = replace(example, answer_spans=((start, start + len(text)),))
    positions = Prompter(loaded.tokenizer, loaded.chat).encode(marked).answer_positions
    return positions[0], positions[-1] + 1


def seen_before(loaded: LoadedModel, conversation: Sequence[Example], answers: Sequence[Generation], turn: int) -> int:
    """Tokens in the cache when `turn` begins."""
    prompter = Prompter(loaded.tokenizer, loaded.chat)
    later = sum(len(prompter.follow_up(example).ids) for example in conversation[1:turn])
    return len(prompter.encode(conversation[0]).ids) + later + sum(len(x.new_ids) for x in answers[:turn])


def read_off(example: Example, generation: Generation) -> str:
    """What a perfect reader of the cache answers: the value if all of its tokens are held, else that it is gone."""
    return f" {example.answers[0]}." if generation.needle_fate["evicted"] == 0 else " gone."


def needle_of(example: Example) -> str:
    return f"{example.answer_prefix} {example.answers[0]}."


def topic_of(example: Example) -> str:
    return " ".join(parts(example.context)[asked(example)[1]])


@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("piece", [needle_of, topic_of])
@pytest.mark.parametrize("turn", [0, 3])
def test_dropping_a_span_fails_exactly_the_turns_that_ask_it(
    index: int, piece: Callable[[Example], str], turn: int
) -> None:
    loaded = engine()
    conversation = made(SMALL, index + 1, Prompter(loaded.tokenizer, loaded.chat))[index]
    whole = ask(loaded, conversation, DropSpan())
    assert all(SMALL.score(read_off(*found), found[0]) == 1 for found in zip(conversation, whole, strict=True))
    dropped = piece(conversation[-1])
    since = seen_before(loaded, conversation, whole, turn) if turn else 0
    left = ask(loaded, conversation, DropSpan(*span(loaded, conversation[0], dropped), since))
    assert [x.new_ids for x in left[:turn]] == [x.new_ids for x in whole[:turn]]
    scores = [SMALL.score(read_off(*found), found[0]) for found in zip(conversation, left, strict=True)]
    hit = [number >= turn and needle_of(example) in dropped for number, example in enumerate(conversation)]
    assert any(hit)
    assert scores == [0.0 if lost else 1.0 for lost in hit]


@pytest.mark.slow
def test_smollm2_forgets_exactly_the_dropped_needle(smollm2_bf16: LoadedModel) -> None:
    task = Drift(context_length=512, turns=6, topics=2, reasked=0.0, max_new_tokens=16)
    prompter = Prompter(smollm2_bf16.tokenizer, smollm2_bf16.chat)
    conversation = made(task, 1, prompter)[0]
    whole = ask(smollm2_bf16, conversation, DropSpan())
    can = [task.score(found.text, example) == 1 for found, example in zip(whole, conversation, strict=True)]
    last = max(turn for turn, right in enumerate(can) if right)
    assert sum(can) >= 4, "the model has to be able to do most of the task"
    dropped = needle_of(conversation[last])
    left = ask(smollm2_bf16, conversation, DropSpan(*span(smollm2_bf16, conversation[0], dropped)))
    for turn, (found, example) in enumerate(zip(left, conversation, strict=True)):
        if needle_of(example) == dropped:
            assert task.score(found.text, example) == 0
        elif can[turn]:
            assert task.score(found.text, example) == 1


@pytest.fixture(scope="module")
def smollm2_bf16() -> LoadedModel:
    embedded_prompter("smollm2_135m")
    return replace(spec_of("smollm2_135m"), device="cpu").load(attention.register())
