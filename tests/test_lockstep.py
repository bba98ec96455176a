"""Records against a full-matrix computation: transformers' eager attention over the whole stream, and the tiers that a
plain session of the method had before every step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

import naive
import pytest
import torch
from presets import qevict
from tiny_models import (
    AboveMean,
    KeepSuffix,
    RandomEviction,
    RandomTiers,
    around,
    engine,
    family,
    kept,
    random_ids,
)
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from methods.full_kv import FullKV
from methods.h2o import H2O
from methods.kivi import KIVI
from methods.mikv import MiKV
from methods.qevict import QEvict
from methods.snapkv import SnapKV
from methods.streaming_llm import StreamingLLM
from methods.zipcache import ZipCache
from qevict_bench import attention
from qevict_bench.agreement import score_agreement
from qevict_bench.budget import Budget
from qevict_bench.codecs import Tier
from qevict_bench.diagnostics import NOT_YET, History, churn, fmm, lir, moves, needle_fate, regret
from qevict_bench.lockstep import Part, Protected, Stream, observe_streams, protected_by
from qevict_bench.models import LoadedModel, ModelSpec
from qevict_bench.policy import EVICTED, FULL, Allowance, KVPolicy, LayerView, Placement
from qevict_bench.record import Record
from qevict_bench.reference import full_kv_continuation
from qevict_bench.session import KVSession, geometry_of

UNBOUNDED, EVERYTHING = Budget("native"), Budget("1.0")
QEVICT = qevict(omega=4, window=4, sink=3, recent=6, observation=8)
FORM = ((61, False), (21, True), (9, False), (14, True))  # a prompt, an answer, a question, an answer


def stream(seed: int, form: Sequence[tuple[int, bool]] = FORM) -> Stream:
    ids, parts = iter(random_ids(sum(num for num, _ in form), seed)), []
    for num, decoded in form:
        parts.append(Part(tuple(next(ids) for _ in range(num)), decoded))
    return Stream(f"stream-{seed}", tuple(parts))


def ids_of(each: Stream) -> list[int]:
    return [token for part in each.parts for token in part.ids]


def one(
    policy: KVPolicy, budget: Budget, each: Stream | None = None, loaded: LoadedModel | None = None, **options: object
) -> Record:
    [record] = observe_streams(loaded or engine(), policy, budget, [each or stream(1)], seed=0, **options)  # type: ignore[arg-type]
    return record


# ---- the independent side ----


@dataclass(frozen=True)
class Matrix:
    """Everything of a stream at once: attention [L, HQ, N, N] of compressible layers, logits [N, V], and the attention
    output of every layer before its projection [L, N, HQ * D].
    """

    attention: Tensor
    logits: Tensor
    outputs: Tensor


@cache
def eager_twin(name: str) -> PreTrainedModel:
    model = engine().model if name == "tiny" else family(name).model
    twin = AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), dtype=torch.float32, attn_implementation="eager"
    )
    twin.load_state_dict(model.state_dict())
    return twin.eval().requires_grad_(False)


@cache
def matrix(name: str, each: Stream) -> Matrix:
    twin, layers = eager_twin(name), (engine() if name == "tiny" else family(name)).compressible_layers
    with torch.inference_mode(), watching(twin, layers) as outputs:
        out = twin(torch.tensor([ids_of(each)]), output_attentions=True, use_cache=False)
    attention = torch.stack([out.attentions[layer][0] for layer in layers])
    return Matrix(attention, out.logits[0], torch.stack([outputs[layer][0][0] for layer in layers]))


class watching:
    """What goes into the output projection of some layers, call by call."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self.model, self.seen = model, {layer: list[Tensor]() for layer in layers}

    def __enter__(self) -> dict[int, list[Tensor]]:
        self.hooks = [
            self.model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(
                lambda module, args, layer=layer: self.seen[layer].append(args[0].clone())
            )
            for layer in self.seen
        ]
        return self.seen

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()


@dataclass
class Plain:
    """A plain session of the method on one stream. Per step after the prefill: the tiers that stood before it, as
    {position: tier} of each layer and KV head, and the event that made them; logits where there are any; attention
    outputs [L, S, HQ * D]. Per event: tokens seen, (total, ledger) bytes, moves so far.
    """

    tiers: list[list[list[dict[int, int]]]]
    events: list[int]
    event_of: list[int]
    logits: dict[int, Tensor]
    outputs: Tensor
    sizes: list[tuple[int, int]]
    counts: list[tuple[int, int, int]]
    fraction: float


