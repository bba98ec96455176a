"""Eviction baselines against the loops of naive_eviction.py, the published vectors, and what kvpress keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import naive
import naive_eviction as oracle
import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from script_modules import script
from tiny_models import around, attentions, eager, engine, family, kept, random_ids
from torch import Tensor
from transformers import PreTrainedModel

from methods.adakv import AdaKV
from methods.criticalkv import CriticalKV
from methods.defensivekv import DefensiveKV
from methods.full_kv import FullKV
from methods.h2o import H2O
from methods.pyramidkv import PyramidKV
from methods.random import Random
from methods.snapkv import SnapKV
from methods.streaming_llm import StreamingLLM
from methods.tova import TOVA
from qevict_bench import attention
from qevict_bench.budget import Budget, Infeasible
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy, LayerView
from qevict_bench.scoring import Voting, add_votes, covering, defensive_peak, mean_floor, projected_norms, settle_votes
from qevict_bench.selection import (
    best_across,
    blended_counts,
    level,
    pyramid,
    pyramid_inside,
    rank_preferred,
    safe_counts,
    share_of,
)
from qevict_bench.session import KVSession, geometry_of

ROOT = Path(__file__).parents[1]
LENGTH, WINDOW, NEW, LAYERS, HEADS = 63, 5, 24, 4, 3
Sets = list[list[set[int]]]  # kept positions per layer and KV head


def own(layer: int, head: int) -> list[list[list[float]]]:
    """Attention of the two query heads of a KV head."""
    return attentions(LENGTH, 3)[layer][2 * head : 2 * head + 2]


@cache
def norms() -> list[list[oracle.Table]]:
    """Mean L1 norm of every prompt value through its query heads' part of the output projection."""
    found: list[list[oracle.Table]] = []
    for decoder in eager().model.layers:
        made: list[Tensor] = []
        handle = decoder.self_attn.v_proj.register_forward_hook(lambda _m, _i, out, made=made: made.append(out[0]))
        with torch.inference_mode():
            eager()(torch.tensor([random_ids(LENGTH, 3)]))
        handle.remove()
        weight = decoder.self_attn.o_proj.weight
        heads = []
        for head in range(HEADS):
            parts = [weight[:, 16 * q : 16 * q + 16].T.tolist() for q in (2 * head, 2 * head + 1)]
            values = made[0][:, 16 * head : 16 * head + 16].tolist()
            heads.append(dict(enumerate(oracle.value_norms(values, parts))))
        found.append(heads)
    return found


def norms_of_decoded(session: KVSession, found: list[list[oracle.Table]]) -> None:
    """Add the norms of stored tokens that `found` lacks, from the values that the session holds."""
    for layer, heads in enumerate(positions(session)):
        weight, store = eager().model.layers[layer].self_attn.o_proj.weight, session.layers[layer].full
        for head, stored in enumerate(heads):
            parts = [weight[:, 16 * q : 16 * q + 16].T.tolist() for q in (2 * head, 2 * head + 1)]
            for slot, j in enumerate(sorted(stored)):
                if j not in found[layer][head]:
                    value = store.v[store.start[head] + slot].tolist()
                    [found[layer][head][j]] = oracle.value_norms([value], parts)


def positions(session: KVSession, row: int = 0) -> Sets:
    """Positions below seq_len that every layer and KV head keeps."""
    seen = session.seq_len[row]
    sets = [[{p for p, _ in head if p < seen} for head in layer] for layer in kept(session, row)]
    return [layer * (HEADS if len(layer) == 1 else 1) for layer in sets]


