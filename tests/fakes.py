"""Stand-ins for model, task, method and engine: no weights, no waiting, answers that depend on all they should.

As a script: `python fakes.py FIELD=VALUE ...` runs the runner on them in a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from qevict_bench import runner
from qevict_bench.asking import Engine
from qevict_bench.budget import Budget, BudgetExceeded, Geometry, Infeasible
from qevict_bench.model_facts import ModelFacts
from qevict_bench.policy import Allowance, KVPolicy, LayerView, Placement
from qevict_bench.protocol import Protocol, Turn
from qevict_bench.task import Example, Prompt, Prompter, Task


@dataclass(frozen=True)
class FakePolicy(KVPolicy):
    strength: int = 1
    note: str = ""
    longest: int = 10**9
    """No setting fits prompts with more tokens."""

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        assert geometry == GEOMETRY
        if prompt_len > self.longest:
            raise Infeasible(f"budget={budget.spec} is too small for {prompt_len} tokens (nearest fraction 0.5)")
        return self

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        raise AssertionError("the fake engine never asks")


@dataclass(frozen=True)
class FakeTask(Task):
    name: str = "fake"
    prompt_source: str = "own"
    stop: tuple[str, ...] = ()
    subsets: tuple[str, ...] = ("easy", "hard")
    context_length: int = 64
    size: int = 1000
    data: str = "v1"
    long: tuple[str, ...] = ()
    """Examples with three times the context."""
    broken: tuple[str, ...] = ()
    """Examples whose prompt cannot be made."""
    unscored: tuple[str, ...] = ()
    """Examples whose answer cannot be scored."""
    new_tokens: tuple[int, ...] = (8,)
    """Of example i, in turns."""
    only: tuple[str, ...] = ("test", "dev")
    min_new_tokens: int = 0

    @property
    def splits(self) -> tuple[str, ...]:
        return self.only

    @property
    def nominal_length(self) -> int:
        return self.context_length

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ValueError(f"context_length={self.context_length} is not positive; give a number of tokens")

    def fingerprint(self) -> str:
        if self.data == "lost":
            raise ValueError(f"data={self.data} is not there; give another")
        return self.data

    def examples(self, prompter: Prompter, limit: int, seed: int, split: str) -> Iterator[Example]:
        for subset in self.subsets:
            for i in range(min(limit, self.size)):
                name = f"{subset}-{i:04}"
                context = f"{split} {seed} {subset} {i} " * (9 if name in self.long else 3)
                question = BROKEN if name in self.broken else "?"
                new_tokens = self.new_tokens[i % len(self.new_tokens)]
                yield Example(name, subset, context, question, "", ("yes",), new_tokens, ((0, 3),))

    def score(self, prediction: str, example: Example) -> float:
        if example.id in self.unscored:
            raise KeyError("no rule for this answer")
        return float(prediction.startswith("yes"))

    def metrics(self, prediction: str, example: Example) -> dict[str, float]:
        return {"match": self.score(prediction, example)}


BROKEN = "\0"
GEOMETRY = Geometry(num_layers=3, num_kv_heads=1, group_size=1, head_dim=8, itemsize=4)


class ByteTokenizer:
    bos_token_id = unk_token_id = None
    added_tokens_decoder: Mapping[int, Any] = MappingProxyType({})
    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        if BROKEN in text:
            raise ValueError("this text has no tokens")
        return {"input_ids": [ord(c) % 256 for c in text], "offset_mapping": [(i, i + 1) for i in range(len(text))]}


@dataclass(frozen=True)
class FakeSpec:
    name: str = "fake"
    chat: str = "auto"
    dtype: str = "float32"
    weights: str = "w1"
    max_context: int = 512

    def load(self) -> Any:
        loads = os.environ.get("FAKE_LOADS")
        if loads:
            with open(loads, "a") as stream:
                stream.write("load\n")
        if self.weights == "broken":
            raise ValueError("model.weights=broken cannot be loaded; give others")
        return SimpleNamespace(name=self.name, tokenizer=ByteTokenizer(), chat=False, max_context=self.max_context)


def describe(spec: FakeSpec) -> ModelFacts:
    return ModelFacts(spec.name, spec.weights, spec.dtype, "cpu", spec.max_context, 4, 3, 10)


@dataclass(frozen=True)
class FakeGeneration:
    text: str
    new_ids: tuple[int, ...]
    memory: dict[str, float]
    fractions: dict[str, float]
    ttft_s: float
    decode_s: float
    stop: str = "eos"
    matched: bool = True
    events: int = 3
    promotions: int = 1
    demotions: int = 2
    evictions: int = 4
    tier_units: dict[str, float] = field(default_factory=lambda: {"full": 5.0})
    needle_fate: dict[str, float] = field(default_factory=lambda: {"full": 0.5, "int2": 0.25, "evicted": 0.25})
    knobs: dict[str, Any] = field(default_factory=dict)


def generate(
    loaded: Any,
    policy: FakePolicy,
    budget: Budget,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: Sequence[int],
    stop: tuple[str, ...],
    min_new_tokens: int,
    readings: Any = None,
    protocol: Protocol,
    seed: int,
    example_ids: Sequence[str],
) -> list[FakeGeneration]:
    """Every text depends on the whole batch, as bf16 arithmetic does. Behaviour is set by FAKE_* variables."""
    time.sleep(float(os.environ.get("FAKE_SLEEP_S", "0")))
    calls = os.environ.get("FAKE_CALLS")
    if calls:
        with open(calls, "a") as stream:
            stream.write(f"{policy.strength} {' '.join(example_ids)}\n")
    for kind in (RuntimeError, Infeasible, BudgetExceeded, KeyboardInterrupt):
        hit = os.environ.get(f"FAKE_{kind.__name__.upper()}", "none")
        if policy.strength and any(hit in name for name in example_ids):
            raise kind(f"{hit} went\nwrong")
    batch = repr(([p.ids for p in prompts], policy, budget.spec, protocol, seed))
    made = []
    for name in example_ids:
        digest = hashlib.sha256((batch + name).encode()).hexdigest()
        good = policy.strength == 0 or int(digest, 16) % 3 > 0
        share = 1.0 if policy.strength == 0 else 0.2
        names = ("after_prefill", "peak", "mean", "final")
        memory = dict.fromkeys((*names, "allowed", "prefill_peak"), 1000 * share)
        parts = {"payload.full": 800 * share, "params.int2": 100 * share, "table": 50 * share, "ledger": 0.0}
        fractions = dict.fromkeys((*names, "whole_cache"), share)
        text = ("yes " if good else "no ") + digest[:6]
        made.append(
            FakeGeneration(
                text,
                tuple(range(max(2, min_new_tokens))),
                memory | parts | {"workspace": 2.0**20, "host": 0.0},
                fractions,
                time.time() % 1,
                0.5,
            )
        )
    return made


def converse(
    loaded: Any,
    policy: FakePolicy,
    budget: Budget,
    conversations: Sequence[Sequence[Turn]],
    *,
    names: Sequence[str],
    **options: Any,
) -> list[list[FakeGeneration]]:
    """As `generate`, with the conversation's name and the question's ids for an example's id."""
    return [
        generate(
            loaded,
            policy,
            budget,
            [turn.prompt for turn in turns],
            max_new_tokens=[turn.max_new for turn in turns],
            example_ids=[f"{name}/{number}" for number in range(len(turns))],
            **options,
        )
        for turns, name in zip(conversations, names, strict=True)
    ]


