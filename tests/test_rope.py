"""Rotation tables against transformers' own rotation, and the inverse against both."""

from __future__ import annotations

import copy
from typing import Any

import naive
import pytest
import torch
from presets import qevict
from tiny_models import BASE, KINDS, family, random_ids
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial

from methods.full_kv import FullKV
from methods.snapkv import SnapKV
from methods.streaming_llm import StreamingLLM
from qevict_bench.budget import Budget
from qevict_bench.policy import KVPolicy
from qevict_bench.rope import Rope
from qevict_bench.session import KVSession

KINDS_OF_ROPE = ("llama", "llama_wide", "llama_scaled", "llama_yarn", "phi3_partial", "gemma3")
LENGTH = 3000


def keys(kind: str, num: int = 64) -> tuple[Tensor, Tensor]:
    """Random keys [S, D] and positions [S] below LENGTH."""
    generator = torch.Generator().manual_seed(1)
    config = family(kind).model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    positions = torch.randint(0, LENGTH, (num,), generator=generator)
    positions[:2] = torch.tensor([0, LENGTH - 1])
    return torch.randn(num, dim, generator=generator), positions


def layers_of(kind: str) -> range:
    return range(family(kind).num_layers)


def rope_of(kind: str) -> Rope:
    session = KVSession(family(kind), FullKV(), Budget("1.0"), 1)
    return next(iter(session.layers.values())).rope


def official(kind: str, x_SD: Tensor, pos_S: Tensor, layer_idx: int) -> Tensor:
    """What the model itself does to a key."""
    model = family(kind).model
    rotary, apply = model.model.rotary_emb, apply_partial if kind.startswith("phi3") else apply_rotary_pos_emb
    probe = torch.zeros(1)
    if isinstance(rotary, Gemma3RotaryEmbedding):
        cos, sin = rotary(probe, pos_S[None], model.config.layer_types[layer_idx])
    else:
        cos, sin = rotary(probe, pos_S[None])
    return apply(x_SD[None, None], x_SD[None, None], cos, sin)[1][0, 0]


@pytest.mark.parametrize("kind", KINDS_OF_ROPE)
def test_rotate_equals_the_model(kind: str) -> None:
    x_SD, pos_S = keys(kind)
    for layer in layers_of(kind):
        turned = rope_of(kind).rotate(x_SD, pos_S, layer, LENGTH)
        torch.testing.assert_close(turned, official(kind, x_SD, pos_S, layer), atol=1e-6, rtol=1e-6)
        assert not torch.allclose(turned, x_SD, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS_OF_ROPE)
def test_unrotate_is_the_inverse(kind: str) -> None:
    x_SD, pos_S = keys(kind)
    rope = rope_of(kind)
    for layer in layers_of(kind):
        back = rope.unrotate(rope.rotate(x_SD, pos_S, layer, LENGTH), pos_S, layer, LENGTH)
        torch.testing.assert_close(back, x_SD, atol=2e-6, rtol=1e-5)
        forth = rope.rotate(rope.unrotate(x_SD, pos_S, layer, LENGTH), pos_S, layer, LENGTH)
        torch.testing.assert_close(forth, x_SD, atol=2e-6, rtol=1e-5)


def test_rotate_equals_complex_numbers() -> None:
    x_SD, pos_S = keys("llama")
    turned = rope_of("llama").rotate(x_SD, pos_S, 0, LENGTH)
    torch.testing.assert_close(turned.double(), naive.turn(x_SD, pos_S, 10000.0), atol=2e-4, rtol=0)  # fp32 angles


@pytest.mark.parametrize("kind", KINDS_OF_ROPE)
def test_shift_equals_rotating_at_the_other_position(kind: str) -> None:
    x_SD, pos_S = keys(kind)
    rope = rope_of(kind)
    back = (pos_S * torch.linspace(0, 1, len(pos_S))).long()
    for layer in layers_of(kind):
        shifted = rope.shift(rope.rotate(x_SD, pos_S, layer, LENGTH), back, layer, LENGTH)
        torch.testing.assert_close(shifted, rope.rotate(x_SD, pos_S - back, layer, LENGTH), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS_OF_ROPE)