def held(session: KVSession, policy: KVPolicy) -> list[list[dict[int, int]]]:
    heads, found = session.geometry.num_kv_heads, []
    for layer in kept(session, 0):
        maps = []
        for units in layer:
            tiers: dict[int, int] = {}
            for first, tier in units:
                end = policy.offset if first < policy.offset else first + policy.unit
                tiers.update(dict.fromkeys(range(first, min(end, session.seq_len[0])), tier))
            maps.append(tiers)
        found.append(maps * (heads // len(maps)))
    return found


def plain(policy: KVPolicy, budget: Budget, each: Stream, loaded: LoadedModel) -> Plain:
    prompt, later = each.parts[0].ids, each.parts[1:]
    num_later = sum(len(part.ids) for part in later)
    fitted = policy.fit(budget, geometry_of(loaded), len(prompt), num_later)
    session = KVSession(loaded, fitted, budget, 1, max_new=num_later, seeds=[f"0/{each.name}"])
    made = Plain([], [], [], {}, torch.empty(0), [], [], 0.0)

    def event() -> None:
        made.events.append(session.seq_len[0])
        usage = session.usage(0)
        made.sizes.append((usage.total, usage.counted["ledger"]))
        trace = session.trace[0]
        made.counts.append((trace.promotions, trace.demotions, trace.evictions))

    def step(num: int) -> None:
        made.tiers.extend([held(session, fitted)] * num)
        made.event_of.extend([len(made.events) - 1] * num)

    session.prefill([prompt])
    event()
    with watching(loaded.model, loaded.compressible_layers) as seen:
        for part in later:
            if part.decoded:
                for done, token in enumerate(part.ids, 1):
                    step(1)
                    made.logits[len(made.tiers) - 1] = session.decode([token])[0]
                    if done % (fitted.cadence.decode_every or 8) == 0:
                        event()
            else:
                step(len(part.ids))
                made.logits[len(made.tiers) - 1] = session.append([part.ids])[0]
                event()
    made.outputs = torch.stack([torch.cat([x[0] for x in seen[layer]]) for layer in loaded.compressible_layers])
    used = [held / whole for held, whole, _ in session.trace[0].decode]
    made.fraction = sum(used) / len(used)
    return made


def check(record: Record, policy: KVPolicy, budget: Budget, each: Stream, loaded: LoadedModel) -> None:
    """Everything of a record, position by position."""
    geometry, full, run = geometry_of(loaded), matrix(loaded.name, each), plain(policy, budget, each, loaded)
    prompt_len, history = len(each.parts[0].ids), record.history
    layers, heads, steps = range(geometry.num_layers), range(geometry.num_kv_heads), range(len(run.tiers))
    layout, last = history.layout, len(run.events)
    assert history.seq_len_K.tolist() == run.events
    assert record.decoded_S.tolist() == [part.decoded for part in each.parts[1:] for _ in part.ids]
    assert history.steps_K.tolist() == [run.event_of.count(k) for k in range(last)]
    mean = full.attention.unflatten(1, (geometry.num_kv_heads, geometry.group_size)).mean(2)  # [L, H, N, N]

    def unit(position: int) -> int:
        if position < layout.offset:
            return 0
        return (position - layout.offset) // layout.unit + (layout.offset > 0)

    def bounds(number: int) -> tuple[int, int]:
        if layout.offset and number == 0:
            return 0, layout.offset
        first = layout.offset + (number - (layout.offset > 0)) * layout.unit
        return first, first + layout.unit

    def competes(number: int, event: int) -> bool:
        first, end = bounds(number)
        return end - first == layout.unit and first >= layout.sink and end <= run.events[event] - layout.recent

    shares = torch.zeros(len(steps), 5)
    mass, oracle = torch.zeros(history.mass_KLHU.shape), torch.zeros(len(steps))
    for s in steps:
        k, seen = run.event_of[s], prompt_len + s + 1
        for layer in layers:
            for head in heads:
                row, tiers = mean[layer, head, prompt_len + s, :seen].tolist(), run.tiers[s][layer][head]
                by_unit: dict[int, float] = {}
                for position, share in enumerate(row):
                    mass[k, layer, head, unit(position)] += share
                    by_unit[unit(position)] = by_unit.get(unit(position), 0.0) + share
                    gone = position < run.events[k] and position not in tiers
                    if gone:
                        kind = 4
                    elif tiers.get(position, FULL) > FULL:
                        kind = 2
                    elif bounds(unit(position))[0] < layout.sink:
                        kind = 0
                    else:
                        kind = 1 if competes(unit(position), k) else 3
                    shares[s, kind] += share / (len(layers) * len(heads))
                gone_units = {unit(p) for p in range(run.events[k]) if p not in tiers}
                whole = [u for u in by_unit if bounds(u)[1] - bounds(u)[0] == layout.unit]
                pool = sorted(by_unit[u] for u in whole if competes(u, k) or u in gone_units)
                missed = sum(pool[: sum(u in gone_units for u in whole)])
                missed += sum(by_unit[u] for u in gone_units if u not in whole)
                oracle[s] += missed / (len(layers) * len(heads))
    close = torch.testing.assert_close
    close(record.shares_S5, shares, atol=2e-5, rtol=0)
    close(record.missed_S, shares[:, 4], atol=2e-5, rtol=0)
    close(record.shares_S5.sum(1), torch.ones(len(steps)), atol=1e-5, rtol=0)
    close(record.oracle_missed_S, oracle, atol=2e-5, rtol=0)
    close(history.mass_KLHU, mass, atol=5e-5, rtol=0)

    for k, seen in enumerate(run.events):  # tiers, by the step that follows the event
        if k not in run.event_of:
            continue
        tiers = run.tiers[run.event_of.index(k)]
        for layer in layers:
            for head in heads:
                found = history.tier_KLTU[k, layer, head % history.tier_KLTU.shape[2]].tolist()
                for number, tier in enumerate(found):
                    first, end = bounds(number)
                    if first < seen and first not in tiers[layer][head]:
                        assert tier == EVICTED
                    else:
                        assert tier == (tiers[layer][head][first] if end <= seen else NOT_YET)

    future = fmm(history)  # by positions: mean over s > t of the mass on what was evicted at t
    for k, seen in enumerate(run.events):
        after = [s for s in steps if run.event_of[s] >= k]
        if not after:
            assert math.isnan(future[k])
            continue
        before, terms = run.tiers[after[0]], []
        for s in after:
            for layer in layers:
                for head in heads:
                    gone = [p for p in range(seen) if p not in before[layer][head]]
                    terms.append(float(mean[layer, head, prompt_len + s, gone].sum()))
        assert float(future[k]) == pytest.approx(sum(terms) / len(terms), abs=2e-5)

    for s in steps:
        if s not in run.logits:
            assert math.isnan(record.kl_S[s])
            assert math.isnan(record.same_S[s])
            continue
        p, q = (x.double().log_softmax(-1) for x in (full.logits[prompt_len + s], run.logits[s]))
        assert float(record.kl_S[s]) == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-5, rel=1e-4)
        assert record.same_S[s] == (p.argmax() == q.argmax())
    expected = full.outputs[:, prompt_len:]
    error = (run.outputs - expected).norm(dim=-1) / expected.norm(dim=-1)
    close(record.output_error_SL.T, error, atol=1e-4, rtol=1e-4)

    assert [(size.total, size.ledger) for size in record.sizes] == run.sizes
    assert record.fraction == pytest.approx(run.fraction)
    found = [tuple(int(x[k]) for x in moves(history)) for k in range(last)]
    assert found == [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise([(0, 0, 0), *run.counts])]


CASES: dict[str, tuple[KVPolicy, Budget]] = {
    "qevict": (QEVICT, Budget("0.4")),
    "qevict_heads": (replace(QEVICT, head_scope="kv_head"), Budget("0.5")),
    "qevict_omega_3": (replace(QEVICT, decode_scores="every_step", omega=3), Budget("0.4")),
    "h2o": (H2O(), Budget("0.4")),
    "streaming_llm": (StreamingLLM(), Budget("0.4")),
    "snapkv": (SnapKV(window=8), Budget("0.4")),
    "snapkv_published": (SnapKV(window=8), Budget("0.4", enforce="prefill")),
    "ragged": (AboveMean(), UNBOUNDED),
    "random": (RandomEviction(unit=3, offset=2), UNBOUNDED),
    "random_tiers": (RandomTiers(unit=3, every=5), UNBOUNDED),
    "zipcache": (ZipCache(gap=8), Budget("0.4")),
    "kivi": (KIVI(group=8, residual=16), UNBOUNDED),
}


@pytest.mark.parametrize("name", CASES)
def test_a_record_is_what_the_full_matrix_says(name: str) -> None:
    """4 layers, 3 KV heads of 2 query heads."""
    policy, budget = CASES[name]
    record = one(policy, budget)
    check(record, policy, budget, stream(1), engine())
    tiers = record.history.tier_KLTU
    assert bool((tiers == EVICTED).any()) == (name not in ("zipcache", "kivi"))
    assert bool((tiers > FULL).any()) == (name in ("zipcache", "kivi", "random_tiers") or name.startswith("qevict"))


@pytest.mark.parametrize("kind", ["gemma3", "qwen3", "llama_wide", "mixtral"])
def test_other_models(kind: str) -> None:
    """Sliding layers are left out; one KV head; heads of 24 dimensions; experts."""
    each = stream(2, ((40, False), (10, True), (5, False), (6, True)))
    record = one(QEVICT, Budget("0.5"), each, family(kind))
    check(record, QEVICT, Budget("0.5"), each, family(kind))
    assert record.history.tier_KLTU.shape[1] == len(family(kind).compressible_layers)


def test_prefill_mass_is_that_of_the_rows_the_method_scores() -> None:
    each, attention = stream(1), matrix("tiny", stream(1)).attention
    prompt = attention[:, :, :61].unflatten(1, (3, 2)).mean(2)  # [L, H, 61, N]
    cases = ((H2O(), 0, 1, 0), (QEVICT, 61 - 8, 4, 3), (StreamingLLM(), 61 - 32, 1, 0))  # the last scores nothing: 32
    for policy, first, unit, offset in cases:
        found = one(policy, Budget("0.4"), each).prefill_LHU
        columns = prompt[:, :, first:].sum(2)
        rest = torch.nn.functional.pad(columns[..., offset:], (0, -(105 - offset) % unit)).unflatten(-1, (-1, unit))
        parts = [columns[..., :offset].sum(-1, keepdim=True)] if offset else []
        torch.testing.assert_close(found, torch.cat([*parts, rest.sum(-1)], dim=-1), atol=1e-4, rtol=1e-4)


def test_prefill_rows_drawn_at_random_are_the_methods_own() -> None:
    """ZipCache's saliency of token i is the same sum, of 2 query heads, divided by 61 - i."""
    record = one(ZipCache(gap=8), Budget("0.4"))
    session = KVSession(engine(), record.policy, Budget("0.4"), 1, max_new=44, seeds=["0/stream-1"])
    session.prefill([stream(1).parts[0].ids])
    saliency = torch.stack([layer.view().columns["saliency"][0, :, :61] for layer in session.layers.values()])
    found = record.prefill_LHU[..., :61] * 2 / (61 - torch.arange(61))
    torch.testing.assert_close(found, saliency, atol=1e-5, rtol=1e-4)


# ---- known methods ----


def test_full_kv_loses_nothing() -> None:
    for loaded in (engine(), family("gemma3")):
        record = one(FullKV(), EVERYTHING, loaded=loaded)
        known = record.kl_S[~record.kl_S.isnan()]
        assert float(known.max()) < 1e-8
        assert bool((record.same_S[~record.same_S.isnan()] == 1).all())
        assert float(record.output_error_SL.max()) < 1e-4
        found = fmm(record.history)
        assert bool((found[:-1] == 0).all())
        assert bool((regret(record.history)[:-1] == 0).all())
        assert float(record.missed_S.max()) == float(record.oracle_missed_S.max()) == 0
        assert record.fraction == 1
        assert churn(record.history).value == 0
        assert lir(record.history.full_KLTU, record.history.candidate_KU).total == 0


def test_everything_quantized_evicts_nothing() -> None:
    policy = replace(QEVICT, evict=False, key_params="static")
    record = one(policy, Budget("0.6"))
    assert float(record.missed_S.max()) == 0
    assert float(record.shares_S5[:, 2].min()) > 0.1
    assert bool((fmm(record.history)[:-1] == 0).all())
    dashed = fmm(record.history, quantized_lost=True)
    assert bool((dashed[:-1] > 0.1).all())
    assert float(record.kl_S[~record.kl_S.isnan()].mean()) > 1e-4


def test_a_known_eviction_gets_the_mass_that_transformers_puts_there() -> None:
    """All but the last 8 tokens of the prompt are gone: positions 0 .. 52."""
    record = one(KeepSuffix(8), UNBOUNDED)
    missed = matrix("tiny", stream(1)).attention[:, :, 61:, :53].sum(-1).mean((0, 1))
    torch.testing.assert_close(record.missed_S, missed, atol=1e-5, rtol=0)
    assert float(fmm(record.history)[0]) == pytest.approx(float(missed.mean()), abs=1e-5)
    fate = needle_fate(record.history, torch.tensor([50, 52, 53, 60]), event=0)
    assert fate == {"full": 0.5, "quantized": 0, "evicted": 0.5}


@dataclass(frozen=True)
class QuantizeRest(KeepSuffix):
    """Quantizes what KeepSuffix evicts."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return qevict().tiers

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        return [
            Placement(torch.where(place.tier_BHU == EVICTED, 1, place.tier_BHU))
            for place in super().place(views, allowance)
        ]


def test_a_hidden_tier_is_as_good_as_evicted() -> None:
    hidden, gone = one(QuantizeRest(8), UNBOUNDED, low_hidden=True), one(KeepSuffix(8), UNBOUNDED)
    torch.testing.assert_close(hidden.kl_S, gone.kl_S, equal_nan=True)
    torch.testing.assert_close(hidden.output_error_SL, gone.output_error_SL)
    torch.testing.assert_close(hidden.shares_S5[:, 2], gone.missed_S)
    assert float(hidden.missed_S.max()) == 0
    seen = one(QuantizeRest(8), UNBOUNDED)
    assert float(seen.output_error_SL.mean()) < 0.5 * float(gone.output_error_SL.mean())


def test_what_is_hidden_collects_no_scores() -> None:
    LOG.clear()
    record = one(Logged(**asdict(QEVICT)), Budget("0.5"), low_hidden=True)
    score, quantized = record.score_KLTU, record.history.quantized_KLTU
    assert score is not None
    known = quantized & ~score.isnan()
    assert int(known.sum()) > 20
    assert float(score[known].abs().max()) == 0
    events = [mass for _, mass in LOG if mass]
    assert all(abs(sum(mass.values()) - round(sum(mass.values()))) < 1e-4 for mass in events)  # all of every query
    seen = one(Logged(**asdict(QEVICT)), Budget("0.5")).score_KLTU
    assert seen is not None
    assert float(seen[known].nanmean()) > 0.1


def test_sink_and_recent_are_the_methods_own_or_given() -> None:
    assert protected_by(QEVICT) == (3, 6)
    assert protected_by(H2O()) == (0, 0)
    assert protected_by(MiKV()) == (0, 0)  # its `recent` is a share
    assert protected_by(RandomEviction(unit=3, offset=2)) == (2, 0)
    record = one(H2O(), Budget("0.4"), protected=lambda policy: Protected(5, 16))
    assert record.history.layout == (1, 0, 5, 16)
    other = one(H2O(), Budget("0.4"))
    torch.testing.assert_close(record.history.tier_KLTU, other.history.tier_KLTU)
    torch.testing.assert_close(record.missed_S, other.missed_S)
    assert float(other.shares_S5[:, 0].max()) == 0
    assert float(record.shares_S5[:, 0].max()) > 0
    assert bool((record.shares_S5[:, 3] > other.shares_S5[:, 3]).all())


def test_protected_bytes() -> None:
    """3 sinks, 6 recent and what is left of the window that has not aged, over 4 layers of 3 heads of 128 bytes."""
    record = one(QEVICT, Budget("0.4"))
    geometry = geometry_of(engine())
    for seen, size in zip(record.history.seq_len_K.tolist(), record.sizes, strict=True):
        aged = max(0, seen - 6 - 3) // 4 * 4
        assert size.protected == geometry.full_bytes(seen - aged)
        assert size.allowed == EVERYTHING.allowed_bytes(geometry, 0, seen, 0) * 2 // 5
        assert size.ledger <= size.total <= size.allowed
    [size, *_] = one(KeepSuffix(8), UNBOUNDED).sizes
    assert size.allowed == size.total


# ---- scores ----


LOG: list[tuple[int, dict[tuple[int, int], float]]] = []  # per call: layer, mass by (table head, first position)


@dataclass(frozen=True)
class Logged(QEvict):
    """Notes what it observes; an empty entry per layer is an event."""

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        mass = mass_BHGPU[0].sum(2).mean(1)  # [H, U]
        mass = mass.mean(0, keepdim=True) if self.head_shared else mass
        places = {(head, pos): i for head, row in enumerate(view.pos_BHU[0].tolist()) for i, pos in enumerate(row)}
        LOG.append((view.layer_idx, {place: float(mass[place[0], i]) for place, i in places.items()}))
        super().observe(view, mass_BHGPU, rows_BP)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        LOG.append((views[0].layer_idx, {}))
        return super().place(views, allowance)


@pytest.mark.parametrize(
    "changes",
    [
        {"decay": 0.5, "aged_score": "mean_candidate"},
        {"head_scope": "kv_head", "decode_scores": "every_step"},
        {"decode_scores": "last_step"},
    ],
)
def test_increments_of_the_methods_own_scores(changes: dict[str, Any]) -> None:
    LOG.clear()
    record = one(Logged(**{**asdict(QEVICT), **changes}), Budget("0.5"))
    score, quantized = record.score_KLTU, record.history.quantized_KLTU
    first = record.history.layout.first_U(record.history.num_units).tolist()
    added: list[dict[int, dict[tuple[int, int], float]]] = []  # per layer and interval, the prefill's first
    for layer in range(4):
        intervals: list[dict[tuple[int, int], float]] = [{}]
        for _, mass in (entry for entry in LOG if entry[0] == layer):
            if not mass:
                intervals.append({})
            for place, share in mass.items():
                intervals[-1][place] = intervals[-1].get(place, 0.0) + share
        added.append(dict(enumerate(intervals[1:])))
    assert score is not None
    assert bool(score[-1].isnan().all())  # no event ends the last interval
    assert bool(quantized[:-1].any())
    for k, layer, head, unit in quantized[:-1].nonzero().tolist():
        expected = added[layer][k][(head, first[unit])]
        assert float(score[k, layer, head, unit]) == pytest.approx(expected, abs=1e-5)


def test_scores_of_methods_that_have_none() -> None:
    assert one(H2O(), Budget("0.4")).score_KLTU is None
    assert one(H2O(), Budget("0.4")).coded_KLHU is None


def rotated(twin: PreTrainedModel, x_HND: Tensor, positions: Tensor) -> Tensor:
    cos, sin = twin.model.rotary_emb(x_HND, positions[None])
    return apply_rotary_pos_emb(x_HND[None], x_HND[None], cos, sin)[0][0]


@cache
def projections(each: Stream) -> tuple[list[Tensor], list[Tensor]]:
    """Queries [HQ, N, D] and keys [H, N, D] before RoPE per layer, as transformers projects them."""
    twin, seen = eager_twin("tiny"), dict[tuple[int, str], Tensor]()
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda module, args, out, place=(index, name): seen.update({place: out[0].unflatten(-1, (-1, 16))})
        )
        for index, layer in enumerate(twin.model.layers)
        for name in ("q_proj", "k_proj")
    ]
    with torch.inference_mode():
        twin(torch.tensor([ids_of(each)]))
    for hook in hooks:
        hook.remove()
    return tuple([seen[layer, name].transpose(0, 1) for layer in range(4)] for name in ("q_proj", "k_proj"))  # type: ignore[return-value]


def coded_group(x_TD: Tensor, bits: int, scale_zero: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """One group of tokens coded per channel and decoded, number by number."""
    out = torch.empty_like(x_TD)
    for channel, values in enumerate(x_TD.T.tolist()):
        if scale_zero is None:
            scale, zero = naive.min_max(values, bits, torch.float32)
        else:
            scale, zero = (float(x[channel]) for x in scale_zero)
        codes = [naive.quantize(value, scale, zero, bits) for value in values]
        out[:, channel] = torch.tensor([naive.dequantize(code, scale, zero, torch.float32) for code in codes])
    return out


@pytest.mark.parametrize("params", ["window", "group:3", "static", "kivi", "zipcache"])
def test_full_kv_over_coded_keys(params: str) -> None:
    """The increments that FullKV's queries give once quantized units are coded: all of it by hand."""
    each, twin, positions = stream(1), eager_twin("tiny"), torch.arange(105)
    policy: KVPolicy = {
        "kivi": KIVI(group=8, residual=16),
        "zipcache": ZipCache(gap=8),
    }.get(params) or replace(QEVICT, key_params=params)
    record = one(policy, UNBOUNDED if params == "kivi" else Budget("0.5"), each, coded_scores=True)
    history, (queries, keys) = record.history, projections(each)
    assert record.coded_KLHU is not None
    assert bool(((history.tier_KLTU > FULL) == ~record.coded_KLHU.isnan()).all())
    unit, offset = history.layout.unit, history.layout.offset
    size = {"group:3": 3, "kivi": 8}.get(params, 1)
    checked = 0
    for k in (0, 3):
        steps = [s for s in range(44) if history.seq_len_K[k] <= 61 + s < history.seq_len_K[k + 1]]
        for layer, head in ((0, 0), (2, 1)):
            tier = history.tier_KLTU[k, layer, head % history.tier_KLTU.shape[2]]
            raw = keys[layer][head]
            stored = rotated(twin, raw[None], positions)[0]
            source = stored.clone() if params in ("kivi", "zipcache") else raw.clone()
            coded = stored.clone()
            for low in sorted(set(tier[tier > FULL].tolist())) if params == "zipcache" else [None]:
                units = (tier > FULL if low is None else tier == low).nonzero()[:, 0].tolist()
                groups = [units[i : i + size] for i in range(0, len(units), size)]
                groups = [units] if params == "zipcache" else groups
                bits = 4 if params == "zipcache" and low == 1 else 2
                for group in groups:
                    first = [offset + (number - (offset > 0)) * unit for number in group]
                    at = torch.tensor([position for begin in first for position in range(begin, begin + unit)])
                    reference = None
                    if params == "static":
                        pairs = [naive.min_max(values, 2, torch.float32) for values in raw[:61].T.tolist()]
                        scales, zeros = zip(*pairs, strict=True)
                        reference = (torch.tensor(scales), torch.tensor(zeros))
                    back = coded_group(source[at], bits, reference)
                    coded[at] = back if params in ("kivi", "zipcache") else rotated(twin, back[None], at)[0]
            expected = torch.zeros(history.num_units)
            for s in steps:
                seen = 61 + s + 1
                for mate in (0, 1):
                    query = rotated(twin, queries[layer][2 * head + mate][None], positions)[0][61 + s]
                    shares = (coded[:seen] @ query / 4).softmax(-1)
                    for position, share in enumerate(shares.tolist()):
                        number = int(history.layout.unit_of(torch.tensor(position)))
                        expected[number] += share / 2
            where = tier > FULL
            torch.testing.assert_close(record.coded_KLHU[k, layer, head][where], expected[where], atol=1e-4, rtol=1e-3)
            checked += int(where.sum())
    assert checked > 20
    coded_scores = record.coded_KLHU.mean(2, keepdim=True) if history.tier_KLTU.shape[2] == 1 else record.coded_KLHU
    arguments = (history.scoped_mass_KLTU, history.tier_KLTU > FULL, history.k_full_KLT, 0)
    assert score_agreement(coded_scores, *arguments).measured.cosine.value > 0.9


# ---- streams ----


def same(first: Record, second: Record, atol: float = 2e-5) -> None:
    for field in fields(Record):
        one, other = getattr(first, field.name), getattr(second, field.name)
        if isinstance(one, History):
            for part in fields(History):
                mine, theirs = getattr(one, part.name), getattr(other, part.name)
                if part.name == "layout":
                    assert mine == theirs
                else:
                    torch.testing.assert_close(mine, theirs, atol=atol, rtol=1e-4)
        elif isinstance(one, Tensor):
            torch.testing.assert_close(one, other, atol=atol, rtol=1e-3, equal_nan=True)
        else:
            assert one == pytest.approx(other) if isinstance(one, float) else one == other


@pytest.mark.parametrize(
    "name", ["qevict", "qevict_heads", "h2o", "streaming_llm", "ragged", "random_tiers", "zipcache"]
)
def test_rows_of_a_batch_are_what_they_are_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and questions of different lengths; the last stream has another form and runs apart."""
    policy, budget = CASES[name]
    forms = (FORM, ((90, False), (21, True), (4, False), (14, True)), ((48, False), (9, True), (3, False), (7, True)))
    streams = [stream(seed, form) for seed, form in enumerate(forms)]
    prefilled: list[int] = []
    original = KVSession.prefill
    monkeypatch.setattr(
        KVSession,
        "prefill",
        lambda self, prompts, chunk: prefilled.append(len(prompts)) or original(self, prompts, chunk),
    )
    together = observe_streams(engine(), policy, budget, streams, seed=0, coded_scores=name == "qevict")
    assert [record.name for record in together] == [each.name for each in streams]
    assert prefilled[0] == 2 or name == "zipcache"  # whose interval depends on the length
    for record, each in zip(together, streams, strict=True):
        same(one(policy, budget, each, coded_scores=name == "qevict"), record)


def test_chunks_of_the_prefill_change_nothing() -> None:
    same(one(QEVICT, Budget("0.4")), one(QEVICT, Budget("0.4"), prefill_chunk=7))


def test_scoring_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts are scored in row blocks."""
    policy = replace(QEVICT, prefill_scores="all")
    whole = one(policy, Budget("0.4"), coded_scores=True)
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * 6 * 70 * 3)
    same(whole, one(policy, Budget("0.4"), coded_scores=True))


