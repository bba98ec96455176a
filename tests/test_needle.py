"""Needle: the grid's cells hold what their names say."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import spec_of
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from processes import made_elsewhere
from small_tokenizers import byte_tokenizer, merging_tokenizer
from transformers import AutoTokenizer

from qevict_bench.task import Example, Prompter
from tasks.needle import NeedleGrid

ROOT = Path(__file__).parents[1]
BYTES = Prompter(byte_tokenizer(), chat=True)
MERGES = Prompter(merging_tokenizer(chat=False), chat=False)
TASK = NeedleGrid(lengths=(1024, 3000), depths=(0, 0.125, 0.5, 1))


def made(limit: int = 2, prompter: Prompter = MERGES, seed: int = 0, split: str = "test") -> list[Example]:
    return list(TASK.examples(prompter, limit, seed, split))


def sentences(example: Example) -> list[str]:
    text = example.context[example.instruction_chars :].strip()
    return re.split(r"(?<=\.) (?=[A-Z])", text)


@pytest.mark.parametrize("prompter", [BYTES, MERGES], ids=["bytes_chat", "merges_plain"])
def test_a_cell_is_what_its_name_says(prompter: Prompter) -> None:
    examples = made(prompter=prompter)
    cells = [(length, depth) for length in TASK.lengths for depth in TASK.depths]
    assert TASK.subsets[:4] == ("1024@0%", "1024@12.5%", "1024@50%", "1024@100%")
    assert [example.subset for example in examples] == [name for name in TASK.subsets for _ in range(2)]
    for example, (length, depth) in zip(examples, [cell for cell in cells for _ in range(2)], strict=True):
        read = sentences(example)
        [at] = [i for i, sentence in enumerate(read) if sentence.startswith("The code of ")]
        assert at == round(depth * (len(read) - 1))
        [value] = example.answers
        assert re.findall(r"\d+", example.context) == [value]
        assert read[at] == f"{example.answer_prefix} {value}."
        assert example.answer_prefix[:-1] in example.question.replace("?", ":").replace("What is the", "The")
        [(start, stop)] = example.answer_spans
        assert example.context[start:stop] == value
        metrics = TASK.metrics(f" {value}.", example)
        assert metrics == {"string_match": 1.0, "length": float(length), "depth": float(depth)}
        prompt = prompter.encode(example)
        sentence_tokens = max(len(prompter.tokenizer(sentence)["input_ids"]) for sentence in read)
        assert length - 2 * sentence_tokens <= len(prompt.ids) + example.max_new_tokens <= length
        assert value in prompter.tokenizer.decode([prompt.ids[position] for position in prompt.answer_positions])
        assert max(prompt.answer_positions) < prompt.context_tokens


@pytest.mark.parametrize("model", ["smollm2_135m", "gemma3_270m"])
def test_tokenizers_of_the_embedded_models(model: str) -> None:
    spec = spec_of(model)
    try:
        importlib.metadata.distribution(spec.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {spec.package} is not installed: {spec.install}")
    tokenizer = AutoTokenizer.from_pretrained(spec.locate()[0])
    prompter = Prompter(tokenizer, chat=bool(tokenizer.chat_template))
    for example in NeedleGrid(lengths=(512,)).examples(prompter, 1, 0, "test"):
        total = len(prompter.encode(example).ids) + example.max_new_tokens
        assert 460 <= total <= 512
        assert len(tokenizer(f" {example.answers[0]}.")["input_ids"]) <= example.max_new_tokens


def test_examples_do_not_depend_on_the_limit_or_other_cells() -> None:
    few, many = made(1), made(3)
    assert few == many[::3]
    assert len({example.id for example in many}) == len({example.context for example in many}) == len(many)
    [alone] = NeedleGrid(lengths=(3000,), depths=(0.5,)).examples(MERGES, 1, 0, "test")
    assert alone in few


def test_every_process_makes_the_same() -> None:
    assert made_elsewhere("tasks.needle:NeedleGrid()").startswith(NeedleGrid().fingerprint())


def test_seed_and_split_share_nothing() -> None:
    drawn = [made(seed=seed, split=split) for seed, split in [(0, "test"), (1, "test"), (0, "dev")]]
    keys = [{example.answer_prefix for example in examples} for examples in drawn]
    values = [{example.answers for example in examples} for examples in drawn]
    assert not keys[0] & keys[1]
    assert not values[0] & (values[1] | values[2])
    nouns = [{key.split("-")[1] for key in found} for found in keys]
    assert not (nouns[0] | nouns[1]) & nouns[2]


def test_score() -> None:
    example = made(1)[0]
    assert TASK.score("", example) == 0
    assert TASK.score("数" * 1000, example) == 0
    assert TASK.score(f"it is {example.answers[0]}", example) == 1
    assert (TASK.name, TASK.prompt_source, TASK.stop, TASK.nominal_length) == ("needle", "own", ("\n",), 3000)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lengths": (512, 100)}, r"lengths=\[512, 100\]: 100 is out of range; use 256 to 131072"),
        ({"lengths": ()}, r"lengths=\[\]: give one or more"),
        ({"lengths": 512}, r"lengths=512 is no list; write \[512\]"),
        ({"depths": (0, 0)}, r"depths=\[0, 0\]: .*none of them twice"),
        ({"depths": (50,)}, r"depths=\[50\]: 50 is out of range; use 0 to 1"),
        ({"depths": (0.1, 0.100000001)}, "too close to be told apart"),
        ({"source": "hub"}, "source='hub' is unknown; needles can only be generated: use generate"),
    ],
)
def test_mistaken_fields_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeedleGrid(**changed)


def test_mistaken_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="limit=0 asks for no example"):
        made(0)
    with pytest.raises(ValueError, match="split='train' is not to be had; use test or dev"):
        made(split="train")
    with pytest.raises(ValueError, match=r"lengths=256 is too short with this tokenizer; use \d+ or more") as caught:
        list(NeedleGrid(lengths=(256,)).examples(BYTES, 1, 0, "test"))
    least = int(re.search(r"use (\d+)", str(caught.value)).group(1))  # type: ignore[union-attr]
    assert len(list(NeedleGrid(lengths=(least + 64,)).examples(BYTES, 4, 0, "test"))) == 20


def test_yaml() -> None:
    config = OmegaConf.load(ROOT / "configs" / "task" / "needle.yaml")
    assert isinstance(config, DictConfig)
    assert instantiate(config) == NeedleGrid()
    assert instantiate(config, lengths=[512], depths=[0, 1]).subsets == ("512@0%", "512@100%")
