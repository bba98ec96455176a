"""Tiny random models of every supported family, and policies that only tests need."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from qevict_bench import attention
from qevict_bench.codecs import PerChannel, PerToken, Tier
from qevict_bench.models import LoadedModel, ModelSpec, compressible_layers
from qevict_bench.policy import EVICTED, FULL, FULL_TIER, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.session import KVSession
from qevict_bench.task import Prompt

VOCAB = 97
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # attention is uneven, yet fp32 errors in logits stay below 3e-6
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
KINDS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama_1": (LlamaConfig, {"num_hidden_layers": 1}),
    "llama_4": (LlamaConfig, {"num_hidden_layers": 4}),
    "llama_wide": (LlamaConfig, {"head_dim": 24, "num_key_value_heads": 4, "num_attention_heads": 8}),
    "llama_scaled": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama_yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama_dynamic": (LlamaConfig, {"rope_parameters": DYNAMIC, "max_position_embeddings": 64}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "mistral": (MistralConfig, {"sliding_window": None, "num_key_value_heads": 1}),
    "phi3": (Phi3Config, {"rope_parameters": ROPE}),
    "phi3_partial": (Phi3Config, {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    "phi3_long": (Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "gemma3": (
        Gemma3TextConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": MIXED,
            "sliding_window": 16,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_key_value_heads": 1,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 24},
    ),
}
FAMILIES = tuple(kind for kind in KINDS if kind not in ("llama_1", "llama_4", "llama_dynamic", "phi3_long"))


class Spaces:
    """A tokenizer that only decodes: ids as numbers."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


@cache
def family(kind: str) -> LoadedModel:
    """A random fp32 model of one family; norms and biases are random too."""
    cls, changes = KINDS[kind]
    config = cls(**{**BASE, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(kind))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.register())
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(torch.randn_like(param) * 0.1)
    return around(model.eval().requires_grad_(False), kind)


def around(model: PreTrainedModel, name: str, eos_ids: tuple[int, ...] = ()) -> LoadedModel:
    """What the engine needs to know of a model that was built by hand."""
    layers, config = compressible_layers(model.config), model.config
    context, num_layers = config.max_position_embeddings, config.num_hidden_layers
    return LoadedModel(name, model, Spaces(), name, "float32", "cpu", False, eos_ids, context, layers, num_layers)


@cache
def engine() -> LoadedModel:
    """model=tiny: 4 layers, 3 KV heads of 2 query heads each, head dim 16, fp32."""
    return ModelSpec("tiny", "tiny", device="cpu").load(attention.register())


@cache
def eager() -> PreTrainedModel:
    """The same weights under the eager attention of transformers."""
    return ModelSpec("tiny", "tiny", device="cpu").load("eager").model


@cache
def attentions(length: int, seed: int) -> list[list[list[list[float]]]]:
    """Attention [layer][query head][query][position] of a random text, by transformers' eager attention."""
    with torch.inference_mode():
        out = eager()(torch.tensor([random_ids(length, seed)]), output_attentions=True)
    return [layer[0].tolist() for layer in out.attentions]


@cache
def reference(kind: str) -> PreTrainedModel:
    """The same weights under the sdpa attention of transformers."""
    return sdpa_copy(family(kind).model)


def sdpa_copy(model: PreTrainedModel) -> PreTrainedModel:
    twin = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=model.dtype, attn_implementation="sdpa")
    twin.load_state_dict(model.state_dict())
    return twin.eval().requires_grad_(False)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompt(ids: Sequence[int], answer_positions: tuple[int, ...] = ()) -> Prompt:
    return Prompt(tuple(ids), answer_positions, 0, len(ids))


def kept(session: KVSession, row: int) -> list[list[list[tuple[int, int]]]]:
    """(first position, tier) of every live unit, per layer and table head."""
    found = []
    for layer in session.layers.values():
        rect = layer.table.rect()
        heads = zip(rect.pos[row].tolist(), rect.tier[row].tolist(), strict=True)
        found.append([[(p, t) for p, t in zip(pos, tier, strict=True) if p >= 0] for pos, tier in heads])
    return found


def decode_all(session: KVSession, tokens: Sequence[int]) -> Tensor:
    """Teacher-forced logits [steps, V] of a session of one row."""
    return torch.stack([session.decode([token])[0] for token in tokens])


# ---- policies ----


class Event(NamedTuple):
    """One call of `place` for one layer: tokens seen, first and end position of every unit, chosen tier, cost."""

    layer_idx: int
    seq_len: list[int]
    pos_BHU: Tensor
    end_BHU: Tensor
    tier_BHU: Tensor
    bytes_B: list[int]