def measure(
    loaded: Any,
    policy: FakePolicy,
    *args: Any,
    example_ids: Sequence[str],
    streams: Sequence[str],
    **options: Any,
) -> list[Any]:
    """The fidelity of FullKV is perfect, the others' depends on the example."""
    each = [{"kl": policy.strength * len(name) / 100, "kl_first": 0.0, "tokens": 4.0} for name in example_ids]
    return [{f"{stream}.{key}": value for stream in streams for key, value in one.items()} for one in each]


ENGINE = Engine(generate, converse, measure, lambda loaded: GEOMETRY, lambda: None)


def config(results_dir: Path | str, /, **changes: Any) -> DictConfig:
    """What configs/run.yaml would compose; `changes` use double underscores for dots: method__strength=2."""
    cfg = OmegaConf.create(
        {
            "model": {"_target_": "fakes.FakeSpec", "name": "fake"},
            "method": {"name": "fake", "_target_": "fakes.FakePolicy"},
            "reference": {"name": "full_kv", "_target_": "fakes.FakePolicy", "strength": 0},
            "task": {"_target_": "fakes.FakeTask"},
            "protocol": {"name": "query_aware"},
            "metrics": {"fidelity": False},
            "tracker": {"_target_": "qevict_bench.tracking.Off"},
            "profile": {"name": "quick"},
            "budget": 0.2,
            "basis": "sequence",
            "enforce": "always",
            "small_budget": "clamp",
            "first_token": "compressed",
            "split": "test",
            "seed": 0,
            "limit": 4,
            "batch_size": 1,
            "results_dir": str(results_dir),
            "resume": "continue",
            "shard": {"count": 1, "index": 0},
        }
    )
    for name, value in changes.items():
        OmegaConf.update(cfg, name.replace("__", "."), value)
    return cfg


if __name__ == "__main__":
    sys.modules["fakes"] = sys.modules["__main__"]
    runner.describe = describe  # type: ignore[assignment]
    options = OmegaConf.from_dotlist(sys.argv[1:])
    cfg = OmegaConf.merge(config("unset"), options)
    assert isinstance(cfg, DictConfig)
    try:
        print(runner.run(cfg, ENGINE).macro)
    except ValueError as error:
        sys.exit(f"error: {error}")