def test_scores_depend_on_distance_only(kind: str) -> None:
    """Commutation: keys may be stored un-rotated, and a constant shift of all positions changes no logit."""
    q_SD, _ = keys(kind, 32)
    k_SD = q_SD.flip(0)
    rope, pos_S = rope_of(kind), torch.arange(32)
    for layer in layers_of(kind):
        scores = [
            rope.rotate(q_SD, pos_S + by, layer, LENGTH) @ rope.rotate(k_SD, pos_S + by, layer, LENGTH).T
            for by in (0, 1, 500)
        ]
        for shifted in scores[1:]:
            torch.testing.assert_close(shifted, scores[0], atol=1e-3, rtol=1e-4)
        rotated = official(kind, q_SD, pos_S, layer) @ official(kind, k_SD, pos_S, layer).T
        torch.testing.assert_close(scores[0], rotated, atol=1e-5, rtol=1e-5)


def test_yarn_scales_attention() -> None:
    """The inverse must undo the scaling too: without it the round trip would be off by its square."""
    assert family("llama_yarn").model.model.rotary_emb.attention_scaling > 1.1
    x_SD, pos_S = keys("llama_yarn")
    turned = rope_of("llama_yarn").rotate(x_SD, pos_S, 0, LENGTH)
    assert bool((turned.norm(dim=-1) > 1.1 * x_SD.norm(dim=-1)).all())


def test_partial_rotation_leaves_the_rest_alone() -> None:
    x_SD, pos_S = keys("phi3_partial")
    turned = rope_of("phi3_partial").rotate(x_SD, pos_S, 0, LENGTH)
    assert torch.equal(turned[:, 8:], x_SD[:, 8:])
    assert not torch.allclose(turned[2:, :8], x_SD[2:, :8])


def test_tables_grow_and_stay_the_same() -> None:
    x_SD, pos_S = keys("llama_scaled")
    rope = rope_of("llama_scaled")
    early = rope.rotate(x_SD, pos_S % 100, 0, 100)
    late = rope.rotate(x_SD, pos_S, 0, LENGTH)
    assert torch.equal(early, rope.rotate(x_SD, pos_S % 100, 0, 100))
    assert torch.equal(late, rope_of("llama_scaled").rotate(x_SD, pos_S, 0, LENGTH))


def test_half_precision_keys_are_rotated_in_fp32() -> None:
    x_SD, pos_S = keys("llama")
    turned = rope_of("llama").rotate(x_SD.bfloat16(), pos_S, 0, LENGTH)
    assert turned.dtype == torch.float32
    assert torch.equal(turned, rope_of("llama").rotate(x_SD.bfloat16().float(), pos_S, 0, LENGTH))


def test_a_table_is_built_on_the_rotary_module_given() -> None:
    config = KINDS["llama"][0](**{**BASE, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}})
    rope = Rope(LlamaRotaryEmbedding(config), ["full_attention"], ["linear"])
    x_SD, pos_S = keys("llama")
    quarter = naive.turn(x_SD, pos_S / 4, 10000.0)
    torch.testing.assert_close(rope.rotate(x_SD, pos_S, 0, LENGTH).double(), quarter, atol=1e-3, rtol=0)


def decode(kind: str, policy: KVPolicy, spec: str) -> KVSession:
    model = copy.deepcopy(family(kind).model)  # dynamic frequencies are state of the rotary module
    loaded: Any = family(kind)
    loaded = type(loaded)(**{**vars(loaded), "model": model})
    session = KVSession(loaded, policy, Budget(spec), 1)
    session.prefill([random_ids(120, 1)])
    for token in random_ids(12, 2):
        session.decode([token])
    return session


@pytest.mark.parametrize("kind", ["llama_dynamic", "phi3_long"])
def test_position_dependent_tables_are_refused_where_they_are_needed(kind: str) -> None:
    for policy in (qevict(recent=8, sink=4), StreamingLLM(position="compact")):
        with pytest.raises(ValueError, match=r"cannot be un-rotated; use a method without a pre-RoPE tier"):
            decode(kind, policy, "0.3")
    for policy in (SnapKV(window=8, recent=8), StreamingLLM(position="absolute")):
        assert decode(kind, policy, "0.3").trace[0].evictions
    for policy in (FullKV(), qevict(recent=8), StreamingLLM(position="compact")):
        assert decode(kind, policy, "1.0").trace[0].evictions == 0