def slots(policy: KVPolicy, budget: Budget, seen: int, share: int = 1, every: int | None = None) -> int:
    """Seen tokens over all KV heads that 1 / share of the budget pays for, with their table entries and the room."""
    geometry = geometry_of(engine())
    allowed = (budget.allowed_bytes(geometry, LENGTH, seen, NEW) or 0) // share
    tables = 1 if policy.head_shared else HEADS
    slot = geometry.slot_bytes * (HEADS // tables) + policy.entry_bytes
    room = policy.cadence.decode_every if every is None else every
    return (allowed - room * tables * (LAYERS // share) * slot) // slot


class Mass(NamedTuple):
    """What one decoded query of one layer and KV head put on the stored positions, per query head."""

    layer: int
    head: int
    query: int
    on: dict[int, list[float]]


def spied(policy: KVPolicy) -> tuple[KVPolicy, list[Mass]]:
    """The same policy; records the attention of every row it observes after the prompt."""
    seen: list[Mass] = []
    base: type[KVPolicy] = type(policy)

    class Spied(base):  # type: ignore[misc, valid-type]
        name = policy.name

        def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
            super().observe(view, mass_BHGPU, rows_BP)
            if int(rows_BP[0, 0]) < LENGTH:
                return
            for head in range(HEADS):
                at = view.pos_BHU[0, head if view.pos_BHU.shape[1] > 1 else 0].tolist()
                for p, query in enumerate(rows_BP[0].tolist()):
                    mass = mass_BHGPU[0, head, :, p].T.tolist()
                    on = {j: m for j, m in zip(at, mass, strict=True) if 0 <= j <= query}
                    seen.append(Mass(view.layer_idx, head, query, on))

    return Spied(**{name: getattr(policy, name) for name in (field.name for field in dataclasses.fields(policy))}), seen


Decide = Callable[[Sets, list[Mass], KVSession], Sets]


def follow(policy: KVPolicy, budget: Budget, decide: Decide) -> None:
    """Run prompt and decoding; at every event the kept sets must be what `decide(stored, new masses, session)` says."""
    fitted, masses = spied(policy.fit(budget, geometry_of(engine()), LENGTH, NEW))
    session = KVSession(engine(), fitted, budget, 1, max_new=NEW)
    session.prefill([random_ids(LENGTH, 3)], 17)
    held = positions(session)
    assert held == decide([[set(range(LENGTH))] * HEADS] * LAYERS, [], session)
    every, evicted = fitted.cadence.decode_every, 0
    for step in range(NEW):
        session.decode([100 + step])  # no token of the prompt: equal values of layer 0 would tie
        if (step + 1) % every:
            continue
        seen = LENGTH + step + 1
        stored = [[head | set(range(seen - every, seen)) for head in layer] for layer in held]
        held = positions(session)
        assert held == decide(stored, masses, session)
        evicted += sum(len(a - b) for x, y in zip(stored, held, strict=True) for a, b in zip(x, y, strict=True))
        masses.clear()
    assert evicted > 0
    assert all(used <= allowed for used, _, allowed in session.trace[0].decode)


def voted(table: list[list[oracle.Table]], masses: list[Mass]) -> None:
    """Add the mean over query heads of decoded attention."""
    for mass in masses:
        votes = table[mass.layer][mass.head]
        for j, x in mass.on.items():
            votes[j] = votes.get(j, 0.0) + sum(x) / len(x)


def prompt_votes(kernel: int, pooling: str, window: int = WINDOW) -> list[list[oracle.Table]]:
    return [
        [
            dict(enumerate(naive.snapkv_votes(own(layer, head), LENGTH, window, kernel, pooling, "mean")))
            for head in range(HEADS)
        ]
        for layer in range(LAYERS)
    ]


def competing(table: oracle.Table, stored: set[int], seen: int, window: int = WINDOW) -> oracle.Table:
    return {j: table.get(j, 0.0) for j in sorted(stored) if j < seen - window}


def newest(seen: int, window: int = WINDOW) -> set[int]:
    return set(range(seen - window, seen))


# ---- SnapKV, AdaKV, CriticalKV, PyramidKV ----


@pytest.mark.parametrize("spec", ["0.4", "0.6"])
@pytest.mark.parametrize("mode", ["blend", "floor"])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_adakv_divides_a_layer_among_its_heads(mode: str, alpha: float, spec: str) -> None:
    budget, votes = Budget(spec), prompt_votes(3, "max")
    policy = AdaKV(window=WINDOW, kernel=3, mode=mode, alpha=alpha)

    def decide(stored: Sets, masses: list[Mass], session: KVSession) -> Sets:
        seen = session.seq_len[0]
        voted(votes, masses)
        total = slots(policy, budget, seen, LAYERS) - HEADS * WINDOW
        found = []
        for layer, heads in enumerate(stored):
            tables = [competing(votes[layer][head], heads[head], seen) for head in range(HEADS)]
            sets = oracle.adakv(tables, total, WINDOW, str(alpha), mode)
            assert sum(map(len, sets)) == total
            found.append([one | newest(seen) for one in sets])
        return found

    follow(policy, budget, decide)


@pytest.mark.parametrize("over", ["snapkv", "adakv"])
@pytest.mark.parametrize(
    ("ratio", "eps", "alpha", "window"), [(0.5, 1e-4, 0.2, 8), (0.0, 0.0, 0.8, 8), (1.0, 1e-4, 0.2, 11)]
)
def test_criticalkv_weighs_votes_with_projected_values(
    over: str, ratio: float, eps: float, alpha: float, window: int
) -> None:
    """The window covers an interval, so that a token's value is still held after the event that takes its norm."""
    budget, votes, norm = Budget("0.6"), prompt_votes(5, "avg", window), [list(map(dict, heads)) for heads in norms()]
    policy = CriticalKV(window=window, over=over, first_stage_ratio=ratio, eps=eps, alpha=alpha)

    def decide(stored: Sets, masses: list[Mass], session: KVSession) -> Sets:
        seen = session.seq_len[0]
        voted(votes, masses)
        norms_of_decoded(session, norm)
        total = slots(policy, budget, seen, LAYERS) - HEADS * window
        found = []
        for layer, heads in enumerate(stored):
            tables = [competing(votes[layer][head], heads[head], seen, window) for head in range(HEADS)]
            tables = [{j: s / window for j, s in table.items()} for table in tables]
            sets = oracle.criticalkv(tables, norm[layer], total, window, over, str(alpha), str(ratio), eps)
            found.append([one | newest(seen, window) for one in sets])
            if ratio == 1:  # stage 1 alone is the base method
                base = oracle.adakv(tables, total, window, str(alpha), "floor")
                assert sets == (base if over == "adakv" else [oracle.best(t, total // HEADS) for t in tables])
        return found

    follow(policy, budget, decide)


@pytest.mark.parametrize("shape", ["official", "kvpress"])
@pytest.mark.parametrize("spec", ["0.3", "0.6"])
def test_pyramidkv_gives_lower_layers_more(shape: str, spec: str) -> None:
    budget, votes = Budget(spec), prompt_votes(3, "max")
    policy = PyramidKV(window=WINDOW, kernel=3, shape=shape, beta=3)
    sizes: list[list[int]] = []

    def decide(stored: Sets, masses: list[Mass], session: KVSession) -> Sets:
        seen = session.seq_len[0]
        voted(votes, masses)
        total = slots(policy, budget, seen) // HEADS - LAYERS * WINDOW
        if shape == "official":
            counts = oracle.pyramid_official(total // LAYERS + WINDOW, WINDOW, LAYERS, seen, 3)
        else:
            counts = oracle.pyramid_kvpress(total // LAYERS + WINDOW, WINDOW, LAYERS, seen, 3)
        available = [len(layer[0]) - WINDOW for layer in stored]
        counts = oracle.spread([n - WINDOW for n in counts], available, total)
        sizes.append(counts)
        return [
            [oracle.best(competing(votes[i][head], layer[head], seen), n) | newest(seen) for head in range(HEADS)]
            for i, (layer, n) in enumerate(zip(stored, counts, strict=True))
        ]

    follow(policy, budget, decide)
    assert all(counts == sorted(counts, reverse=True) for counts in sizes)
    assert len(set(sizes[0])) > 1 or spec == "0.6"  # half of the prompt and more: uniform, as published


@pytest.mark.parametrize("order", ["reduce_first", "pool_first"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_snapkv_merges_query_heads_before_or_after_pooling(order: str, reduce: str, pooling: str) -> None:
    budget = Budget("native")
    policy = SnapKV(window=WINDOW, kernel=3, pooling=pooling, group_reduce=reduce, order=order, native_tokens=25)
    session = KVSession(engine(), policy.fit(budget, geometry_of(engine()), LENGTH, 8), budget, 1, max_new=8)
    session.prefill([random_ids(LENGTH, 3)], 19)
    for layer, sets in enumerate(positions(session)):
        for head, found in enumerate(sets):
            if order == "reduce_first":
                votes = naive.snapkv_votes(own(layer, head), LENGTH, WINDOW, 3, pooling, reduce)
            else:
                each = [naive.snapkv_votes([q], LENGTH, WINDOW, 3, pooling, "mean") for q in own(layer, head)]
                votes = [max(v) if reduce == "max" else sum(v) / 2 for v in zip(*each, strict=True)]
            table = competing(dict(enumerate(votes)), set(range(LENGTH)), LENGTH)
            assert found == oracle.best(table, 20) | newest(LENGTH)


def test_max_pooling_and_the_group_mean_do_not_commute() -> None:
    heads = torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    for order, expected in (("reduce_first", [0.5, 0.5, 0.5]), ("pool_first", [1.0, 1.0, 0.5])):
        voting = Voting(3, "max", "mean", order)
        votes = [torch.zeros(1, 1, 3) for _ in voting.columns(2)]
        add_votes(votes, heads[None, None, :, None])
        score = settle_votes(votes, torch.tensor([True]), torch.zeros(1, 1, 3, dtype=torch.bool), voting)
        assert score.flatten().tolist() == expected
        again = settle_votes(votes, torch.tensor([False]), torch.zeros(1, 1, 3, dtype=torch.bool), voting)
        assert torch.equal(again, score)  # pooled once


def counted(counts: list[int], num: int) -> tuple[Tensor, Tensor]:
    """Scores of heads of which `counts` are among the best sum(counts), and everybody a candidate."""
    rows = [[1.0 - i / 100 if i < n else i / 1e6 for i in range(num)] for n in counts]
    score = torch.tensor([rows])
    return score, torch.ones_like(score, dtype=torch.bool)


@pytest.mark.parametrize(
    ("counts", "base", "alpha", "blend", "floor"),
    [
        ((4, 16), 10, 0.2, [5, 15], [4, 16]),
        ((4, 16), 10, 0.0, [4, 16], [4, 16]),
        ((4, 16), 10, 1.0, [10, 10], [10, 10]),
        ((1, 3), 2, 0.5, [2, 2], [1, 3]),  # halves to even: 1.5 and 2.5
        ((1, 3), 2, 0.2, [1, 2], [1, 3]),  # rounding loses a token: the exact total gives it back
    ],
)
def test_adakv_vectors(counts: tuple[int, ...], base: int, alpha: float, blend: list[int], floor: list[int]) -> None:
    score, every = counted(list(counts), 30)
    total = torch.tensor([base * len(counts)])
    assert blended_counts(score, every, total, alpha).tolist() == [blend]
    safe = safe_counts(total, len(counts), alpha, torch.tensor([0]))
    order = score.argsort(-1, descending=True).argsort(-1)
    [kept_BHU] = best_across([score], [every], [order < safe[..., None]], total)
    assert kept_BHU.sum(-1).tolist() == [floor]
    [exact] = best_across([score], [every], [order < torch.tensor(blend)[:, None]], total)
    assert int(exact.sum()) == int(total)


def test_adakv_floor_counts_the_window_as_safe() -> None:
    """kvpress at 20 %, window 64: 99 prefix tokens of 4096 are safe per head, none of 1000."""
    for length, expected in ((4096, 99), (1000, 0)):
        num = int(length * (1 - 0.8)) - 64
        assert safe_counts(torch.tensor([3 * num]), 3, 0.2, torch.tensor([64])).tolist() == [[expected] * 3]


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(0, 40),
    st.sampled_from(["0", "0.05", "0.2", "0.5", "1"]),
)
@settings(max_examples=80, deadline=None)
def test_head_budgets_are_the_transcribed_ones(scores: list[list[int]], total: int, alpha: str) -> None:
    """Many ties: they go to the earlier head, then position."""
    score = torch.tensor([scores], dtype=torch.float32)
    every = torch.ones_like(score, dtype=torch.bool)
    tables = [dict(enumerate(map(float, row))) for row in scores]
    num = torch.tensor([total])
    blend = blended_counts(score, every, num, float(alpha))
    assert blend.tolist() == [oracle.adakv_blend(tables, total, alpha)]
    ranked = rank_preferred(score, every, torch.zeros_like(every))
    [found] = best_across([score], [every], [ranked < blend[..., None]], num)
    assert [set(row.nonzero()[:, 0].tolist()) for row in found[0]] == oracle.adakv(tables, total, 0, alpha, "blend")


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_preferred_units_rank_before_all_others(units: list[tuple[int, bool, bool]]) -> None:
    score, candidate, preferred = (torch.tensor([[list(x)]]) for x in zip(*units, strict=True))
    found = rank_preferred(score.float(), candidate, preferred)[0, 0].tolist()
    order = sorted((u for u, x in enumerate(units) if x[1]), key=lambda u: (not units[u][2], -units[u][0], u))
    assert found == [order.index(u) if units[u][1] else len(units) for u in range(len(units))]


def test_share_of_takes_the_decimal_as_written() -> None:
    assert [int(share_of(torch.tensor(n), 0.29)) for n in (100, 200, 1000)] == [29, 58, 290]  # not int(0.29 * 100) = 28


def test_criticalkv_vectors() -> None:
    s, n = {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 10.0}
    assert oracle.criticalkv([s], [n], 2, 0, "snapkv", "0", "0.5", 1e-4) == [{0, 3}]
    score, norm = torch.tensor([[[4.0, 3, 2, 1]]]), torch.tensor([[[1.0, 1, 1, 10]]])
    every = torch.ones_like(score, dtype=torch.bool)

    def both(first: int, norm: Tensor) -> set[int]:
        stage_1 = rank_preferred(score, every, ~every) < first
        ranks = rank_preferred((score + 1e-4) * norm, every, stage_1)
        return set((ranks[0, 0] < 2).nonzero()[:, 0].tolist())

    assert both(1, norm) == {0, 3}
    assert both(2, norm) == both(1, torch.ones_like(norm)) == {0, 1}


def test_projected_norms_are_the_transcribed_ones() -> None:
    value = torch.randn(3, 7, 4)
    w_o = torch.randn(10, 3 * 2 * 4)
    for head in range(3):
        parts = [w_o[:, 4 * q : 4 * q + 4].T.tolist() for q in (2 * head, 2 * head + 1)]
        expected = oracle.value_norms(value[head].tolist(), parts)
        assert projected_norms(value, w_o)[head].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("cap", "window", "layers", "excess"), [(128, 8, 32, 0.046), (1024, 32, 32, 0.013), (2048, 8, 32, 0.0002)]
)
def test_pyramid_vectors(cap: int, window: int, layers: int, excess: float) -> None:
    base = cap - window
    found = pyramid(base, layers, 100_000, window, 20)
    assert found == [n - window for n in oracle.pyramid_official(cap, window, layers, 100_000, 20)]
    assert sum(found) / (base * layers) - 1 == pytest.approx(excess, abs=0.0006)
    assert found == sorted(found, reverse=True)
    if cap == 128:
        assert found == [234 - 7 * layer for layer in range(32)]
        assert sum(found) == 4016
    assert sum(level(found, [100_000] * layers, base * layers)) == base * layers
    assert pyramid(base, 1, 100_000, window, 20) == [base]


def test_kvpress_pyramid_is_uniform_on_short_prompts() -> None:
    """At 20 % with a window of 64 it is SnapKV up to 6400 tokens."""
    for length in (600, 6395, 6400, 6405, 20000):
        tokens = length // 5
        found = pyramid_inside(tokens, 8, length, 64, 20)
        assert (found == [tokens] * 8) == (length < 6400)
        assert found == oracle.pyramid_kvpress(length * 0.2, 64, 8, length, 20)


@given(st.lists(st.tuples(st.integers(-3, 30), st.integers(0, 25)), min_size=1, max_size=6), st.integers(0, 120))
@settings(max_examples=100, deadline=None)
def test_level_moves_counts_evenly(layers: list[tuple[int, int]], total: int) -> None:
    counts, available = (list(x) for x in zip(*layers, strict=True))
    assert level(counts, available, total) == oracle.spread(counts, available, total)


# ---- DefensiveKV ----


@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("bias", ["as_coded", "as_intended"])
@pytest.mark.parametrize("threshold", [0.9, 0.5])
def test_defensivekv_defends_against_the_worst_query(scope: str, bias: str, threshold: float) -> None:
    """Every layer's bytes are exact, or those of all layers. Decoded queries count where they look far back."""
    budget, window, norm = Budget("0.6"), 8, [list(map(dict, heads)) for heads in norms()]
    policy = DefensiveKV(window=window, kernel=3, bias=bias, scope=scope, threshold=threshold)
    every = [[own(layer, head) for head in range(HEADS)] for layer in range(LAYERS)]
    peaks = [[oracle.defensive_peaks(a, LENGTH, window, 3) for a in heads] for heads in every]
    mass = [[oracle.mean_attention(a, LENGTH, window) for a in heads] for heads in every]

    def decide(stored: Sets, masses: list[Mass], session: KVSession) -> Sets:
        seen = session.seq_len[0]
        for one in masses:
            peak, held = peaks[one.layer][one.head], mass[one.layer][one.head]
            for j in [j for j in one.on if j <= one.query - window]:
                peak[j] = max(peak.get(j, 0.0), *one.on[j])
                held[j] = held.get(j, 0.0) + sum(one.on[j]) / 2
        norms_of_decoded(session, norm)
        share = 1 if scope == "model" else LAYERS
        total = slots(policy, budget, seen, share) - HEADS * window * (LAYERS // share)
        most = total // (HEADS * (LAYERS // share))
        tables: list[list[oracle.Table]] = []
        for layer, heads in enumerate(stored):
            kept_mass = [{j: x for j, x in mass[layer][h].items() if j in heads[h]} for h in range(HEADS)]
            reach = threshold - oracle.defensive_bias(kept_mass, seen, window, bias)
            for held in mass[layer]:  # what the prompt's queries put on their own window counts for the bias only
                held.update({j: 0.0 for j in held if j >= seen - window})
            sums = {j: sum(norm[layer][h].get(j, 0.0) for h in range(HEADS)) for j in set[int]().union(*heads)}
            ratios = [{j: norm[layer][h][j] / sums[j] for j in heads[h]} for h in range(HEADS)]
            parts = (peaks[layer], mass[layer], ratios)
            cut = [[competing(part[h], heads[h], seen, window) for h in range(HEADS)] for part in parts]
            tables.append(oracle.defensive_scores(cut[0], cut[1], cut[2], reach, most))
        if scope == "model":
            flat = oracle.best_of_all([table for heads in tables for table in heads], total)
            found = [flat[HEADS * layer : HEADS * layer + HEADS] for layer in range(LAYERS)]
        else:
            found = [oracle.best_of_all(heads, total) for heads in tables]
        assert sum(len(head) for layer in found for head in layer) == total * share
        return [[head | newest(seen, window) for head in layer] for layer in found]

    follow(policy, budget, decide)


@given(st.lists(st.lists(st.floats(1 / 64, 1, width=32), min_size=9, max_size=9), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_pooled_rows_keep_their_mass(rows: list[list[float]]) -> None:
    """Edges lose mass to the padding; the rescaled row has it back. Three observed rows, prefix of 6."""
    attention = [[[0.0] * 9] * 6 + [row] * 3 for row in rows]
    mass = torch.tensor(rows)[None, None, :, None].expand(-1, -1, -1, 3, -1)
    inside = (torch.arange(9) < 6)[None, None, None].expand(1, 1, 3, 9)
    expected = oracle.defensive_peaks(attention, 9, 3, 5)
    found = defensive_peak(mass, inside, 5).flatten().tolist()
    assert found == pytest.approx([*expected.values(), 0.0, 0.0, 0.0], rel=1e-4)


def test_defensivekv_vectors() -> None:
    """One query head, no pooling: worst of two queries, raised to its mean."""
    rows = torch.tensor([[0.6, 0.1, 0.1, 0.2], [0.1, 0.7, 0.1, 0.1]])
    inside = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    peak = defensive_peak(rows[None, None, None], inside, 1)
    assert peak.flatten().tolist() == pytest.approx([0.6, 0.7, 0.1, 0.2])
    raised = mean_floor(peak, inside[:, :, 0])
    assert raised.flatten().tolist() == pytest.approx([0.6, 0.7, 0.4, 0.4])
    one = defensive_peak(rows[None, None, None, :1], inside[:, :, :1], 1)
    assert one.flatten().tolist() == pytest.approx(rows[0].tolist())


def test_stage_1_leaves_out_the_token_that_reaches_the_threshold() -> None:
    mass = torch.tensor([[[5.0, 3.0, 1.0, 1.0], [1.0, 1.0, 1.0, 7.0]]])
    every = torch.ones_like(mass, dtype=torch.bool)
    for share, expected in ((0.9, [2, 2]), (0.75, [1, 1]), (0.4, [0, 0]), (0.0, [0, 0])):
        assert covering(mass, every, torch.tensor([share])).tolist() == [expected]
    assert covering(torch.zeros_like(mass), every, torch.tensor([0.9])).tolist() == [[0, 0]]


def test_defensivekv_counts_far_tokens_of_decoded_queries() -> None:
    """A decoded query's local attention is no evidence: a fresh token would defend itself."""
    budget = Budget("0.6")
    policy, masses = spied(DefensiveKV(window=WINDOW).fit(budget, geometry_of(engine()), LENGTH, NEW))
    session = KVSession(engine(), policy, budget, 1, max_new=NEW)
    session.prefill([random_ids(LENGTH, 3)])
    before = [dict(zip(*column(session, layer, "peak"), strict=True)) for layer in range(LAYERS)]
    for step in range(8):
        session.decode([step + 1])
    assert {mass.query for mass in masses} == set(range(LENGTH, LENGTH + 8))
    for layer in range(LAYERS):
        for (head, j), peak in zip(*column(session, layer, "peak"), strict=True):
            rows = [m for m in masses if (m.layer, m.head) == (layer, head) and j in m.on and j <= m.query - WINDOW]
            expected = max([before[layer].get((head, j), 0.0), *(max(m.on[j]) for m in rows)])
            assert peak == pytest.approx(expected, rel=1e-5)


def column(session: KVSession, layer: int, name: str) -> tuple[list[tuple[int, int]], list[float]]:
    """(head, position) and value of a ledger column, of seen tokens."""
    view, found = session.layers[layer].view(), ([], [])
    for head in range(HEADS):
        for j, x in zip(view.pos_BHU[0, head].tolist(), view.columns[name][0, head].tolist(), strict=True):
            if 0 <= j < session.seq_len[0]:
                found[0].append((head, j))
                found[1].append(x)
    return found


# ---- H2O, TOVA, random ----


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_h2o_keeps_heavy_hitters_and_the_newest(share: float) -> None:
    """Evicts at every token; a kept token's sum carries on, an evicted one never returns."""
    budget = Budget("0.4")
    policy = H2O(recent_share=share)
    sums = [[oracle.h2o_sums(own(layer, head)) for head in range(HEADS)] for layer in range(LAYERS)]

    def decide(stored: Sets, masses: list[Mass], session: KVSession) -> Sets:
        seen = session.seq_len[0]
        for mass in masses:
            for j, x in mass.on.items():
                sums[mass.layer][mass.head][j] = sums[mass.layer][mass.head].get(j, 0.0) + sum(x)
        num = slots(policy, budget, seen, LAYERS) // HEADS
        recent = int(num * Fraction(str(share)))
        found = []
        for layer, heads in enumerate(stored):
            # recency counts tokens seen: a newest token is always stored
            tables = [{j: sums[layer][head][j] for j in heads[head]} for head in range(HEADS)]
            found.append([oracle.h2o_kept(table, num, recent) for table in tables])
        return found

    follow(policy, budget, decide)


def test_h2o_sums_to_its_queries() -> None:
    policy = H2O().fit(Budget("1.0"), geometry_of(engine()), LENGTH, NEW)
    session = KVSession(engine(), policy, Budget("1.0"), 1, max_new=NEW)
    session.prefill([random_ids(LENGTH, 3)], 20)
    for step in range(3):
        session.decode([step + 1])
    for layer in session.layers.values():
        heavy_BH = layer.view().columns["heavy"].sum(-1)
        torch.testing.assert_close(heavy_BH, torch.full((1, HEADS), 2.0 * (LENGTH + 3)))


def test_h2o_vectors() -> None:
    """Uniform causal attention over 4 tokens favours the first: heavy 1 + recent 1 keep 0 and 3."""
    uniform = [[1 / (i + 1) if j <= i else 0.0 for j in range(4)] for i in range(4)]
    sums = oracle.h2o_sums([uniform])
    assert [round(sums[j], 3) for j in range(4)] == [2.083, 1.083, 0.583, 0.25]
    assert oracle.h2o_kept(sums, 2, 1) == {0, 3}
    model = family("llama")
    equal = replace(model, model=_without_queries(model.model))
    policy = H2O(native_tokens=2).fit(Budget("native"), geometry_of(equal), 4, 4)
    session = KVSession(equal, policy, Budget("native"), 1, max_new=4)
    session.prefill([random_ids(4, 1)])
    assert [[{p for p, _ in head if p < 4} for head in layer] for layer in kept(session, 0)] == [[{0, 3}] * 2] * 3


def _without_queries(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with all queries zero: attention is uniform."""
    twin = type(model)(model.config).eval().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    for layer in twin.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    return twin


def test_h2o_without_heavy_slots_is_a_sliding_window_and_with_all_slots_is_full() -> None:
    ids, budget = random_ids(LENGTH, 3), Budget("native")
    window = H2O(recent_share=1.0, native_tokens=20).fit(budget, geometry_of(engine()), LENGTH, NEW)
    twin = StreamingLLM(sink=0, position="absolute", every=1, native_recent=20)
    runs = [
        KVSession(engine(), p, budget, 1, max_new=NEW)
        for p in (window, twin.fit(budget, geometry_of(engine()), LENGTH, NEW))
    ]
    for session in runs:
        session.prefill([ids])
    for step in range(6):
        a, b = (session.decode([step + 1]) for session in runs)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert positions(runs[0]) == positions(runs[1]) == [[set(range(LENGTH + step - 19, LENGTH + step + 1))] * 3] * 4
    roomy = H2O(native_tokens=200).fit(budget, geometry_of(engine()), LENGTH, NEW)
    runs = [KVSession(engine(), p, budget, 1, max_new=NEW) for p in (roomy, FullKV())]
    assert torch.equal(*(session.prefill([ids]) for session in runs))
    assert torch.equal(*(session.decode([5]) for session in runs))


@pytest.mark.parametrize("keep_last", [False, True])
def test_tova_keeps_what_the_last_query_attends_to(keep_last: bool) -> None:
    budget = Budget("0.4")
    policy = TOVA(keep_last=keep_last)

    def decide(stored: Sets, masses: list[Mass], session: KVSession) -> Sets:
        seen = session.seq_len[0]
        num = slots(policy, budget, seen, LAYERS)
        found = []
        for layer, heads in enumerate(stored):
            if seen == LENGTH:
                scores = oracle.tova_scores(attentions(LENGTH, 3)[layer])
            else:
                last = [mass.on for mass in masses if mass.layer == layer and mass.query == seen - 1]
                scores = {j: sum(sum(on[j]) for on in last) / 6 for j in heads[0]}
            always = {seen - 1} if keep_last else set()
            rest = {j: s for j, s in scores.items() if j not in always}
            found.append([oracle.best(rest, num - len(always)) | always] * HEADS)
        return found

    follow(policy, budget, decide)


def test_tova_vector() -> None:
    last = {0: 0.5, 1: 0.1, 2: 0.4}
    assert oracle.best(last, 2) == {0, 2}


def test_tova_scores_a_question_by_its_last_query() -> None:
    """Two rows with questions of different lengths, in chunks: each is scored by its own last token."""
    budget, questions = Budget("1.0"), ([5, 9, 11, 4, 2, 7, 3], [6, 8, 1])
    policy = TOVA().fit(budget, geometry_of(engine()), LENGTH, NEW)
    both = KVSession(engine(), policy, budget, 2, max_new=NEW)
    both.prefill([random_ids(LENGTH, 3), random_ids(LENGTH, 4)])
    both.append(questions, chunk=4)
    for row, (seed, question) in enumerate(zip((3, 4), questions, strict=True)):
        with torch.inference_mode():
            out = eager()(torch.tensor([random_ids(LENGTH, seed) + question]), output_attentions=True)
        for index, layer in both.layers.items():
            found = layer.view().columns["last"][row, 0, : both.seq_len[row]].tolist()
            expected = oracle.tova_scores(out.attentions[index][0].tolist())
            assert found == pytest.approx(list(expected.values()), abs=1e-5)


def test_random_keeps_every_token_equally_often() -> None:
    """Over rows and heads of many seeds every position stays about as often; heads and layers differ."""
    budget, rows = Budget("0.5"), 40
    policy = Random().fit(budget, geometry_of(engine()), 33, NEW)
    session = KVSession(engine(), policy, budget, rows, max_new=NEW, seeds=[str(n) for n in range(rows)])
    session.prefill([random_ids(33, 3)] * rows)
    sets = [head for row in range(rows) for layer in positions(session, row) for head in layer]
    num = len(sets[0])
    assert {len(head) for head in sets} == {num}
    assert len({tuple(sorted(head)) for head in sets}) == len(sets)
    share = num / 33
    deviation = (share * (1 - share) / len(sets)) ** 0.5
    for position in range(33):
        assert abs(sum(position in head for head in sets) / len(sets) - share) < 5 * deviation


# ---- what kvpress keeps ----


@cache
def golden_model() -> LoadedModel:
    return around(script("golden_kvpress").llama(attention.register()), "golden")


CASES = json.loads((ROOT / "tests" / "golden" / "kvpress.json").read_text())["cases"]
OF_KVPRESS = {"window": 64, "kernel": 5, "pooling": "avg"}
PINNED: dict[str, Callable[[int], KVPolicy]] = {
    "streaming_llm": lambda n: StreamingLLM(position="absolute", native_recent=n - 4),
    "snapkv": lambda n: preset("snapkv_kvpress", n),
    "tova": lambda n: preset("tova_kvpress", n),
    "pyramidkv": lambda n: preset("pyramidkv_kvpress", n),
    "pyramidkv_window_4": lambda n: replace(preset("pyramidkv_kvpress", n), window=4),
    "adakv": lambda n: preset("adakv_kvpress", n),
    "criticalkv": lambda n: preset("criticalkv", n),
    "criticalkv_adakv": lambda n: preset("criticalkv_adakv", n),
}


def preset(name: str, tokens: int) -> Any:
    """What configs/method/NAME.yaml describes, with the count of tokens per head that kvpress chose."""
    fields = OmegaConf.load(ROOT / "configs" / "method" / f"{name}.yaml")
    del fields["name"]
    return instantiate(fields, native_tokens=tokens)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{case['ratio']}")
def test_kept_tokens_are_those_of_kvpress(case: dict[str, Any]) -> None:
    """kvpress keeps int(L (1 - ratio)) tokens per head, which no byte count gives: `native` pins the same number.

    It compresses the context alone, once: our prompt is the context, and the sets are those after its event.
    """
    counts, budget = case["counts"], Budget("native")
    tokens = round(sum(map(sum, counts)) / (LAYERS * HEADS))
    policy = PINNED[case["name"]](tokens).fit(budget, geometry_of(golden_model()), script("golden_kvpress").LENGTH, 8)
    session = KVSession(golden_model(), policy, budget, 1, max_new=8)
    session.prefill([script("golden_kvpress").prompt()], 100)
    found = positions(session)
    assert [[len(head) for head in layer] for layer in found] == counts
    assert found == [[script("golden_kvpress").unpacked(head) for head in layer] for layer in case["kept"]]


def test_golden_script_packs_positions_and_wants_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    for some in ([0], [3, 64, 599], list(range(600))):
        assert script("golden_kvpress").unpacked(script("golden_kvpress").packed(some)) == set(some)
    assert script("golden_kvpress").main([]) == 2
    assert "FILE.json" in capsys.readouterr().err


# ---- degenerate models, invariants ----


def run_on(loaded: LoadedModel, policy: KVPolicy, budget: Budget, ids: list[int]) -> KVSession:
    session = KVSession(loaded, policy.fit(budget, geometry_of(loaded), len(ids), 16), budget, 1, max_new=16)
    session.prefill([ids])
    for step in range(16):
        session.decode([step + 1])
    return session


def test_with_one_kv_head_there_is_nothing_to_divide() -> None:
    """AdaKV is SnapKV, whatever alpha and mode, and says so."""
    loaded, budget, ids = family("mistral"), Budget("0.4"), random_ids(90, 1)
    base = run_on(loaded, SnapKV(window=9), budget, ids)
    for mode, alpha in (("blend", 0.2), ("floor", 0.2), ("blend", 0.0)):
        session = run_on(loaded, AdaKV(window=9, mode=mode, alpha=alpha), budget, ids)
        assert kept(session, 0) == kept(base, 0)
        assert session.policy.knobs()["degenerate"].startswith("1 KV head")
    divided, plain = (run_on(loaded, CriticalKV(window=9, over=over), budget, ids) for over in ("adakv", "snapkv"))
    assert kept(divided, 0) == kept(plain, 0)
    assert divided.policy.knobs()["degenerate"] == "1 KV head: over=adakv equals over=snapkv"
    defended = run_on(loaded, DefensiveKV(window=9), budget, ids)
    assert defended.policy.knobs()["degenerate"] == "1 KV head: values do not weigh"
    norm = defended.layers[0].view().columns["norm"][0, 0]
    assert set(norm.tolist()) <= {0.0, 1.0}  # 0: not seen yet
    assert "degenerate" not in run_on(family("llama"), AdaKV(window=9), budget, ids).policy.knobs()


def test_with_one_layer_there_is_no_pyramid() -> None:
    loaded, budget, ids = family("llama_1"), Budget("0.4"), random_ids(90, 1)
    base = run_on(loaded, SnapKV(window=9, kernel=7), budget, ids)
    for shape in ("official", "kvpress"):
        session = run_on(loaded, PyramidKV(window=9, shape=shape), budget, ids)
        assert kept(session, 0) == kept(base, 0)
        assert session.policy.knobs()["degenerate"].startswith("1 layer")
    layer, model = (run_on(loaded, DefensiveKV(window=9, scope=scope), budget, ids) for scope in ("layer", "model"))
    assert kept(model, 0) == kept(layer, 0)
    assert model.policy.knobs()["degenerate"] == "1 layer: equals DefensiveKV"


@pytest.mark.parametrize("policy", [DefensiveKV(), DefensiveKV(scope="model"), H2O(), TOVA(), CriticalKV(), Random()])
@pytest.mark.parametrize("kind", ["mistral", "llama_1", "gemma3"])
def test_small_models_run(kind: str, policy: KVPolicy) -> None:
    """One KV head, one layer, sliding layers beside two full ones."""
    session = run_on(family(kind), policy, Budget("0.4"), random_ids(90, 1))
    assert all(used <= allowed for used, _, allowed in session.trace[0].decode)
    assert session.trace[0].evictions > 0


@pytest.mark.parametrize(
    "policy",
    [SnapKV(), AdaKV(), AdaKV(mode="floor"), CriticalKV(), CriticalKV(over="adakv"), DefensiveKV(), PyramidKV()],
)
def test_the_observation_window_always_stays(policy: KVPolicy) -> None:
    session = run_on(engine(), policy, Budget("0.4"), random_ids(200, 1))
    for layer in kept(session, 0):
        for head in layer:
            held = [p for p, _ in head]
            assert len(set(held)) == len(held)
            assert set(range(216 - session.policy.recent, 216)) <= set(held)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "layers"),
    [(AdaKV(), 1), (AdaKV(mode="floor"), 1), (DefensiveKV(), 1), (DefensiveKV(scope="model"), LAYERS)],
)
def test_ragged_heads_spend_the_bytes_of_layer_or_model(policy: KVPolicy, layers: int) -> None:
    """Heads differ, and less than one token's bytes are left over."""
    budget = Budget("0.2")
    fitted = policy.fit(budget, geometry_of(engine()), 400, 16)
    session = KVSession(engine(), fitted, budget, 1, max_new=16)
    session.prefill([random_ids(400, 2)])
    sizes = [len(head) for layer in positions(session) for head in layer]
    assert len(set(sizes)) > 2
    unit = geometry_of(engine()).slot_bytes + policy.entry_bytes
    allowed = budget.allowed_bytes(geometry_of(engine()), 400, 400, 16)
    assert allowed is not None
    assert 0 <= allowed - session.usage(0).total < unit * (LAYERS // layers) + LAYERS


@pytest.mark.parametrize(
    "policy", [H2O(), TOVA(), Random(), AdaKV(), CriticalKV(), DefensiveKV(), DefensiveKV(scope="model"), PyramidKV()]
)
@pytest.mark.parametrize("spec", ["1t", "2t", "0.01"])
def test_hopeless_budgets_are_infeasible(policy: KVPolicy, spec: str) -> None:
    with pytest.raises(Infeasible, match="nearest feasible fraction"):
        policy.fit(Budget(spec), geometry_of(engine()), 100, 16)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: AdaKV(kernel=4), "odd"),
        (lambda: AdaKV(alpha=1.5), "alpha"),
        (lambda: AdaKV(mode="hard"), "blend, floor"),
        (lambda: CriticalKV(first_stage_ratio=2.0), "first_stage_ratio"),
        (lambda: CriticalKV(over="h2o"), "snapkv, adakv"),
        (lambda: DefensiveKV(scope="head"), "layer, model"),
        (lambda: DefensiveKV(threshold=9.0), "threshold"),
        (lambda: PyramidKV(beta=0), "at least 1"),
        (lambda: H2O(recent_share=-1.0), "recent_share"),
        (lambda: H2O(every=0), "at least 1"),
        (lambda: SnapKV(order="both"), "reduce_first, pool_first"),
        (lambda: Random().admit(Budget("native")), "budget=native"),
        (lambda: DefensiveKV().admit(Budget("native")), "budget=native"),
    ],
)
def test_wrong_fields_are_named(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
