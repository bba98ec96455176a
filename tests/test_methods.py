"""Every method yaml x every invariant that holds for all of them, on the tiny model: 3 KV heads, group 2."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny_models import prompt, random_ids
from torch import Tensor

from qevict_bench.budget import Budget, BudgetExceeded, Infeasible
from qevict_bench.engine import Generation, generate
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy
from qevict_bench.session import KVSession, geometry_of

pytestmark = pytest.mark.usefixtures("calibration")
YAMLS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "configs" / "method").glob("*.yaml"))}
COMPRESSING = [name for name in YAMLS if name != "full_kv"]
NEW = 20


@cache
def engine() -> LoadedModel:
    """4 layers, 6 query heads on 3 KV heads, fp32; never stops early."""
    return replace(tiny_models.engine(), eos_ids=())


@cache
def method(name: str) -> KVPolicy:
    fields = OmegaConf.load(YAMLS[name])
    assert fields.pop("name") == name
    policy = instantiate(fields)
    assert isinstance(policy, KVPolicy)
    return policy.prepare(engine().name, engine().fingerprint)


def feasible(name: str, budget: Budget, *lengths: int) -> Budget:
    """The budget; or, for a method that cannot drop tokens to fit it, the nearest fraction that the method names."""
    for length in sorted(lengths):
        try:
            method(name).fit(budget, geometry_of(engine()), length, NEW)
        except Infeasible as error:
            [nearest] = re.findall(r"nearest feasible fraction is (0\.\d+)", str(error))
            budget = replace(budget, spec=nearest)
            method(name).fit(budget, geometry_of(engine()), length, NEW)
    return budget


def run(name: str, budget: Budget, *lengths: int, **options: Any) -> list[Generation]:
    options = {"max_new_tokens": [NEW] * len(lengths), "stop": (), "seed": 0, **options}
    prompts = [prompt(random_ids(n, n)) for n in lengths]
    return generate(engine(), method(name), budget, prompts, example_ids=[str(n) for n in lengths], **options)


def facts(made: Generation) -> dict[str, Any]:
    """All but the times."""
    return {key: value for key, value in asdict(made).items() if not key.endswith("_s")}


def teacher_forced(name: str, budget: Budget, length: int = 256, new: int = NEW) -> tuple[Tensor, KVSession]:
    """Logits after the prompt and after each of `new` given tokens."""
    policy = method(name).fit(budget, geometry_of(engine()), length, new)
    session = KVSession(engine(), policy, budget, 1, max_new=new)
    logits = [session.prefill([random_ids(length, 1)], chunk=100)[0]]
    logits += [session.decode([token])[0] for token in random_ids(new, 2)]
    return torch.stack(logits), session


@cache
def full_logits(length: int = 256) -> Tensor:
    return teacher_forced("full_kv", Budget("1.0"), length)[0]


@pytest.mark.parametrize("name", YAMLS)
def test_fraction_1_is_full_kv(name: str) -> None:
    """Bit for bit, with probing and placing at work; nothing moves."""
    logits, session = teacher_forced(name, Budget("1.0"))
    assert torch.equal(logits, full_logits())
    assert session.trace[0].demotions == session.trace[0].evictions == 0
    every = session.policy.cadence.decode_every
    assert session.trace[0].events == 1 + (NEW // every if every else 0)
    assert all(used == whole for used, whole, _ in session.trace[0].decode)


@pytest.mark.parametrize("name", COMPRESSING)
@pytest.mark.parametrize("spec", ["0.2", "0.4"])
def test_prefill_is_exact_and_decoding_is_not(name: str, spec: str) -> None:
    """`place` runs after the prompt's attention: its logits are FullKV's; the next ones show the eviction."""
    logits, session = teacher_forced(name, feasible(name, Budget(spec), 256))
    assert torch.equal(logits[0], full_logits()[0])
    assert not torch.allclose(logits[1:], full_logits()[1:], atol=1e-3)
    assert session.trace[0].evictions + session.trace[0].demotions > 0


@pytest.mark.parametrize("name", COMPRESSING)
@pytest.mark.parametrize("spec", ["0.2", "0.4", "100t"])
def test_budget_holds_at_every_step(name: str, spec: str) -> None:
    """By the session's own check, and by walking the storages of every tensor that is held."""
    budget = feasible(name, Budget(spec), 300)
    policy = method(name).fit(budget, geometry_of(engine()), 300, NEW)
    session = KVSession(engine(), policy, budget, 1, max_new=NEW)
    session.prefill([random_ids(300, 1)])
    for token in random_ids(NEW, 2):
        session.decode([token])
        used, whole, allowed = session.trace[0].decode[-1]
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for layer in session.layers.values()
            for x in layer.stored_tensors()
        }
        assert used <= allowed < whole
        assert sum(storages.values()) == pytest.approx(used, rel=0.01)


