"""Sessions: budget 1.0 changes no bit, batches equal single rows, chunks, appends and forks equal plain runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from presets import qevict
from tiny_models import (
    AboveMean,
    RandomEviction,
    RandomTiers,
    decode_all,
    family,
    kept,
    prompt,
    random_ids,
    watched,
)
from torch import Tensor

from methods.full_kv import FullKV
from methods.snapkv import SnapKV
from methods.streaming_llm import StreamingLLM
from qevict_bench.budget import Budget
from qevict_bench.codecs import Tier
from qevict_bench.engine import Generation, generate
from qevict_bench.models import LoadedModel
from qevict_bench.policy import Allowance, KVPolicy, LayerView, Placement
from qevict_bench.protocol import Protocol
from qevict_bench.session import KVSession, geometry_of

EVERYTHING, UNBOUNDED = Budget("1.0"), Budget("native")
PAPER = qevict(prefill_scores="all", fill=False, head_scope="layer", decode_scores="every_step")
METHODS: dict[str, KVPolicy] = {
    "qevict": qevict(recent=16),
    "qevict_paper": replace(PAPER, recent=16),
    "qevict_every_step": qevict(recent=16, decode_scores="every_step", head_scope="kv_head"),
    "qevict_static": qevict(recent=16, key_params="static"),
    "qevict_group": qevict(recent=16, key_params="group:4", promotion="host"),
    "snapkv": SnapKV(window=16),
    "snapkv_prompt": SnapKV(window=16, reselect_score="prompt", group_reduce="max", pooling="avg"),
    "streaming_llm": StreamingLLM(),
    "streaming_llm_absolute": StreamingLLM(position="absolute"),
}
ANY = {**METHODS, "ragged": AboveMean()}


def budget_of(name: str, fraction: str = "0.4") -> Budget:
    return UNBOUNDED if name == "ragged" else Budget(fraction)


def fitted(policy: KVPolicy, budget: Budget, prompt_len: int, max_new: int, kind: str = "llama") -> KVPolicy:
    return policy.fit(budget, geometry_of(family(kind)), prompt_len, max_new)


def run(
    loaded: LoadedModel,
    policy: KVPolicy,
    budget: Budget,
    prompts: list[list[int]],
    *,
    num_new: int = 24,
    first_token: str = "compressed",
    chunk: int = 1024,
    working_copy: bool = True,
    names: list[str] | None = None,
) -> list[Generation]:
    made = generate(
        loaded,
        policy,
        budget,
        [prompt(ids, (3, 4, 20)) for ids in prompts],
        max_new_tokens=[num_new] * len(prompts),
        stop=(),
        protocol=Protocol(first_token=first_token),
        seed=0,
        example_ids=names or [str(len(ids)) for ids in prompts],
        prefill_chunk=chunk,
        working_copy=working_copy,
    )
    return [replace(each, ttft_s=0.0, decode_s=0.0) for each in made]


def equal(one: Generation, other: Generation) -> None:
    """All of it: tokens, bytes, fractions, moves, needle fate; the padded workspace of a batch apart."""
    assert replace(one, memory={}) == replace(other, memory={})
    assert {**one.memory, "workspace": 0} == {**other.memory, "workspace": 0}


# ---- budget 1.0 ----


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", METHODS)
def test_everything_changes_no_bit(name: str, kind: str) -> None:
    prompts, after = [random_ids(75, 1), random_ids(40, 2)], random_ids(20, 3)
    policy, calls, _ = watched(fitted(METHODS[name], EVERYTHING, 75, 20, kind))
    sessions = [KVSession(family(kind), each, EVERYTHING, 2) for each in (FullKV(), policy)]
    first = [session.prefill(prompts, 16) for session in sessions]
    assert torch.equal(*first)
    for token in after:
        assert torch.equal(*(session.decode([token, token]) for session in sessions))
    events = len(family(kind).compressible_layers) * (1 + 20 // policy.cadence.decode_every)
    assert calls["place"] == events
    if policy.columns:
        assert calls["probe"]
        assert calls["observe"]
        for layer in sessions[1].layers.values():
            for column in layer.view().columns.values():
                assert bool((column.sum((1, 2)) > 0).all())
    for row in range(2):
        trace = sessions[1].trace[row]
        assert {used / whole for used, whole, _ in trace.decode} == {1.0}
        assert trace.promotions + trace.demotions + trace.evictions == 0


@pytest.mark.parametrize("name", METHODS)
def test_whole_mass_is_observed(name: str) -> None:
    """Attention of a query sums to 1 over everything stored, whatever is stored."""
    policy = fitted(METHODS[name], Budget("0.4"), 90, 20)
    if not policy.columns:
        return
    sums: list[Tensor] = []

    @dataclass(frozen=True)
    class Summing(type(policy)):  # type: ignore[misc]
        def observe(self, view, mass_BHGPU, rows_BP):  # type: ignore[no-untyped-def]
            sums.append(mass_BHGPU.sum(-1).flatten())
            super().observe(view, mass_BHGPU, rows_BP)

    fields = {each.name: getattr(policy, each.name) for each in dataclasses.fields(policy)}
    session = KVSession(family("llama"), Summing(**fields), Budget("0.4"), 2)
    session.prefill([random_ids(100, 1), random_ids(90, 2)], 16)
    for token in random_ids(20, 3):
        session.decode([token, token])
    total = torch.cat(sums)
    torch.testing.assert_close(total, torch.ones_like(total))


# ---- batches ----


@pytest.mark.parametrize("first_token", ["compressed", "full"])
@pytest.mark.parametrize("name", ANY)
def test_a_batch_equals_its_rows_alone(name: str, first_token: str) -> None:
    prompts = [random_ids(n, n) for n in (90, 161, 120)]
    together = run(family("llama"), ANY[name], budget_of(name), prompts, first_token=first_token)
    for ids, made in zip(prompts, together, strict=True):
        [alone] = run(family("llama"), ANY[name], budget_of(name), [ids], first_token=first_token)
        equal(made, alone)
    if name != "qevict_static":
        assert all(made.evictions or made.demotions for made in together)


@pytest.mark.parametrize("name", ANY)
def test_a_batch_keeps_the_units_its_rows_keep_alone(name: str) -> None:
    prompts, after = [random_ids(n, n) for n in (90, 161)], random_ids(20, 5)
    policy = fitted(ANY[name], budget_of(name), 90, 20)
    batch = KVSession(family("llama"), policy, budget_of(name), 2, seeds=["0", "1"])
    logits = [batch.prefill(prompts, 16), *(batch.decode([token] * 2) for token in after)]
    for row, ids in enumerate(prompts):
        alone = KVSession(family("llama"), policy, budget_of(name), 1, seeds=[str(row)])
        expected = [alone.prefill([ids], 1024), *(alone.decode([token]) for token in after)]
        assert kept(batch, row) == kept(alone, 0)
        assert batch.usage(row).counted == alone.usage(0).counted
        torch.testing.assert_close(torch.stack(logits)[:, row], torch.stack(expected)[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "qwen3_moe", "phi3_partial"])
@pytest.mark.parametrize("method", ["qevict", "snapkv", "streaming_llm"])
def test_other_families_in_batches(method: str, name: str) -> None:
    prompts = [random_ids(n, n) for n in (120, 90)]
    together = run(family(name), METHODS[method], Budget("0.4"), prompts, chunk=32)
    for ids, made in zip(prompts, together, strict=True):
        equal(made, run(family(name), METHODS[method], Budget("0.4"), [ids])[0])
        assert made.evictions + made.demotions


@pytest.mark.parametrize("name", ANY)
def test_rows_that_end_at_different_steps(name: str) -> None:
    prompts = [random_ids(n, n) for n in (90, 161, 120)]
    free = run(family("llama"), ANY[name], budget_of(name), prompts)
    eos = (free[0].new_ids[5], free[2].new_ids[13])
    loaded = replace(family("llama"), eos_ids=eos)
    together = run(loaded, ANY[name], budget_of(name), prompts)
    ends = []
    for ids, made, whole in zip(prompts, together, free, strict=True):
        equal(made, run(loaded, ANY[name], budget_of(name), [ids])[0])
        found = [step for step, token in enumerate(whole.new_ids) if token in eos]
        ends.append(found[0] if found else len(whole.new_ids))
        assert made.new_ids == whole.new_ids[: ends[-1]]
        assert made.stop == ("eos" if found else "length")
    assert len(set(ends)) > 1


@pytest.mark.parametrize("name", ANY)
def test_a_frozen_row_never_changes(name: str) -> None:
    policy = fitted(ANY[name], budget_of(name), 90, 30)
    session = KVSession(family("llama"), policy, budget_of(name), 3)
    session.prefill([random_ids(n, n) for n in (90, 161, 120)])
    for token in random_ids(11, 1):
        session.decode([token] * 3)

    def state() -> list[Tensor]:
        found = []
        for layer in session.layers.values():
            slots = layer.read(False)
            for s in range(layer.num_heads, 2 * layer.num_heads):
                part = slice(slots.start[s], slots.start[s] + slots.count[s])
                found += [slots.k[part].clone(), slots.v[part].clone()]
        return found

    session.freeze(1)
    units, before, events = kept(session, 1), state(), session.trace[1].events
    for token in random_ids(20, 2):
        session.decode([token] * 3)
    assert units == kept(session, 1)
    assert session.trace[1].events == events
    assert session.seq_len == [90 + 31, 161 + 11, 120 + 31]
    assert all(torch.equal(old, new) for old, new in zip(before, state(), strict=True))


@pytest.mark.parametrize("name", ANY)
def test_a_sample_leaves_nothing_behind(name: str) -> None:
    one, other = random_ids(150, 1), random_ids(121, 2)
    [fresh] = run(family("llama"), ANY[name], budget_of(name), [other])
    run(family("llama"), ANY[name], budget_of(name), [one])
    equal(run(family("llama"), ANY[name], budget_of(name), [other])[0], fresh)


def test_random_generators_belong_to_rows() -> None:
    prompts = [random_ids(n, n) for n in (60, 61)]
    together = run(family("llama"), RandomEviction(), UNBOUNDED, prompts, names=["a", "b"])
    for ids, name, made in zip(prompts, "ab", together, strict=True):
        equal(made, run(family("llama"), RandomEviction(), UNBOUNDED, [ids], names=[name])[0])
    assert together[0].evictions != together[1].evictions


# ---- chunks, appends, forks ----


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", ANY)
def test_chunks_equal_one_shot(name: str, kind: str) -> None:
    prompts = [random_ids(n, n) for n in (90, 161)]
    one_shot = run(family(kind), ANY[name], budget_of(name), prompts)
    for chunk in (7, 64):
        for made, expected in zip(
            run(family(kind), ANY[name], budget_of(name), prompts, chunk=chunk), one_shot, strict=True
        ):
            equal(made, expected)


@dataclass(frozen=True)
class Once(KVPolicy):
    """Places once, after the prompt, as `inner` does."""

    inner: KVPolicy

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self.inner.tiers

    @property
    def unit(self) -> int:
        return self.inner.unit

    @property
    def offset(self) -> int:
        return self.inner.offset

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        first = bool((view.seq_len_B == view.prompt_len_B).all())
        return self.inner.place(views, allowance) if first else [Placement(view.tier_BHU)]


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        (FullKV(), EVERYTHING),
        (SnapKV(window=16), Budget("0.3", enforce="prefill")),
        (Once(inner=RandomTiers(unit=8, offset=5)), UNBOUNDED),
        (Once(inner=RandomEviction()), UNBOUNDED),
    ],
    ids=["full_kv", "snapkv", "low_bit", "ragged"],
)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_question_in_one_go_equals_token_by_token(policy: KVPolicy, budget: Budget, kind: str) -> None:
    context, question, answer = random_ids(140, 1), random_ids(21, 2), random_ids(12, 3)
    policy = fitted(policy, budget, 140, 12, kind)
    runs = []
    for chunk in (1024, 8, 0):
        session = KVSession(family(kind), policy, budget, 1)
        session.prefill([context])
        last = session.append([question], chunk)[0] if chunk else decode_all(session, question)[-1]
        logits = torch.cat((last[None], decode_all(session, answer)))
        runs.append((logits, [layer.full.count for layer in session.layers.values()]))
    for logits, counts in runs[1:]:
        torch.testing.assert_close(logits, runs[0][0], atol=1e-5, rtol=1e-5)
        assert counts == runs[0][1]


FORKED = {**{name: (policy, budget_of(name)) for name, policy in ANY.items()}}
FORKED["random_tiers"] = (RandomTiers(unit=8, offset=5), UNBOUNDED)
FORKED["random_eviction"] = (RandomEviction(), UNBOUNDED)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", FORKED)
def test_forks_equal_fresh_runs_and_leave_the_parent_alone(name: str, kind: str) -> None:
    policy, budget = FORKED[name]
    policy = fitted(policy, budget, 140, 20, kind)
    contexts = [random_ids(140, 1), random_ids(99, 2)]
    questions = [[random_ids(9, 3), random_ids(14, 4)], [random_ids(20, 5), random_ids(3, 6)]]

    def ask(session: KVSession, question: list[list[int]]) -> Tensor:
        logits = [session.append(question)]
        for _ in range(20):
            logits.append(session.decode(logits[-1].argmax(-1).tolist()))
        return torch.stack(logits)

    parent = KVSession(family(kind), policy, budget, 2)
    parent.prefill(contexts)
    before = snapshot(parent)
    for question in questions:
        fork = parent.fork()
        assert fork.loaded is parent.loaded
        answer = ask(fork, question)
        fresh = KVSession(family(kind), policy, budget, 2)
        fresh.prefill(contexts)
        assert torch.equal(answer, ask(fresh, question))
        for row in range(2):
            assert kept(fork, row) == kept(fresh, row)
            assert fork.trace[row] == fresh.trace[row]
        after = snapshot(parent)
        assert before[0] == after[0]
        assert all(same_bytes(old, new) for old, new in zip(before[1], after[1], strict=True))


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Free room may hold anything, NaN too."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def snapshot(session: KVSession) -> tuple[list[object], list[Tensor]]:
    """Everything a session holds: bytes, traces and lengths; tensors and generator states."""
    rows = range(len(session.seq_len))
    facts: list[object] = [list(session.seq_len), list(session.active), [repr(session.trace[row]) for row in rows]]
    facts += [session.usage(row).counted for row in rows]
    tensors = [x.clone() for layer in session.layers.values() for x in layer.stored_tensors()]
    tensors += [x.clone() for rows in session._sliding.values() for pair in rows for x in pair]
    tensors += [rng.get_state() for rng in session._rngs]
    return facts, tensors


def test_a_fork_shares_no_memory_with_its_parent() -> None:
    parent = KVSession(family("gemma3"), RandomTiers(unit=8, offset=5), UNBOUNDED, 2)
    parent.prefill([random_ids(90, 1), random_ids(60, 2)])
    fork = parent.fork()
    owners = [{x.untyped_storage().data_ptr() for x in stored(session) if x.numel()} for session in (parent, fork)]
    assert not owners[0] & owners[1]
    assert fork.loaded.model is parent.loaded.model


def stored(session: KVSession) -> list[Tensor]:
    found = [x for layer in session.layers.values() for x in layer.stored_tensors()]
    return found + [x for rows in session._sliding.values() for pair in rows for x in pair]


@pytest.mark.parametrize("scores", ["every_step", "replay"])
def test_questions_after_an_unfinished_interval(scores: str) -> None:
    """A second question may come when an interval of decoded tokens has just begun: every query is scored once."""
    policy = qevict(recent=8, decode_scores=scores, prefill_scores="all", omega=8)
    session = KVSession(family("llama"), policy, EVERYTHING, 1)
    ids, question = random_ids(64, 1), random_ids(5, 3)
    session.prefill([ids])
    decode_all(session, random_ids(3, 2))
    session.append([question])
    decode_all(session, random_ids(8, 4))
    for layer in session.layers.values():
        torch.testing.assert_close(layer.view().columns["score"].sum(), torch.tensor(64.0 + 3 + 5 + 8))


@pytest.mark.parametrize("name", ["qevict", "qevict_every_step", "qevict_group"])
def test_a_working_copy_changes_no_result(name: str) -> None:
    prompts = [random_ids(n, n) for n in (90, 161)]
    with_copy, without = (
        run(family("llama"), METHODS[name], Budget("0.4"), prompts, working_copy=keep) for keep in (True, False)
    )
    for one, other in zip(with_copy, without, strict=True):
        equal(one, other)


def test_same_seed_same_run() -> None:
    one, other = (run(family("llama"), RandomEviction(), UNBOUNDED, [random_ids(80, 1)]) for _ in range(2))
    assert one == other


def test_stop_strings_and_length() -> None:
    ids = random_ids(60, 1)
    [free] = run(family("llama"), FullKV(), EVERYTHING, [ids])
    text = free.text
    assert free.stop == "length"
    assert len(free.new_ids) == 24
    mark = " ".join(text.split()[7:9])
    [made] = generate(
        family("llama"),
        FullKV(),
        EVERYTHING,
        [prompt(ids)],
        max_new_tokens=[24],
        stop=(mark,),
        seed=0,
        example_ids=["x"],
    )
    assert made.stop == "stop_string"
    assert made.text == text[: text.index(mark)]
    assert mark not in made.text


def test_an_empty_row_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        KVSession(family("llama"), FullKV(), EVERYTHING, 2).prefill([[1, 2], []])


def test_prompts_beyond_the_context_are_refused() -> None:
    loaded = replace(family("llama"), max_context=64)
    with pytest.raises(ValueError, match="context"):
        run(loaded, FullKV(), EVERYTHING, [random_ids(60)])


def test_compact_positions_leave_sliding_layers_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers evict nothing: after re-indexing, the first (sliding) layer attends as FullKV's does."""
    seen: list[Tensor] = []
    attend_sliding = KVSession._attend_sliding

    def watch(session: KVSession, index: int, *rest: object) -> Tensor:
        out: Tensor = attend_sliding(session, index, *rest)  # type: ignore[arg-type]
        if index == 0:
            seen.append(out)
        return out

    monkeypatch.setattr(KVSession, "_attend_sliding", watch)
    outputs = []
    for policy, budget in ((FullKV(), EVERYTHING), (StreamingLLM(position="compact"), Budget("0.4"))):
        seen.clear()
        session = KVSession(family("gemma3"), policy, budget, 1, max_new=40)
        session.prefill([random_ids(90)])
        for token in range(20):
            session.decode([token])
        outputs.append(torch.cat([out[:, :, -1] for out in seen]))
    assert session.trace[0].evictions > 0
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