def test_methods_without_decode_events() -> None:
    """Intervals are of 8 tokens, and only aging shows in the tiers."""
    record = one(SnapKV(window=8), Budget("0.4", enforce="prefill"))
    history = record.history
    assert history.seq_len_K.tolist() == [61, 69, 77, 91, 99]
    assert history.steps_K.tolist() == [8, 8, 5 + 9, 8, 6]
    assert [int(each) for each in moves(history).evictions_K[1:]] == [0] * 4
    begun = history.tier_KLTU != NOT_YET
    assert begun.sum((1, 2, 3)).tolist() == [4 * 3 * seen for seen in history.seq_len_K.tolist()]
    assert churn(history).value == 0


def test_a_stream_that_ends_with_an_event() -> None:
    each = stream(3, ((40, False), (16, True)))
    record = one(SnapKV(window=8), Budget("0.6"), each)
    assert record.history.steps_K.tolist() == [8, 8, 0]
    assert fmm(record.history).isnan().tolist() == [False, False, True]
    check(record, SnapKV(window=8), Budget("0.6"), each, engine())


def test_half_precision() -> None:
    loaded = ModelSpec("tiny", "tiny", device="cpu", dtype="bfloat16").load(attention.register())
    record = one(FullKV(), EVERYTHING, loaded=loaded)
    torch.testing.assert_close(record.shares_S5.sum(1), torch.ones(44), atol=1e-5, rtol=0)
    assert float(record.kl_S[~record.kl_S.isnan()].max()) < 0.05  # the two sides round differently
    record = one(QEVICT, Budget("0.4"), loaded=loaded, coded_scores=True)
    assert float(record.missed_S.mean()) > 0
    assert not bool(record.output_error_SL.isnan().any())


