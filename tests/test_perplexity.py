"""Perplexity: windows of a text, cut by the tokenizer at words."""

from __future__ import annotations

import importlib.metadata
import math
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conftest import spec_of
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from processes import made_elsewhere
from rows import FACTS, FULL, row
from small_tokenizers import byte_tokenizer, merging_tokenizer
from transformers import AutoTokenizer

from qevict_bench.closing import render
from qevict_bench.summary import Summary, summarize
from qevict_bench.task import Example, Prompter
from tasks.perplexity import Perplexity
from tasks.perplexity.chronicle import sentences

ROOT = Path(__file__).parents[1]
BYTES = Prompter(byte_tokenizer(), chat=True)
MERGES = Prompter(merging_tokenizer(chat=False), chat=False)
TASK = Perplexity(context_length=600, new_tokens=100)


def made(task: Perplexity = TASK, limit: int = 3, prompter: Prompter = MERGES, **draw: Any) -> list[Example]:
    return list(task.examples(prompter, limit, draw.get("seed", 0), draw.get("split", "test")))


def text_file(folder: Path, words: int = 3000) -> Path:
    path = folder / "novel.txt"
    rng = Random(1)
    gaps = (" ", ", ", ".\n\n")
    path.write_text("  " + "".join(f"w{index}{rng.choice(gaps)}" for index in range(words)))
    return path


@pytest.mark.parametrize("prompter", [BYTES, MERGES], ids=["bytes_chat", "merges_plain"])
def test_a_window_is_filled_to_the_word(prompter: Prompter) -> None:
    for example in made(prompter=prompter):
        prompt = prompter.encode(example)
        gold = prompter.continuation(example)
        longest = max(len(prompter.tokenizer(word)["input_ids"]) for word in (example.context + example.gold).split())
        assert 600 - longest - 1 <= len(prompt.ids) <= 600
        assert 100 - longest - 1 <= len(gold) <= 100
        assert (example.question, example.answer_prefix, example.answers) == ("", "", ())
        assert example.max_new_tokens == 1
        assert prompt.context_tokens > 0


def test_the_plain_prompt_and_its_continuation_are_the_text() -> None:
    example = made()[0]
    ids = MERGES.encode(example).ids[1:] + MERGES.continuation(example)
    assert MERGES.tokenizer.decode(ids) == f"{example.context} {example.gold}"


