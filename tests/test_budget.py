"""Bytes: what tensors really hold, what the accounting says, what a budget allows - and what happens beyond it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from presets import qevict
from tiny_models import AboveMean, RandomEviction, RandomTiers, decode_all, family, prompt, random_ids, watched

from methods.full_kv import FullKV
from methods.snapkv import SnapKV
from methods.streaming_llm import StreamingLLM
from qevict_bench.accounting import PlacementCost, usage
from qevict_bench.budget import Budget, BudgetExceeded, Geometry, Infeasible, Usage
from qevict_bench.engine import Generation, generate
from qevict_bench.policy import EVICTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.store import LayerStore

METHODS: dict[str, KVPolicy] = {
    "qevict": qevict(),
    "qevict_kv_head": qevict(head_scope="kv_head", prefill_scores="all", decode_scores="every_step"),
    "qevict_paper": qevict(prefill_scores="all", fill=False, head_scope="layer", key_params="window"),
    "qevict_group": qevict(key_params="group:8"),
    "qevict_static": qevict(key_params="static", head_scope="kv_head"),
    "qevict_window8": qevict(key_params="window8"),
    "qevict_host": qevict(promotion="host"),
    "qevict_none": qevict(promotion="none"),
    "qevict_k4v2": qevict(key_bits=4, key_params="group:4"),
    "snapkv": SnapKV(),
    "snapkv_prompt": SnapKV(reselect_score="prompt", group_reduce="max"),
    "streaming_llm": StreamingLLM(),
    "streaming_llm_absolute": StreamingLLM(position="absolute"),
}
LLAMA = family("llama")
GEOMETRY = geometry_of(LLAMA)


def walked(layer: LayerStore) -> int:
    """Bytes of every distinct storage behind the tensors a layer holds."""
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in layer.stored_tensors() if x.numel()
    }
    return sum(storages.values())


def full_bytes(num_tokens: int) -> int:
    """FullKV of the tiny Llama in fp32: 3 layers x 2 KV heads x (key + value) x 16 channels x 4 bytes."""
    return 3 * 2 * 2 * 16 * 4 * num_tokens


def allowed_bytes(spec: str, basis: str, prompt_len: int, seq_len: int, max_new: int) -> int:
    if spec.endswith("t"):
        return full_bytes(int(spec[:-1]))
    tokens = {"sequence": seq_len, "prompt": prompt_len, "total": prompt_len + max_new}[basis]
    return int(Fraction(spec) * full_bytes(tokens))


def session_of(policy: KVPolicy, budget: Budget, prompt_len: int, max_new: int) -> KVSession:
    policy = policy.fit(budget, GEOMETRY, prompt_len, max_new)
    return KVSession(LLAMA, policy, budget, 1, max_new=max_new)


def check_bytes(session: KVSession, allowed: int) -> None:
    used = sum(walked(layer) for layer in session.layers.values())
    assert used <= allowed
    counted = session.usage(0).total
    assert abs(used - counted) <= 0.01 * used
    assert session.trace[0].usage.total == counted  # what is reported between events too


@pytest.mark.parametrize(
    ("spec", "basis"),
    [*((spec, "sequence") for spec in ("0.1", "0.2", "0.4", "72t")), ("0.2", "prompt"), ("0.2", "total")],
)
@pytest.mark.parametrize("name", METHODS)
def test_held_bytes_stay_within_the_budget_at_every_step(name: str, spec: str, basis: str) -> None:
    budget, prompt_len, num_new = Budget(spec, basis=basis), 420, 34
    session = session_of(METHODS[name], budget, prompt_len, num_new)
    session.prefill([random_ids(prompt_len, 1)])
    check_bytes(session, allowed_bytes(spec, basis, prompt_len, prompt_len, num_new))
    for step, token in enumerate(random_ids(num_new, 2)):
        session.decode([token])
        check_bytes(session, allowed_bytes(spec, basis, prompt_len, prompt_len + step + 1, num_new))
    trace = session.trace[0]
    assert trace.evictions + trace.demotions
    assert [whole for _, whole, _ in trace.decode] == [full_bytes(prompt_len + 1 + step) for step in range(num_new)]


@pytest.mark.parametrize("name", METHODS)
def test_a_question_counts_as_one_step(name: str) -> None:
    budget = Budget("0.2")
    session = session_of(METHODS[name], budget, 420, 20)
    session.prefill([random_ids(420, 1)])
    session.append([random_ids(50, 2)], 16)
    check_bytes(session, allowed_bytes("0.2", "sequence", 420, 470, 20))
    for step, token in enumerate(random_ids(20, 3)):
        session.decode([token])
        check_bytes(session, allowed_bytes("0.2", "sequence", 420, 471 + step, 20))


@pytest.mark.parametrize("policy", [AboveMean(), RandomEviction(), RandomTiers(unit=8, offset=5)], ids=str)
def test_ragged_heads_are_walked_too(policy: KVPolicy) -> None:
    session = session_of(policy, Budget("native"), 200, 20)
    session.prefill([random_ids(200, 1)])
    for token in random_ids(20, 2):
        session.decode([token])
        used = sum(walked(layer) for layer in session.layers.values())
        assert abs(used - session.usage(0).total) <= 0.01 * used


@pytest.mark.parametrize(
    "policy", [*METHODS.values(), RandomTiers(unit=8, offset=5, key_params="group", group=3)], ids=str
)
def test_the_cost_of_a_placement_is_what_it_uses_afterwards(policy: KVPolicy) -> None:
    budget = Budget("native") if isinstance(policy, RandomTiers) else Budget("0.2")
    fitted = policy.fit(budget, GEOMETRY, 300, 60)
    watching, _, events = watched(fitted)
    rows = [random_ids(420, 1), random_ids(300, 2)]
    session = KVSession(LLAMA, watching, budget, 2, max_new=60)
    session.prefill(rows)
    compared = 0
    for token in random_ids(60, 3):
        for event in events:
            layer = session.layers[event.layer_idx]
            assert [usage(layer, row).total for row in range(2)] == event.bytes_B
            compared += 1
        events.clear()
        session.decode([token, token])
    assert compared >= 3 * 7


@pytest.mark.parametrize("name", METHODS)
def test_a_policy_knows_what_a_table_entry_costs(name: str) -> None:
    session = session_of(METHODS[name], Budget("0.5"), 200, 8)
    session.prefill([random_ids(200, 1)])
    table = next(iter(session.layers.values())).table
    assert METHODS[name].fit(Budget("0.5"), GEOMETRY, 200, 8).entry_bytes == table.unit_bytes
    assert sum(x.nbytes for x in table.tensors()) == table.unit_bytes * table.units_of(0)


def test_placement_costs_add_up_over_layers() -> None:
    session = session_of(RandomTiers(unit=8, offset=5), Budget("native"), 100, 20)
    session.prefill([random_ids(100, 1)])
    layers = list(session.layers.values())
    placements = [Placement(layer.view().tier_BHU) for layer in layers]
    whole = PlacementCost(layers, [8], None, False)
    alone = [PlacementCost([layer], [8], None, False) for layer in layers]
    parts = [cost.bytes_of([placement]) for cost, placement in zip(alone, placements, strict=True)]
    assert torch.equal(whole.bytes_of(placements), torch.stack(parts).sum(0))
    assert int(whole.fixed_B) == sum(int(cost.fixed_B) for cost in alone)


# ---- beyond the budget ----


@dataclass(frozen=True)
class Greedy(KVPolicy):
    """Fits after the prompt, keeps everything from then on."""

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=4)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        first = view.seq_len_B == view.prompt_len_B
        kept = ~first[:, None, None] | (view.pos_BHU >= view.prompt_len_B[:, None, None] - 20)
        return [Placement(torch.where(kept, view.tier_BHU, EVICTED))]


def test_an_overshooting_policy_fails_by_name() -> None:
    session = session_of(Greedy(), Budget("0.3"), 100, 40)
    session.prefill([random_ids(100, 1)])
    with pytest.raises(BudgetExceeded) as caught:
        decode_all(session, random_ids(40, 2))
    message = str(caught.value)
    step = session.trace[0].decode
    assert all(used <= allowed for used, _, allowed in step)
    assert step
    assert message.startswith("Greedy holds")
    assert f"decode step {len(step) + 1} (token {101 + len(step)})" in message
    found = re.search(r"holds (\d+) bytes .* allowed are (\d+) \(budget=0.3, basis=sequence\): (.*)", message)
    assert found
    used, allowed = int(found[1]), int(found[2])
    assert used > allowed == allowed_bytes("0.3", "sequence", 100, 101 + len(step), 40)
    assert sum(int(part.split()[1]) for part in found[3].split(", ")) == used


def test_full_kv_does_not_fit_below_one() -> None:
    with pytest.raises(BudgetExceeded, match="FullKV holds .* after prefill"):
        session_of(FullKV(), Budget("0.9"), 100, 4).prefill([random_ids(100, 1)])


def run(policy: KVPolicy, budget: Budget, prompt_len: int, num_new: int = 24) -> Generation:
    [made] = generate(
        LLAMA,
        policy,
        budget,
        [prompt(random_ids(prompt_len, 1))],
        max_new_tokens=[num_new],
        stop=(),
        seed=0,
        example_ids=["x"],
    )
    return made


def test_enforce_prefill_reports_the_overshoot() -> None:
    made = run(SnapKV(), Budget("0.2", enforce="prefill"), 300, 60)
    assert made.fractions["after_prefill"] <= 0.2 < made.fractions["final"] <= made.fractions["peak"] < 0.5
    assert made.memory["final"] > made.memory["allowed"]
    assert not made.matched
    always = run(SnapKV(), Budget("0.2"), 300, 60)
    assert always.fractions["peak"] <= 0.2
    assert always.matched
    assert always.events == 1 + 60 // 8
    assert made.events == 1


def test_enforce_prefill_bounds_the_prompt_all_the_same() -> None:
    with pytest.raises(BudgetExceeded):
        session_of(FullKV(), Budget("0.5", enforce="prefill"), 100, 4).prefill([random_ids(100, 1)])


def test_full_kv_is_one_at_every_step() -> None:
    made = run(FullKV(), Budget("1.0"), 80, 90)
    assert made.fractions == dict.fromkeys(("after_prefill", "peak", "mean", "final", "whole_cache"), 1.0)
    assert made.memory["final"] == full_bytes(80 + 89) == made.memory["payload.full"]
    assert made.matched
    assert made.events == 1


@pytest.mark.parametrize("name", METHODS)
def test_fractions_and_memory_of_a_generation(name: str) -> None:
    made = run(METHODS[name], Budget("0.4"), 300, 40)
    components = ("payload.full", "slack", "table", "ledger", "params", "reference")
    low = [key for key in made.memory if key.startswith("payload.") and key != "payload.full"]
    assert made.memory["final"] == sum(made.memory.get(key, 0) for key in (*components, *low))
    assert made.fractions["final"] == made.memory["final"] / full_bytes(300 + 39)
    assert made.memory["allowed"] == allowed_bytes("0.4", "sequence", 299, 339, 40)
    assert max(made.fractions.values()) <= 0.4
    assert made.memory["prefill_peak"] >= full_bytes(299)
    assert made.fractions["whole_cache"] == made.fractions["final"]  # no sliding layers
    if name in ("snapkv", "qevict", "qevict_group"):
        assert made.matched


# ---- small budgets ----


@pytest.mark.parametrize("spec", ["0.02", "0.08", "0.15", "8t"])
@pytest.mark.parametrize("name", METHODS)
def test_refuse_names_a_fraction_that_works(name: str, spec: str) -> None:
    budget = Budget(spec, small_budget="refuse")
    said = refusal(name, budget, 250)
    assert said or name.startswith("streaming") or spec == "0.15"
    if said:
        found = re.search(r"nearest feasible fraction is ([\d.]+)", said)
        assert found
        assert f"budget={spec}" in said
        budget = replace(budget, spec=found[1])
    assert run(METHODS[name], budget, 250).new_ids


def refusal(name: str, budget: Budget, prompt_len: int) -> str:
    """Why a method calls a budget infeasible; "" if it does not."""
    try:
        METHODS[name].fit(budget, GEOMETRY, prompt_len - 1, 24)
    except Infeasible as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", METHODS)
def test_clamp_shrinks_what_is_protected(name: str) -> None:
    made = run(METHODS[name], Budget("0.2"), 300)
    assert made.fractions["peak"] <= 0.2
    tokens = int(0.2 * 299)
    protected = sum(value for key, value in made.knobs.items() if key in ("sink", "recent"))
    assert protected <= tokens // 2
    roomy = run(METHODS[name], Budget("0.9"), 300)
    assert sum(value for key, value in roomy.knobs.items() if key in ("sink", "recent")) >= protected


@pytest.mark.parametrize("name", METHODS)
def test_short_prompts_run_or_are_infeasible(name: str) -> None:
    loaded, ran, refused = family("llama_1"), 0, 0
    for prompt_len in range(1, 41):
        for spec in ("0.05", "0.8", "18t", "32t", "34t", *(["1.0"] if prompt_len < 10 else [])):
            budget = Budget(spec)
            said = refusal(name, budget, prompt_len + 1)  # the geometries agree per layer
            if said:
                refused += 1
                assert "nearest feasible fraction" in said
                assert spec != "1.0"
                continue
            ran += 1
            policy = METHODS[name].fit(budget, geometry_of(loaded), prompt_len, 9)
            session = KVSession(loaded, policy, budget, 1, max_new=9)
            session.prefill([random_ids(prompt_len, 1)])
            for token in random_ids(9, 2):
                session.decode([token])
    assert refused
    assert ran >= 25


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(METHODS)),
    st.integers(1, 300),
    st.integers(1, 30),
    st.integers(1, 100),
    st.sampled_from(["sequence", "prompt", "total"]),
    st.booleans(),
)
def test_any_length_and_budget_run_or_are_infeasible(
    name: str, prompt_len: int, num_new: int, percent: int, basis: str, question: bool
) -> None:
    budget = Budget(f"{percent / 100}", basis=basis)
    try:
        session = session_of(METHODS[name], budget, prompt_len, num_new)
    except Infeasible:
        return
    session.prefill([random_ids(prompt_len, 1)], 64)
    if question and basis == "sequence":
        session.append([random_ids(7, 4)])
    for token in random_ids(num_new, 2):
        session.decode([token])


# ---- the arithmetic ----


@pytest.mark.parametrize(
    "spec", ["0", "-0.1", "1.01", "20%", "0t", "-3t", "1.5t", "t", "", "none", "nan", "inf", "1/0"]
)
def test_what_is_no_budget(spec: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"budget={spec} is not a budget; give a fraction in (0, 1]")):
        Budget(spec)


@pytest.mark.parametrize(("field", "value"), [("basis", "tokens"), ("enforce", "never"), ("small_budget", "ignore")])
def test_unknown_choices_are_named_with_the_known_ones(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}='{value}' is unknown; choose one of"):
        Budget("0.2", **{field: value})


def test_fractions_are_exact() -> None:
    geometry = Geometry(32, 8, 4, 128, 2)
    assert geometry.slot_bytes == 512
    assert geometry.full_bytes(1) == 131072
    assert geometry.full_bytes(8) == 1 << 20  # the paper's window of 8 is 1 MiB
    for hundredth in range(1, 101):
        spec = f"{hundredth / 100}"
        assert Budget(spec).allowed_bytes(geometry, 1, 1000, 0) == 131072 * 10 * hundredth
    assert Budget("1/3").allowed_bytes(geometry, 1, 3, 0) == 131072
    assert Budget("1024t").allowed_bytes(geometry, 1, 9, 0) == 131072 * 1024
    assert Budget("native").allowed_bytes(geometry, 1, 9, 0) is None
    bases = {
        basis: Budget("0.5", basis=basis).allowed_bytes(geometry, 10, 14, 30)
        for basis in ("sequence", "prompt", "total")
    }
    assert bases == {"sequence": 131072 * 7, "prompt": 131072 * 5, "total": 131072 * 20}
    assert Budget(0.2).spec == "0.2"
    assert Budget("1").everything
    assert not Budget("1t").everything


def test_geometry_of_mixed_layers() -> None:
    geometry = geometry_of(family("gemma3"))
    assert (geometry.num_layers, geometry.sliding_layers, geometry.sliding_window) == (2, 2, 16)
    assert (geometry.num_kv_heads, geometry.group_size, geometry.head_dim, geometry.itemsize) == (1, 4, 16, 4)
    assert geometry.sliding_bytes(10) == 2 * 128 * 10
    assert geometry.sliding_bytes(100) == 2 * 128 * 16


def test_sliding_layers_are_billed_apart() -> None:
    session = KVSession(family("gemma3"), FullKV(), Budget("1.0"), 1)
    session.prefill([random_ids(50, 1)])
    used = session.usage(0)
    assert used.payload == 2 * 128 * 50
    assert used.sliding == geometry_of(family("gemma3")).sliding_bytes(50)
    assert session.trace[0].whole_cache == 1.0


def test_usage_adds_and_moves_room() -> None:
    one = Usage({"payload.full": 100, "slack": 40, "table": 5}, host=1, workspace=2, sliding=3)
    other = Usage({"payload.full": 1, "payload.int2": 7}, host=10)
    assert one + other == Usage({"payload.full": 101, "slack": 40, "table": 5, "payload.int2": 7}, 11, 2, 3)
    assert one.filled(30).counted == {"payload.full": 130, "slack": 10, "table": 5}
    assert one.filled(30).total == one.total == 145
    assert one.payload == 100
