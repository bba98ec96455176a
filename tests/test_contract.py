"""The engine on every supported family equals transformers itself while nothing is compressed."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, decode_all, engine, family, prompt, random_ids, reference, sdpa_copy
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from methods.full_kv import FullKV
from qevict_bench import attention
from qevict_bench.budget import Budget
from qevict_bench.engine import generate
from qevict_bench.models import LoadedModel
from qevict_bench.protocol import Protocol
from qevict_bench.session import KVSession

EVERYTHING = Budget("1.0")
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at 100 degrees. At high altitude it",
    "One, two, three, four,",
    "The key is 4821. Remember it well. The key is",
)


def greedy(model: PreTrainedModel, ids: list[int], num_new: int, **options: int | list[int]) -> list[int]:
    """model.generate of transformers."""
    inputs = torch.tensor([ids])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_new, do_sample=False, **options
    )
    return out[0, len(ids) :].tolist()


@torch.inference_mode()
def cached_decode(model: PreTrainedModel, ids: list[int], after: list[int]) -> Tensor:
    """Logits of the prompt's last token and of every token decoded after it, with transformers' own cache."""
    names = inspect.signature(model.forward).parameters
    cache = {"cache" if "cache" in names else "past_key_values": DynamicCache(config=model.config)}
    parts = [ids, *([token] for token in after)]
    return torch.stack([model(torch.tensor([part]), use_cache=True, **cache).logits[0, -1] for part in parts])


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_equal_transformers(kind: str) -> None:
    ids, after = random_ids(45, 1), random_ids(24, 2)  # longer than gemma3's window of 16, and odd
    expected = cached_decode(reference(kind), ids, after)
    for chunk in (7, 16, 1024):
        session = KVSession(family(kind), FullKV(), EVERYTHING, 1)
        first = session.prefill([ids], chunk)
        logits = torch.cat((first, decode_all(session, after)))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("first_token", ["compressed", "full"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_tokens_equal_transformers(kind: str, first_token: str) -> None:
    lengths = (2, 15, 45)
    prompts = [random_ids(n, n) for n in lengths]
    made = generate(
        family(kind),
        FullKV(),
        EVERYTHING,
        [prompt(ids) for ids in prompts],
        max_new_tokens=[16] * 3,
        stop=(),
        protocol=Protocol(first_token=first_token),
        seed=0,
        example_ids=[str(n) for n in lengths],
        prefill_chunk=16,
    )
    assert [list(each.new_ids) for each in made] == [greedy(reference(kind), ids, 16) for ids in prompts]
    assert {each.stop for each in made} == {"length"}


@pytest.mark.parametrize("least", [0, 1, 5, 12])
def test_the_end_of_text_is_not_chosen_too_early(least: int) -> None:
    """As with min_new_tokens of transformers, for rows that would end at different moments."""
    ids = [random_ids(64), random_ids(33)]
    free = [greedy(sdpa_copy(engine().model), each, 12) for each in ids]
    ends = [free[0][0], free[1][3]]
    loaded = replace(engine(), eos_ids=tuple(ends))
    made = generate(
        loaded,
        FullKV(),
        EVERYTHING,
        [prompt(each) for each in ids],
        max_new_tokens=[12, 12],
        stop=(),
        min_new_tokens=least,
        seed=0,
        example_ids=["a", "b"],
    )
    for each, found in zip(ids, made, strict=True):
        ended = greedy(sdpa_copy(engine().model), each, 12, eos_token_id=ends, pad_token_id=0, min_new_tokens=least)
        assert list(found.new_ids) == [token for token in ended if token not in ends]
        assert found.stop == ("eos" if ended[-1] in ends else "fixed" if least == 12 else "length")
        assert len(found.new_ids) >= least


def test_only_the_last_logits_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, shapes = family("llama"), []
    hook = loaded.model.lm_head.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    try:
        KVSession(loaded, FullKV(), EVERYTHING, 2).prefill([random_ids(64), random_ids(33)], chunk=1024)
    finally:
        hook.remove()
    assert shapes == [(2, 2, 97)]  # one per row, never one per token


def check_embedded(loaded: LoadedModel) -> None:
    ids = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    expected = [greedy(loaded.model, each, 12, eos_token_id=list(loaded.eos_ids), pad_token_id=0) for each in ids]
    before = loaded.model.config._attn_implementation
    assert before == "sdpa"
    loaded.model.set_attn_implementation(attention.register())
    try:
        made = generate(
            loaded,
            FullKV(),
            EVERYTHING,
            [prompt(each) for each in ids],
            max_new_tokens=[12] * len(ids),
            stop=(),
            seed=0,
            example_ids=TEXTS,
        )
    finally:
        loaded.model.set_attn_implementation(before)
    answers = [[token for token in tokens if token not in loaded.eos_ids] for tokens in expected]
    assert [list(each.new_ids) for each in made] == answers


def test_smollm2_equals_transformers(smollm2: LoadedModel) -> None:
    check_embedded(smollm2)


def test_gemma3_equals_transformers(gemma3: LoadedModel) -> None:
    check_embedded(gemma3)