def test_nothing_stays_behind_in_the_model() -> None:
    model, before = engine().model, dict(vars(KVSession))
    one(QEVICT, Budget("0.4"), coded_scores=True)
    assert vars(KVSession) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (Part((1, 2), False),),
        (Part((1, 2), True), Part((3,), True)),
        (Part((1, 2), False), Part((), True)),
    ],
)
def test_streams_that_are_none(parts: tuple[Part, ...]) -> None:
    with pytest.raises(ValueError, match="stream x: give a part"):
        Stream("x", parts)


def test_too_long_a_stream() -> None:
    with pytest.raises(ValueError, match="stream-1 has 61 tokens; with 44 new ones it must fit"):
        one(QEVICT, Budget("0.4"), loaded=replace(engine(), max_context=104))


def test_continuation_of_full_kv() -> None:
    """Greedy tokens of transformers; an end of text among them does not end them."""
    prompts = [random_ids(20, 5), random_ids(33, 6)]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):
            with torch.inference_mode():
                ids.append(int(eager_twin("tiny")(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(tuple(ids[len(prompt) :]))
    loaded = around(engine().model, "tiny", eos_ids=(expected[0][3],))
    assert full_kv_continuation(loaded, prompts, 12) == expected
    assert full_kv_continuation(loaded, prompts, 1, prefill_chunk=8) == [tokens[:1] for tokens in expected]