@pytest.mark.parametrize("model", ["smollm2_135m", "gemma3_270m"])
def test_tokenizers_of_the_embedded_models(model: str) -> None:
    spec = spec_of(model)
    try:
        importlib.metadata.distribution(spec.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {spec.package} is not installed: {spec.install}")
    tokenizer = AutoTokenizer.from_pretrained(spec.locate()[0])
    prompter = Prompter(tokenizer, chat=bool(tokenizer.chat_template))
    for example in made(prompter=prompter):
        assert 590 <= len(prompter.encode(example).ids) <= 600
        assert 90 <= len(prompter.continuation(example)) <= 100


def test_facts_of_the_chronicle_come_back() -> None:
    text = " ".join(islice(sentences(Random(3)), 300))
    lives = re.findall(r"([A-Z]\w+ [A-Z]\w+), who [^,]+, lives in (.+?)\.", text)
    homes: dict[str, set[str]] = {}
    for name, house in lives:
        homes.setdefault(name, set()).add(house)
    assert len(lives) > 2 * len(homes) > 10
    assert all(len(houses) == 1 for houses in homes.values())
    assert len(set.union(*homes.values())) == len(homes)


@pytest.mark.parametrize("split", ["test", "dev"])
def test_windows_of_a_file_follow_on_each_other(tmp_path: Path, split: str) -> None:
    path = text_file(tmp_path)
    task = Perplexity(context_length=600, new_tokens=100, source="local", text_file=str(path))
    words = path.read_text().split()
    both = {name: made(task, 99, split=name) for name in ("test", "dev")}
    read = [[f"{example.context} {example.gold}".split() for example in both[name]] for name in ("test", "dev")]
    in_order = [word for pair in zip(*read, strict=False) for window in pair for word in window]
    assert len(in_order) > 600
    assert in_order == words[: len(in_order)]
    assert {example.data_source for example in both[split]} == {"novel.txt"}
    assert [example.id for example in both[split]] == [f"text-{i:04d}" for i in range(len(both[split]))]
    assert made(task, 2, split=split) == both[split][:2]
    assert made(task, 2, split=split, seed=5) == both[split][:2]


def test_generated_examples_do_not_depend_on_the_limit_and_share_nothing_with_others() -> None:
    assert made(limit=1) == made(limit=3)[:1]
    drawn = [made(seed=seed, split=split) for seed, split in [(0, "test"), (1, "test"), (0, "dev")]]
    assert len({example.context[:200] for examples in drawn for example in examples}) == 9
    assert [example.id for example in drawn[0]] == ["text-0000", "text-0001", "text-0002"]


def test_every_process_makes_the_same() -> None:
    assert made_elsewhere("tasks.perplexity:Perplexity()").startswith(Perplexity().fingerprint())


def test_fingerprint_follows_the_file(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    before = Perplexity(source="local", text_file=str(path)).fingerprint()
    assert before == Perplexity(source="local", text_file=str(path)).fingerprint() != Perplexity().fingerprint()
    path.write_text(path.read_text() + "more")
    assert Perplexity(source="local", text_file=str(path)).fingerprint() != before


def test_the_score_says_nothing() -> None:
    example = made(limit=1)[0]
    assert TASK.score(example.gold, example) == 0
    assert TASK.metrics(example.gold, example) == {}


def summary_of(**changes: Any) -> Summary:
    """Of a run of this task on examples whose NLL is 0, 1, 2 ... and was half of that with FullKV."""
    common = {"metrics": {}, "stop": "length", "prediction": "", "score": 0.0, **changes}
    mine = [row(index=i, fidelity=fidelity(i), **common) for i in range(12)]
    return summarize(mine, [row(index=i, **FULL, **common) for i in range(12)], FACTS)


def fidelity(nll: float) -> dict[str, float]:
    found = {"gold.tokens": 48.0, "gold.kl_first": 0.0, "gold.nll": nll, "gold.nll_change": nll / 2}
    return found | {"gold.memory": 0.19}


def test_the_table_shows_the_likelihood_and_no_score() -> None:
    summary = summary_of()
    assert not summary.scored
    assert (summary.scores, summary.macro, summary.subsets, summary.overall) == ({}, None, {}, None)
    assert not summary.alarms
    text = render(summary)
    assert "  NLL in nats per token: FullKV 2.7500, qevict 5.5000, difference +2.7500  [" in text
    assert f"  perplexity, exp(NLL): FullKV {math.exp(2.75):.2f}, qevict {math.exp(5.5):.2f}" in text
    assert "  memory while reading it: 0.190 of FullKV's bytes" in text
    assert "12 examples, 48 tokens of each (metrics.fidelity_tokens)" in text
    assert not re.search(r"floor|wins/ties|No example|macro", text)
    assert "score=n/a full_kv=n/a diff=[n/a,n/a] memory=0.200" in text.splitlines()[-1]
    assert summary.to_json()["reference_macro"] is None


def test_the_table_says_how_to_get_the_likelihood() -> None:
    summary = replace(summary_of(), fidelity={})
    assert "Answers to this task are not scored; metrics.fidelity=true measures how likely its text is" in render(
        summary
    )


def test_alarms_that_are_not_of_answers_stay() -> None:
    assert [alarm.kind for alarm in summary_of(matched=False, truncated_tokens=3).alarms] == ["unmatched", "truncated"]


def test_a_task_with_metrics_keeps_its_scores_of_0() -> None:
    summary = summary_of(metrics={"match": 0.0})
    assert summary.scored
    assert (summary.macro, {alarm.kind for alarm in summary.alarms}) == (0.0, {"empty", "length", "floor", "identical"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"context_length": 63}, "context_length=63 is out of range; use 64 to 131072 tokens"),
        ({"new_tokens": 1}, "new_tokens=1 is out of range; use 2 to 8192 tokens"),
        ({"source": "hub"}, "source='hub' is unknown; use generate, or local with a text_file"),
        ({"source": "local"}, "text_file is empty, but source=local needs it; set task.text_file"),
        ({"text_file": "x"}, "text_file='x' is not used with source=generate; set task.source=local"),
    ],
)
def test_mistaken_fields_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Perplexity(**changed)


def test_mistaken_requests_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="limit=0 asks for no example"):
        made(limit=0)
    with pytest.raises(ValueError, match="split='train' is not to be had; use test or dev"):
        made(split="train")
    with pytest.raises(ValueError, match=r"text_file=.*none.txt cannot be read .*; give a UTF-8 text file"):
        Perplexity(source="local", text_file=str(tmp_path / "none.txt")).fingerprint()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="bytes.txt cannot be read"):
        made(Perplexity(source="local", text_file=str(tmp_path / "bytes.txt")))
    short = text_file(tmp_path, 50)
    with pytest.raises(ValueError, match="has 50 words, too few for split=test; give a longer text, or a smaller"):
        made(Perplexity(source="local", text_file=str(short)))


def test_yaml_takes_the_length_of_the_profile() -> None:
    config = OmegaConf.load(ROOT / "configs" / "task" / "perplexity.yaml")
    assert isinstance(config, DictConfig)
    root = OmegaConf.create({"profile": {"context_length": 2048}, "task": config})
    assert instantiate(root.task, new_tokens=48) == Perplexity(context_length=2048, new_tokens=48)
