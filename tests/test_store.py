"""What the store attends to, against a Llama written out by hand that keeps everything and masks (naive.DenseLlama)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import naive
import pytest
import torch
from presets import qevict
from tiny_models import (
    AboveMean,
    Event,
    KeepSuffix,
    RandomEviction,
    RandomTiers,
    decode_all,
    family,
    kept,
    random_ids,
    reference,
    watched,
)
from torch import Tensor

from methods.qevict import QEvict
from methods.streaming_llm import StreamingLLM
from qevict_bench.budget import Budget
from qevict_bench.codecs import Encoded, PerChannel
from qevict_bench.policy import EVICTED, FULL, Allowance, KVPolicy, LayerView, Placement
from qevict_bench.session import KVSession

UNBOUNDED = Budget("native")


def close(logits: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)


def same_mask(dense: naive.DenseLlama, event: Event, row: int = 0) -> None:
    """Mask, in the dense run, what a placement evicted."""
    alive = dense.alive[event.layer_idx]
    for head in range(len(alive)):
        own = head if event.pos_BHU.shape[1] > 1 else 0
        for pos, end, tier in zip(
            event.pos_BHU[row, own].tolist(),
            event.end_BHU[row, own].tolist(),
            event.tier_BHU[row, own].tolist(),
            strict=True,
        ):
            if tier == EVICTED and pos >= 0:
                alive[head, pos:end] = False


class Quantized:
    """Replaces, in a dense run, keys and values of units, from their first demotion on, by what naive codes give."""

    def __init__(self, dense: naive.DenseLlama, policy: RandomTiers | QEvict, prompt_len: int, host: bool) -> None:
        self.dense, self.policy, self.host = dense, policy, host
        self.kind, self.bits = policy.tiers[1].key.params, policy.tiers[1].key.bits  # type: ignore[attr-defined]
        self.size = policy.tiers[1].key.group
        self.prompt = [k[:, :prompt_len].float() for k in dense.keys]
        self.exact: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.coded: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.demotions = 0

    def carry_out(self, event: Event) -> None:
        same_mask(self.dense, event)
        layer, unit = event.layer_idx, self.policy.unit
        keys, values = self.dense.keys[layer], self.dense.values[layer]
        for head in range(len(keys)):
            own = head if event.pos_BHU.shape[1] > 1 else 0
            tiers = zip(event.pos_BHU[0, own].tolist(), event.tier_BHU[0, own].tolist(), strict=True)
            fresh = []
            for pos, tier in tiers:
                known = (layer, head, pos) in self.coded
                if tier > FULL and not known:
                    fresh.append(pos)
                if tier == FULL and known and self.host:
                    keys[head, pos : pos + unit], values[head, pos : pos + unit] = self.exact[layer, head, pos]
                if tier > FULL and known:
                    keys[head, pos : pos + unit], values[head, pos : pos + unit] = self.coded[layer, head, pos]
            for start in range(0, len(fresh), self.size):
                self.demote(layer, head, fresh[start : start + self.size])

    def measured(self, tokens: Tensor) -> Tensor:
        """What codes are computed from; a subclass may know it to the last bit."""
        return tokens

    def demote(self, layer: int, head: int, units: list[int]) -> None:
        at = torch.cat([torch.arange(pos, pos + self.policy.unit) for pos in units])
        keys, values = self.dense.keys[layer][head], self.dense.values[layer][head]
        for pos in units:
            part = slice(pos, pos + self.policy.unit)
            self.exact[layer, head, pos] = keys[part].clone(), values[part].clone()
        tokens = self.measured(keys[at].float())
        if self.kind == "static":
            keys[at] = naive.static_channels(tokens, self.prompt[layer][head], self.bits).double()
        elif self.kind == "relative8":
            keys[at] = naive.relative_channels(tokens, self.prompt[layer][head], self.bits).double()
        else:
            keys[at] = naive.affine_channels(tokens, self.bits).double()
        values[at] = naive.affine_tokens(values[at].float(), self.policy.tiers[1].value.bits).double()
        for pos in units:
            part = slice(pos, pos + self.policy.unit)
            self.coded[layer, head, pos] = keys[part].clone(), values[part].clone()
            self.demotions += 1


@pytest.mark.parametrize("kind", ["llama_4", "llama_wide"])
@pytest.mark.parametrize(
    "policy",
    [
        RandomEviction(),
        RandomEviction(head_shared=True),
        RandomEviction(unit=8, offset=5),
        RandomEviction(unit=8, offset=5, head_shared=True, every=3),
        RandomEviction(unit=3, every=1, share=0.1),
        AboveMean(),
    ],
    ids=str,
)
def test_evictions_equal_a_masked_dense_run(policy: KVPolicy, kind: str) -> None:
    ids, after = random_ids(61, 3), random_ids(30, 4)
    policy, _, events = watched(policy)
    session = KVSession(family(kind), policy, UNBOUNDED, 1)
    dense = naive.DenseLlama(family(kind).model)
    close(session.prefill([ids], 16), dense.run(ids, 0)[-1:])
    for step, token in enumerate(after):
        for event in events:
            same_mask(dense, event)
        events.clear()
        close(session.decode([token]), dense.run([token], len(ids) + step))
    assert min(float(alive.float().mean()) for alive in dense.alive) < 0.8


def test_rows_of_a_batch_equal_masked_dense_runs() -> None:
    rows, after = [random_ids(37, 1), random_ids(61, 2), random_ids(50, 3)], random_ids(20, 4)
    policy, _, events = watched(RandomEviction(unit=8, offset=5))
    session = KVSession(family("llama_4"), policy, UNBOUNDED, len(rows))
    dense = [naive.DenseLlama(family("llama_4").model) for _ in rows]
    logits = session.prefill(rows, 16)
    for row, ids in enumerate(rows):
        close(logits[row : row + 1], dense[row].run(ids, 0)[-1:])
    for step, token in enumerate(after):
        for event in events:
            for row in range(len(rows)):
                same_mask(dense[row], event, row)
        events.clear()
        logits = session.decode([token] * len(rows))
        for row, ids in enumerate(rows):
            close(logits[row : row + 1], dense[row].run([token], len(ids) + step))


@pytest.mark.parametrize("promotion", ["dequantize", "host"])
@pytest.mark.parametrize(
    "policy",
    [
        RandomTiers(unit=8, offset=5),
        RandomTiers(unit=8, offset=5, head_shared=True),
        RandomTiers(unit=4, every=1),
        RandomTiers(unit=8, offset=3, key_params="group", group=3),
        RandomTiers(unit=8, offset=5, key_params="static", bits=4),
    ],
    ids=str,
)
def test_low_bit_tiers_equal_a_dense_run_on_fake_quantized_values(policy: RandomTiers, promotion: str) -> None:
    policy, _, events = watched(replace(policy, promotion=promotion))
    run_quantized(policy, events, UNBOUNDED, prompt_len=77, num_new=24)


@pytest.mark.parametrize("bits", [2, 4])
def test_relative_parameters_equal_a_dense_run(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that holds the prompt's largest value sits exactly between two range bytes, so the last bit of the

    un-rotated keys decides: the naive codes start from the very keys the engine encoded, which are checked first.
    """
    encoded: list[Tensor] = []
    prompts: list[Tensor] = []
    encode, reference = PerChannel.encode, PerChannel.reference

    def spy_encode(self: PerChannel, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        encoded.extend(x_NTD.clone())
        return encode(self, x_NTD, ref)

    def spy_reference(self: PerChannel, x_HSD: Tensor) -> tuple[Tensor, ...]:
        prompts.append(x_HSD.clone())
        return reference(self, x_HSD)

    monkeypatch.setattr(PerChannel, "encode", spy_encode)
    monkeypatch.setattr(PerChannel, "reference", spy_reference)

    class Exactly(Quantized):
        def measured(self, tokens: Tensor) -> Tensor:
            if len(prompts) == len(self.prompt):
                torch.testing.assert_close(prompts, self.prompt, atol=1e-5, rtol=0)
                self.prompt = list(prompts)
                prompts.clear()
            torch.testing.assert_close(encoded[0], tokens, atol=1e-5, rtol=0)
            return encoded.pop(0)

    policy, _, events = watched(RandomTiers(unit=8, offset=5, key_params="relative8", bits=bits))
    run_quantized(policy, events, UNBOUNDED, prompt_len=77, num_new=24, oracle=Exactly)
    assert not prompts


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        (qevict(recent=8, prefill_scores="all"), "0.4"),
        (qevict(recent=8, key_params="group:4", head_scope="kv_head", omega=4), "0.25"),
        (qevict(recent=8, promotion="host", fill=False, prefill_scores="all"), "0.4"),
    ],
    ids=["layer", "kv_head", "host"],
)
def test_qevict_equals_a_dense_run_on_fake_quantized_values(policy: QEvict, budget: str) -> None:
    policy, _, events = watched(policy)
    session = run_quantized(policy, events, Budget(budget), prompt_len=173, num_new=48)
    trace = session.trace[0]
    assert trace.demotions
    assert trace.promotions
    assert trace.evictions