P = TypeVar("P", bound=KVPolicy)


def watched(policy: P) -> tuple[P, Counter[str], list[Event]]:
    """The same policy under the same name; counts its calls and records what it places."""
    base: type[KVPolicy] = type(policy)
    calls: Counter[str] = Counter()
    events: list[Event] = []

    class Watched(base):  # type: ignore[misc, valid-type]
        name = policy.name

        def probe(self, *args: Any) -> Tensor | None:
            mask = super().probe(*args)
            calls["probe"] += mask is not None
            return mask

        def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
            calls["observe"] += 1
            super().observe(view, mass_BHGPU, rows_BP)

        def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
            calls["place"] += 1
            placements = super().place(views, allowance)
            cost = allowance.bytes_of(placements).tolist()
            for view, placement in zip(views, placements, strict=True):
                tier = torch.where(view.alive_BHU, placement.tier_BHU, EVICTED).clone()
                seen = view.seq_len_B.tolist()
                events.append(Event(view.layer_idx, seen, view.pos_BHU.clone(), view.end_BHU.clone(), tier, cost))
            return placements

    fields = {name: getattr(policy, name) for name in (field.name for field in dataclasses.fields(policy))}
    return Watched(**fields), calls, events  # type: ignore[return-value]


def draw(view: LayerView, row: int) -> Tensor:
    """A number in [0, 1) per live unit of a row [H, U], the same whatever the rows beside it are."""
    alive = view.alive_BHU[row]
    drawn = torch.ones(alive.shape)
    drawn[alive] = torch.rand(int(alive.sum()), generator=view.rng(row))
    return drawn


@dataclass(frozen=True)
class RandomEviction(KVPolicy):
    """Evicts about `share` of the finished units at every event, drawn from the row's generator."""

    unit: int = 1
    offset: int = 0
    head_shared: bool = False
    every: int = 4
    share: float = 0.3

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        placements = []
        for view in views:
            tier = view.tier_BHU.clone()
            for row in range(len(tier)):
                drawn = draw(view, row) < self.share
                finished = view.end_BHU[row] <= view.seq_len_B[row]
                tier[row][drawn & finished & view.alive_BHU[row]] = EVICTED
            placements.append(Placement(tier))
        return placements


@dataclass(frozen=True)
class RandomTiers(RandomEviction):
    """Draws full, low or evicted for every finished unit at every event."""

    key_params: str = "window"
    group: int = 1
    bits: int = 2
    promotion: str = "dequantize"

    @property
    def tiers(self) -> tuple[Tier, ...]:
        key = PerChannel(self.bits, self.key_params, self.group)  # type: ignore[arg-type]
        return FULL_TIER, Tier("low", key, PerToken(self.bits))

    @property
    def restore(self) -> str:
        return self.promotion

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        placements = []
        for view in views:
            tier = view.tier_BHU.clone()
            for row in range(len(tier)):
                drawn = draw(view, row)
                whole = (view.end_BHU - view.pos_BHU)[row] == self.unit
                free = whole & (view.end_BHU[row] <= view.seq_len_B[row]) & view.alive_BHU[row]
                choice = torch.where(drawn < 0.1, EVICTED, torch.where(drawn < 0.6, 1, FULL))
                tier[row] = torch.where(free, choice, tier[row])
            placements.append(Placement(tier))
        return placements


@dataclass(frozen=True)
class AboveMean(KVPolicy):
    """Heads of different lengths: each keeps what got more than `factor` times its mean attention, and the newest."""

    every: int = 4
    recent: int = 4
    factor: float = 0.5
    columns: tuple[str, ...] = ("mass",)

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every)

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return torch.ones((len(prompt_len_B), stop - start), dtype=torch.bool)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        view.columns["mass"] += mass_BHGPU.sum((2, 3))

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        mass = view.columns["mass"]
        newest = view.pos_BHU >= view.seq_len_B[:, None, None] - self.recent
        old = view.alive_BHU & ~newest
        mean = (mass * old).sum(-1, keepdim=True) / old.sum(-1, keepdim=True).clamp(min=1)
        return [Placement(torch.where(newest | old & (mass > self.factor * mean), FULL, EVICTED))]


@dataclass(frozen=True)
class KeepSuffix(KVPolicy):
    """Keeps the last `suffix` tokens of the prompt and everything after."""

    suffix: int = 8

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        tail = view.pos_BHU >= view.prompt_len_B[:, None, None] - self.suffix
        return [Placement(torch.where(tail, view.tier_BHU, EVICTED))]