@pytest.mark.parametrize("name", COMPRESSING)
@pytest.mark.parametrize("basis", ["prompt", "total"])
def test_other_bases_hold_too(name: str, basis: str) -> None:
    budget = feasible(name, Budget("0.3", basis=basis), 299)
    [made] = run(name, budget, 300)
    tokens = {"prompt": 299, "total": 299 + NEW}[basis]
    assert made.memory["allowed"] == int(Fraction(budget.spec) * geometry_of(engine()).full_bytes(tokens))
    assert made.memory["peak"] <= made.memory["allowed"]


@pytest.mark.parametrize("name", YAMLS)
def test_prefill_only_enforcement_bounds_the_prompt(name: str) -> None:
    budget = feasible(name, Budget("1.0" if name == "full_kv" else "0.3", enforce="prefill"), 299)
    [made] = run(name, budget, 300)
    assert made.fractions["after_prefill"] <= float(budget.spec)
    assert made.fractions["after_prefill"] > 0.8 * float(budget.spec)


@pytest.mark.parametrize("name", YAMLS)
def test_runs_are_deterministic_and_leave_no_state(name: str) -> None:
    """The same prompt again, after another one and beside others, gives the same row."""
    budget = feasible(name, Budget("1.0" if name == "full_kv" else "0.3"), 299, 210)
    [alone] = run(name, budget, 300)
    run(name, budget, 211)
    [again] = run(name, budget, 300)
    assert facts(again) == facts(alone)
    for batch in (run(name, budget, 300, 211), run(name, budget, 300, 300)):
        assert batch[0].new_ids == alone.new_ids
        for count in ("events", "promotions", "demotions", "evictions", "tier_units", "knobs"):
            assert getattr(batch[0], count) == getattr(alone, count)
        assert batch[0].memory | {"workspace": 0} == alone.memory | {"workspace": 0}  # padded maps belong to the batch
    assert batch[0].new_ids == batch[1].new_ids


@pytest.mark.parametrize("name", YAMLS)
@pytest.mark.parametrize("chunk", [64, 299])
def test_prefill_chunks_do_not_matter(name: str, chunk: int) -> None:
    budget = feasible(name, Budget("1.0" if name == "full_kv" else "0.3"), 299)
    [whole] = run(name, budget, 300)
    [chunked] = run(name, budget, 300, prefill_chunk=chunk)
    assert facts(chunked) == facts(whole)


@pytest.mark.parametrize("name", YAMLS)
def test_short_prompts_run(name: str) -> None:
    """Prompts shorter than windows and sinks, at the budget that keeps them all."""
    for length in (2, 4, 9, 33):
        for spec in ("1.0", "1024t"):
            [made] = run(name, Budget(spec), length)
            [full] = run("full_kv", Budget("1.0"), length)
            if spec == "1.0" or not name.startswith("qevict_paper"):
                assert made.new_ids == full.new_ids
                assert made.evictions == 0


@pytest.mark.parametrize("name", YAMLS)
def test_one_copy_per_kv_head_is_stored(name: str) -> None:
    """GQA: the store holds num_key_value_heads heads, not one per query head."""
    _, session = teacher_forced(name, feasible(name, Budget("1.0" if name == "full_kv" else "0.4"), 256))
    heads = engine().model.config.num_key_value_heads
    for layer in session.layers.values():
        assert layer.num_heads == heads == 3
        assert len(layer.full.count) == heads
        assert layer.full.k.shape[1] == engine().model.config.head_dim
        assert sum(layer.full.cap) == len(layer.full.k)


@pytest.mark.parametrize("name", ["qevict", "snapkv", "streaming_llm"])
@pytest.mark.parametrize("spec", ["0.1", "0.2", "0.4"])
def test_budget_is_spent_at_2k_tokens(name: str, spec: str) -> None:
    [made] = run(name, Budget(spec), 2048)
    assert made.matched
    assert 0.97 * float(spec) - 2 * 16 / 2048 <= made.fractions["mean"] <= float(spec)


@pytest.mark.parametrize("name", COMPRESSING)
def test_appended_questions_end_in_an_event(name: str) -> None:
    """A question on a compressed context: one step, then a routing event, inside the budget of all tokens seen."""
    budget = feasible(name, Budget("0.3"), 256)
    policy = method(name).fit(budget, geometry_of(engine()), 256, NEW)
    session = KVSession(engine(), policy, budget, 1, max_new=NEW)
    session.prefill([random_ids(256, 1)])
    twin = session.fork()
    first = session.append([random_ids(13, 2)])
    for token in random_ids(NEW, 3):
        session.decode([token])
    assert torch.equal(twin.append([random_ids(13, 2)], chunk=13), first)  # the fork kept the context as it was
    assert session.trace[0].events == 2 + NEW // policy.cadence.decode_every
    assert all(used <= allowed for used, _, allowed in session.trace[0].decode)


def test_full_kv_needs_the_whole_budget() -> None:
    with pytest.raises(BudgetExceeded, match="full_kv|FullKV"):
        run("full_kv", Budget("0.5"), 256)