def run_quantized(
    policy: RandomTiers | QEvict,
    events: list[Event],
    budget: Budget,
    prompt_len: int,
    num_new: int,
    oracle: type[Quantized] = Quantized,
) -> KVSession:
    ids, after = random_ids(prompt_len, 5), random_ids(num_new, 6)
    session = KVSession(family("llama"), policy, budget, 1)
    dense = naive.DenseLlama(family("llama").model)
    close(session.prefill([ids], 1024), dense.run(ids, 0)[-1:])
    quantized = oracle(dense, policy, prompt_len, policy.restore == "host")
    for step, token in enumerate(after):
        for event in events:
            quantized.carry_out(event)
        events.clear()
        close(session.decode([token]), dense.run([token], len(ids) + step))
    assert quantized.demotions
    return session


@pytest.mark.parametrize("chunk", [5, 16, 1024])
@pytest.mark.parametrize(("prompt_len", "suffix"), [(40, 8), (40, 1), (63, 17), (64, 64), (130, 33)])
def test_a_suffix_on_one_layer_equals_a_dense_run_on_the_suffix(prompt_len: int, suffix: int, chunk: int) -> None:
    ids, after = random_ids(prompt_len, 7), random_ids(12, 8)
    session = KVSession(family("llama_1"), KeepSuffix(suffix=suffix), UNBOUNDED, 1)
    session.prefill([ids], chunk)
    logits = decode_all(session, after)
    with torch.inference_mode():
        expected = reference("llama_1")(torch.tensor([ids[-suffix:] + after])).logits[0, suffix:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama_1", "llama_4", "llama_wide"])
def test_compact_positions_equal_a_run_that_rotates_by_cache_index(kind: str) -> None:
    ids, after = random_ids(90, 9), random_ids(40, 10)
    policy, _, events = watched(StreamingLLM(sink=4, every=8, position="compact"))
    session = KVSession(family(kind), policy, Budget("0.4"), 1)
    dense = naive.DenseLlama(family(kind).model)
    close(session.prefill([ids], 32), dense.run(ids, 0)[-1:])
    for token in after:
        for event in events:
            same_mask(dense, event)
            alive = dense.alive[event.layer_idx]
            dense.places[event.layer_idx] = (alive.cumsum(-1) - 1).clamp(min=0)
        events.clear()
        [place] = {int(alive[0].sum()) for alive in dense.alive}
        close(session.decode([token]), dense.run([token], place))
    assert place < 60


@pytest.mark.parametrize("policy", [RandomTiers(unit=8, offset=5), RandomTiers(unit=8, promotion="host")], ids=str)
def test_a_working_copy_changes_no_bit(policy: RandomTiers) -> None:
    logits = []
    for working_copy in (True, False):
        session = KVSession(family("llama"), policy, UNBOUNDED, 2, working_copy=working_copy)
        session.prefill([random_ids(77, 1), random_ids(50, 2)])
        logits.append(torch.stack([session.decode([token, token]) for token in random_ids(24, 3)]))
        assert bool(session.usage(0).workspace) >= working_copy
    assert torch.equal(*logits)


def test_codes_stay_the_same_for_as_long_as_a_unit_lives() -> None:
    """The ledger: a unit demoted again gives the very values it gave the first time."""
    policy = RandomTiers(unit=8, offset=5)
    session = KVSession(family("llama"), policy, UNBOUNDED, 1)
    session.prefill([random_ids(173, 1)])
    first: dict[tuple[int, int, int], Tensor] = {}
    again = 0
    for token in random_ids(60, 2):
        session.decode([token])
        for index, layer in session.layers.items():
            rect = layer.table.rect()
            at = torch.nonzero(rect.coded[0] >= 0).tolist()
            packed = layer.keys.lanes[0].slot[0] if at else torch.zeros(0)
            assert len(packed) == len(at)
            for entry, (head, unit) in enumerate(at):
                key = index, head, int(rect.pos[0, head, unit])
                again += key in first
                assert torch.equal(first.setdefault(key, packed[entry].clone()), packed[entry])
    assert again > 100
    assert session.trace[0].promotions > 10


def test_evicted_units_are_never_revived() -> None:
    @dataclass(frozen=True)
    class Reviving(RandomEviction):
        def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
            first = [view.seq_len_B[0] == view.prompt_len_B[0] for view in views]
            if all(first):
                return super().place(views, allowance)
            return [Placement(torch.zeros_like(view.tier_BHU)) for view in views]

    session = KVSession(family("llama"), Reviving(), UNBOUNDED, 1)
    session.prefill([random_ids(40, 1)])
    before = kept(session, 0)
    assert any(len({len(head) for head in heads}) > 1 for heads in before)  # dead entries beside live ones
    decode_all(session, random_ids(4, 2))
    for old, new in zip(before, kept(session, 0), strict=True):
        assert [head[: head.index((40, FULL))] for head in new] == [head[: head.index((40, FULL))] for head in old]


def test_an_unfinished_unit_cannot_be_quantized() -> None:
    @dataclass(frozen=True)
    class Eager(RandomTiers):
        def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
            return [Placement(torch.ones_like(view.tier_BHU)) for view in views]

    session = KVSession(family("llama"), Eager(unit=8), UNBOUNDED, 1)
    with pytest.raises(ValueError, match="incomplete unit"):
        session.prefill([random_ids(43, 1)])
