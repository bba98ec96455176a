"""Scores and bytes to tier maps, against the loops of naive.py and written-out rules; kept sets of the baselines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import naive
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import attentions, eager, engine, family, kept, random_ids, watched
from torch import Tensor

from methods.full_kv import FullKV
from methods.snapkv import SnapKV
from methods.streaming_llm import StreamingLLM
from qevict_bench.budget import Budget, Geometry, Infeasible
from qevict_bench.policy import EVICTED, FULL, LayerView, Placement
from qevict_bench.selection import Split, capacities, clamp_protected, fit_split, rank
from qevict_bench.session import KVSession, geometry_of

MIB = 1 << 20


@dataclass
class Bytes:
    """An Allowance with made-up sizes; `coded` units of the full tier keep their codes and cost both."""

    total: list[int]
    full: int
    low: int
    coded_BHU: Tensor
    fixed: int = 0
    calls: int = 0

    @property
    def bytes_B(self) -> Tensor:
        return torch.tensor(self.total)

    @property
    def fixed_B(self) -> Tensor:
        return torch.full((len(self.total),), self.fixed)

    @property
    def fits_B(self) -> Tensor:
        return torch.zeros(len(self.total), dtype=torch.bool)

    @property
    def unit_bytes(self) -> tuple[float, ...]:
        return float(self.full), float(self.low)

    def bytes_of(self, placements: Sequence[Placement]) -> Tensor:
        self.calls += 1
        [placement] = placements
        tier = placement.tier_BHU
        sizes = (tier == 0) * self.full + (tier == 1) * self.low + ((tier == 0) & self.coded_BHU) * self.low
        return sizes.sum((1, 2)) + self.fixed


# ---- ranks and Eq. 3 ----


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_rank_breaks_ties_by_position(units: list[tuple[int, bool]]) -> None:
    score = torch.tensor([[[float(s) for s, _ in units]]])
    candidate = torch.tensor([[[c for _, c in units]]])
    order = sorted((u for u, (_, c) in enumerate(units) if c), key=lambda u: (-units[u][0], u))
    expected = [order.index(u) if units[u][1] else len(units) for u in range(len(units))]
    assert rank(score, candidate)[0, 0].tolist() == expected


def test_worked_example_of_the_paper() -> None:
    """Llama-3.1-8B in BF16, everything in MiB: K_f 30 (240 tokens), K_q 534 (4272 tokens)."""
    llama = Geometry(num_layers=32, num_kv_heads=8, group_size=4, head_dim=128, itemsize=2)
    assert llama.full_bytes(1) == 131072
    assert llama.full_bytes(1) // llama.num_layers == 4096
    full = llama.full_bytes(8)
    assert full == MIB
    low = round(0.131 * MIB)
    hist = torch.tensor([[100.0 * MIB]], dtype=torch.float64)
    num_full, num_low = capacities(hist, 0.7, full, low)
    assert (int(num_full), int(num_low)) == (30, 534)
    assert (int(num_full) * 8, int(num_low) * 8) == (240, 4272)
    score = torch.arange(700.0, 0, -1)[None, None]
    every = torch.ones_like(score, dtype=torch.bool)
    room = Bytes([100 * MIB], full, low, ~every)
    tier = fit_split(Split(score, every, every, ~every, 0.7, False), room, FULL, 1, EVICTED)[0, 0].tolist()
    assert tier == [0] * 30 + [1] * 534 + [EVICTED] * 136


@pytest.mark.parametrize("q", ["0", "0.1", "0.2", "0.3", "0.7", "0.8", "0.9", "1"])
def test_capacities_lose_no_window_to_rounding(q: str) -> None:
    """(1 - 0.9) * 10 is 0.9999...: a window too few unless q is taken as the decimal it was written as."""
    for windows in range(0, 400, 5):
        hist = windows * 1000
        found = capacities(torch.tensor([[float(hist)]], dtype=torch.float64), float(q), 1000.0, 125.0)
        assert tuple(map(int, found)) == naive.eq3(Fraction(hist), q, Fraction(1000), Fraction(125))


# ---- two tiers under exact bytes ----

SPLITS = {
    "scores": st.lists(st.integers(0, 6), min_size=1, max_size=14),
    "sizes": st.tuples(st.integers(2, 40), st.integers(1, 39)).filter(lambda s: s[0] > s[1]),
    "q": st.sampled_from(("0", "0.3", "0.5", "0.7", "0.9", "1")),
    "total": st.integers(0, 500),
    "coded": st.integers(0, 2**14 - 1),
    "eligible": st.integers(0, 2**14 - 1),
}


def run_split(
    scores: list[int], sizes: tuple[int, int], q: str, total: int, coded: int, eligible: int, fill: bool
) -> tuple[list[int], Bytes]:
    score = torch.tensor([[[float(s) for s in scores]]])
    every = torch.ones_like(score, dtype=torch.bool)
    units = range(len(scores))
    coded_BHU = torch.tensor([[[bool(coded >> u & 1) for u in units]]])
    eligible_BHU = torch.tensor([[[bool(eligible >> u & 1) for u in units]]])
    room = Bytes([total], *sizes, coded_BHU)
    tier = fit_split(Split(score, every, eligible_BHU, ~every, float(q), fill), room, FULL, 1, EVICTED)
    return tier[0, 0].tolist(), room


@given(**SPLITS)
@settings(max_examples=80, deadline=None)
def test_literal_split_is_eq_3_to_5(
    scores: list[int], sizes: tuple[int, int], q: str, total: int, coded: int, eligible: int
) -> None:
    """Without a ledger nothing has to be trimmed: top K_f, next K_q, nothing more."""
    found, _ = run_split(scores, sizes, q, total, 0, eligible, fill=False)
    k_full, k_low = naive.eq3(Fraction(total), q, *map(Fraction, sizes))
    ranked = dict(enumerate(map(float, scores)))
    may = [u for u in ranked if eligible >> u & 1]
    full, low = naive.Router(set(), set(), set(), set()).split(ranked, may, list(ranked), k_full, k_low)
    assert found == [FULL if u in full else 1 if u in low else EVICTED for u in ranked]


@given(**SPLITS)
@settings(max_examples=80, deadline=None)
def test_fill_spends_what_a_tier_cannot_use(
    scores: list[int], sizes: tuple[int, int], q: str, total: int, coded: int, eligible: int
) -> None:
    found, _ = run_split(scores, sizes, q, total, 0, eligible, fill=True)
    ranked = dict(enumerate(map(float, scores)))
    may = [u for u in ranked if eligible >> u & 1]
    costs = [Fraction(s) for s in sizes]
    k_full, k_low = naive.eq3(Fraction(total), q, *costs)
    if q != "0":  # without a quantized tier there is nothing to fill
        k_full, k_low = naive.fill_up(Fraction(total), k_full, k_low, *costs, len(ranked), len(may))
    full, low = naive.Router(set(), set(), set(), set()).split(ranked, may, list(ranked), k_full, k_low)
    assert found == [FULL if u in full else 1 if u in low else EVICTED for u in ranked]
    used = found.count(0) * sizes[0] + found.count(1) * sizes[1]
    if EVICTED in found and q != "0":
        assert used + sizes[1] > total


@given(**SPLITS, fill=st.booleans())
@example(scores=[0, 0], sizes=(5, 4), q="0.3", total=8, coded=1, eligible=1, fill=True)
@settings(max_examples=80, deadline=None)
def test_trimming_ends_fits_and_wastes_no_window(
    scores: list[int], sizes: tuple[int, int], q: str, total: int, coded: int, eligible: int, fill: bool
) -> None:
    """Full windows that keep their codes cost both: counts are lowered, lowest score first, until the bytes fit."""
    coded = coded if q != "0" else 0
    found, room = run_split(scores, sizes, q, total, coded, eligible, fill)
    used = int(room.bytes_of([Placement(torch.tensor([[found]]))]))
    assert used <= total
    assert room.calls < 3 * len(scores) + 5
    plain, _ = run_split(scores, sizes, q, total, 0, eligible, fill)
    ranked = dict(enumerate(scores))
    may = [u for u in ranked if eligible >> u & 1]
    full = [u for u in ranked if found[u] == FULL]
    assert set(full) <= set(may)
    assert sorted(may, key=lambda u: (-ranked[u], u))[: len(full)] == sorted(full, key=lambda u: (-ranked[u], u))
    rest = [u for u in ranked if found[u] != FULL]
    low = sorted((u for u in rest if found[u] == 1), key=lambda u: (-ranked[u], u))
    assert sorted(rest, key=lambda u: (-ranked[u], u))[: len(low)] == low
    if fill and used < total and found != plain and EVICTED in found:
        assert q == "0" or used + sizes[1] > total, "an evicted window would still fit in the low tier"


@given(**SPLITS, more=st.integers(0, 200))
@settings(max_examples=80, deadline=None)
def test_more_bytes_never_mean_fewer_full_windows(
    scores: list[int], sizes: tuple[int, int], q: str, total: int, coded: int, eligible: int, more: int
) -> None:
    for fill in (False, True):
        less_found, _ = run_split(scores, sizes, q, total, 0, eligible, fill)
        more_found, _ = run_split(scores, sizes, q, total + more, 0, eligible, fill)
        assert less_found.count(FULL) <= more_found.count(FULL)
        if not fill and eligible == 2**14 - 1:
            assert len(scores) - less_found.count(EVICTED) <= len(scores) - more_found.count(EVICTED)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=6, max_size=6),
    st.integers(0, 3000),
    st.integers(0, 2**6 - 1),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_rows_and_heads_share_bytes_but_not_decisions(
    scores: list[list[int]], total: int, coded: int, fill: bool
) -> None:
    """Two rows of three heads: each row fits alone, and is split as if the other row were not there."""
    score = torch.tensor(scores, dtype=torch.float32).view(2, 3, 6)
    every = torch.ones_like(score, dtype=torch.bool)
    coded_BHU = torch.tensor([bool(coded >> u & 1) for u in range(6)]).expand_as(score)

    def split(rows: slice, totals: list[int]) -> Tensor:
        room = Bytes(totals, 80, 25, coded_BHU[rows], fixed=7)
        parts = (score[rows], every[rows], every[rows], ~every[rows])
        tier = fit_split(Split(*parts, 0.7, fill), room, FULL, 1, EVICTED)
        used = room.bytes_of([Placement(tier)])
        assert bool(((used <= room.bytes_B) | (tier == EVICTED).all(-1).all(-1)).all())
        return tier

    both = split(slice(0, 2), [total, total // 2])
    assert torch.equal(both[:1], split(slice(0, 1), [total]))
    assert torch.equal(both[1:], split(slice(1, 2), [total // 2]))


# ---- small budgets ----

GEOMETRY = Geometry(num_layers=2, num_kv_heads=3, group_size=2, head_dim=16, itemsize=4)


@pytest.mark.parametrize("spec", ["0.05", "0.1", "0.2", "0.5", "24t", "200t"])
@pytest.mark.parametrize(("sink", "recent", "reserve"), [(5, 32, 15), (4, 0, 8), (0, 32, 8), (0, 32, 0), (0, 1, 0)])
def test_protected_tokens_shrink_to_half(spec: str, sink: int, recent: int, reserve: int) -> None:
    for prompt_len in (31, 63, 100, 400, 3000):
        budget = Budget(spec)
        tokens = int(spec[:-1]) if spec.endswith("t") else math.floor(Fraction(spec) * prompt_len)
        try:
            found = clamp_protected(budget, GEOMETRY, prompt_len, 64, sink, recent, reserve)
        except Infeasible:
            assert tokens < 2 * max(reserve + 1, 2)
            continue
        assert sum(found) + reserve < tokens
        if found != (sink, recent):
            assert sink + recent > tokens // 2 == sum(found)
            assert found[0] <= sink
        with_refusal = Budget(spec, small_budget="refuse")
        if found == (sink, recent):
            assert clamp_protected(with_refusal, GEOMETRY, prompt_len, 64, sink, recent, reserve) == found
        else:
            with pytest.raises(Infeasible, match="nearest feasible fraction"):
                clamp_protected(with_refusal, GEOMETRY, prompt_len, 64, sink, recent, reserve)


@pytest.mark.parametrize("spec", ["3t", "8t", "12t", "0.02"])
@pytest.mark.parametrize("policy", [StreamingLLM(), SnapKV()])
def test_hopeless_budgets_are_infeasible_not_exceeded(spec: str, policy: Any) -> None:
    with pytest.raises(Infeasible, match="nearest feasible fraction"):
        policy.fit(Budget(spec), geometry_of(engine()), 100, 16)


# ---- SnapKV ----


def positions(session: KVSession, row: int = 0) -> list[list[set[int]]]:
    """Positions below seq_len that every layer and head keeps."""
    seen = session.seq_len[row]
    return [[{p for p, _ in head if p < seen} for head in layer] for layer in kept(session, row)]


def snapkv_capacity(budget: Budget, length: int, every: int, votes: int = 1) -> int:
    """Tokens per KV head that pay for themselves, their table entries, and the room until the next event."""
    geometry = geometry_of(engine())
    layer_bytes = (budget.allowed_bytes(geometry, length, length, 0) or 0) // geometry.num_layers
    slot = geometry.slot_bytes + 6 + 4 * votes  # position 4, tier 1, codes 1
    return (layer_bytes - geometry.num_kv_heads * every * slot) // slot // geometry.num_kv_heads


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_snapkv_keeps_what_the_window_votes_for(kernel: int, pooling: str, reduce: str) -> None:
    budget, length, window = Budget("0.6"), 63, 5
    policy = SnapKV(window=window, kernel=kernel, pooling=pooling, group_reduce=reduce)
    fitted = policy.fit(budget, geometry_of(engine()), length, 16)
    num_kept = snapkv_capacity(budget, length, policy.every, 2 if reduce == "max" else 1)
    assert window < num_kept < length
    newest = set(range(length - window, length))
    expected = []
    for layer in attentions(length, 3):
        votes = [
            naive.snapkv_votes(layer[2 * h : 2 * h + 2], length, window, kernel, pooling, reduce) for h in range(3)
        ]
        expected.append([naive.keep_top(dict(enumerate(vote)), newest, num_kept) for vote in votes])
    for chunk in (1024, 61, 17):
        session = KVSession(engine(), fitted, budget, 1, max_new=16)
        session.prefill([random_ids(length, 3)], chunk)
        assert positions(session) == expected


def test_snapkv_votes_and_window_mass_sum_to_the_window() -> None:
    """Every row of attention sums to 1; at budget 1 the engine's votes are the un-pooled ones (kernel 1)."""
    policy = SnapKV(window=9, kernel=1)
    fitted = policy.fit(Budget("1.0"), geometry_of(engine()), 63, 16)
    recorded: list[Tensor] = []

    class Votes(SnapKV):
        def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
            super().observe(view, mass_BHGPU, rows_BP)
            recorded.append(mass_BHGPU.sum((2, 3, 4)) / 2)

    session = KVSession(engine(), Votes(**vars(fitted)), Budget("1.0"), 1, max_new=16)
    session.prefill([random_ids(63, 3)])
    for mass_BH in recorded:
        torch.testing.assert_close(mass_BH, torch.full((1, 3), 9.0))
    for index, layer in session.layers.items():
        for head in range(3):
            expected = naive.snapkv_votes(attentions(63, 3)[index][2 * head : 2 * head + 2], 63, 9, 1, "max", "mean")
            found = layer.view().columns["vote"][0, head, :63].tolist()
            assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("reselect", ["accumulate", "prompt"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_snapkv_reselects_by_votes_and_decoded_attention(reselect: str, reduce: str) -> None:
    """Two rows of odd lengths. What a decoded query adds is the engine's; the fold and the choice are naive."""
    lengths, window, budget = (63, 81), 5, Budget("0.6")
    added: dict[
        tuple[int, int, int], dict[int, list[float]]
    ] = {}  # layer, row, head -> position -> mass per query head

    class Spy(SnapKV):
        def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
            super().observe(view, mass_BHGPU, rows_BP)
            for row, rows in enumerate(rows_BP.tolist()):
                if rows[0] < int(view.prompt_len_B[row]):
                    continue
                named = lengths.index(int(view.prompt_len_B[row]))
                for head in range(3):
                    sums = added.setdefault((view.layer_idx, named, head), {})
                    for u, position in enumerate(view.pos_BHU[row, head].tolist()):
                        if position >= 0:
                            mass = mass_BHGPU[row, head, :, :, u].sum(dim=1).tolist()
                            sums[position] = [a + b for a, b in zip(sums.get(position, [0.0, 0.0]), mass, strict=True)]

    policy = Spy(window=window, kernel=3, group_reduce=reduce, reselect_score=reselect)
    fitted = policy.fit(budget, geometry_of(engine()), min(lengths), 24)
    session = KVSession(engine(), fitted, budget, 2, max_new=24)
    prompts = [random_ids(n, n) for n in lengths]
    session.prefill(prompts)
    held = [positions(session, row) for row in range(2)]
    for decoded in range(24):
        session.decode(random_ids(2, decoded))
        if (decoded + 1) % policy.every:
            continue
        for row, length in enumerate(lengths):
            seen = length + decoded + 1
            num_kept = snapkv_capacity(budget, seen, policy.every, 2 if reduce == "max" else 1)
            newest = set(range(seen - window, seen))
            for index, layer in enumerate(attentions(length, length)):
                for head in range(3):
                    vote = naive.snapkv_votes(layer[2 * head : 2 * head + 2], length, window, 3, "max", reduce)
                    stored = held[row][index][head] | set(range(seen - policy.every, seen))
                    mass = added.get((index, row, head), {})
                    fold = max if reduce == "max" else lambda pair: sum(pair) / 2
                    score = {j: (vote[j] if j < length else 0.0) + fold(mass.get(j, [0.0, 0.0])) for j in stored}
                    expected = naive.keep_top(score, newest & stored, num_kept)
                    held[row][index][head] = positions(session, row)[index][head]
                    assert held[row][index][head] == expected
    assert (reselect == "accumulate") == bool(added)


def test_snapkv_as_published_evicts_once() -> None:
    budget, length = Budget("0.4", enforce="prefill"), 63
    policy = SnapKV(window=5, kernel=3).fit(budget, geometry_of(engine()), length, 100)
    session = KVSession(engine(), policy, budget, 1, max_new=100)
    session.prefill([random_ids(length, 3)])
    first = positions(session)
    assert {len(head) for layer in first for head in layer} == {snapkv_capacity(budget, length, 0)}
    for step in range(100):
        session.decode([step % 90 + 1])
    grown = set(range(length, length + 100))
    assert positions(session) == [[head | grown for head in layer] for layer in first]
    assert session.trace[0].events == 1
    assert session.trace[0].decode[-1][0] > session.trace[0].decode[-1][2]  # the overshoot is reported, not refused


def test_snapkv_native_keeps_its_published_number() -> None:
    budget = Budget("native")
    policy = SnapKV(window=5, kernel=3, native_tokens=20).fit(budget, geometry_of(engine()), 63, 16)
    session = KVSession(engine(), policy, budget, 1, max_new=16)
    session.prefill([random_ids(63, 3)])
    for index, layer in enumerate(attentions(63, 3)):
        for head in range(3):
            vote = naive.snapkv_votes(layer[2 * head : 2 * head + 2], 63, 5, 3, "max", "mean")
            expected = naive.keep_top(dict(enumerate(vote)), set(range(58, 63)), 20)
            assert positions(session)[index][head] == expected
    short = KVSession(engine(), replace(policy, native_tokens=63), budget, 1, max_new=16)
    short.prefill([random_ids(63, 3)])
    assert positions(short) == [[set(range(63))] * 3] * 4  # capacity >= prompt: nothing moves


# ---- StreamingLLM ----


@pytest.mark.parametrize("position", ["compact", "absolute"])
@pytest.mark.parametrize("sink", [0, 4, 7])
def test_streaming_llm_keeps_sinks_and_the_newest(position: str, sink: int) -> None:
    budget = Budget("0.5")
    geometry = geometry_of(engine())
    policy = StreamingLLM(sink=sink, position=position).fit(budget, geometry, 63, 24)
    policy, _, events = watched(policy)
    session = KVSession(engine(), policy, budget, 1, max_new=24)
    session.prefill([random_ids(63, 3)])
    for step in range(24):
        session.decode([step + 1])
    assert [event.seq_len for event in events if event.layer_idx == 2] == [[63], [71], [79], [87]]
    for event in events:
        [seen] = event.seq_len
        layer_bytes = (budget.allowed_bytes(geometry, 63, seen, 24) or 0) // 4
        token = 3 * geometry.slot_bytes + 6  # one table entry for all heads
        num_kept = (layer_bytes - 8 * token) // token
        held = {int(p) for p in event.pos_BHU[event.tier_BHU == FULL] if p < seen}
        assert held == naive.streaming_kept(seen, sink, num_kept - sink)


def test_streaming_llm_vectors() -> None:
    """s = 4, R = 8, 20 tokens: {0..3, 12..19}; re-indexed 0..11, so the next query stands at 12."""
    budget = Budget("native")
    ids = random_ids(20, 3)
    shifts = {}
    for position in ("compact", "absolute"):
        policy = StreamingLLM(native_recent=8, position=position).fit(budget, geometry_of(engine()), 20, 16)
        session = KVSession(engine(), policy, budget, 1, max_new=16)
        session.prefill([ids])
        assert positions(session) == [[{*range(4), *range(12, 20)}]] * 4
        shifts[position] = layer_0_positions(session, ids)
    assert shifts == {"compact": list(range(12)), "absolute": [*range(4), *range(12, 20)]}
    roomy = StreamingLLM(native_recent=20).fit(budget, geometry_of(engine()), 20, 16)
    session, full = (KVSession(engine(), p, budget, 1, max_new=16) for p in (roomy, FullKV()))
    assert torch.equal(session.prefill([ids]), full.prefill([ids]))
    assert torch.equal(session.decode([5]), full.decode([5]))  # R >= length: bitwise the same


def layer_0_positions(session: KVSession, ids: list[int]) -> list[int]:
    """At which position each stored key of layer 0 stands: its token's key, rotated there, is the stored one."""
    model = eager()
    decoder = model.model
    layer = decoder.layers[0]
    with torch.inference_mode():
        hidden = layer.input_layernorm(decoder.embed_tokens(torch.tensor(ids)))
        plain_TD = layer.self_attn.k_proj(hidden).view(len(ids), 3, 16)[:, 0]
        cos, sin = (x[0] for x in decoder.rotary_emb(hidden, torch.arange(len(ids) + 1)[None]))
    tokens = sorted(positions(session)[0][0])
    stored = session.layers[0].full.k[: len(tokens)]
    found = []
    for token, key in zip(tokens, stored, strict=True):
        half = torch.cat((-plain_TD[token, 8:], plain_TD[token, :8]))
        error = (plain_TD[token] * cos + half * sin - key).abs().amax(-1)
        assert float(error.min()) < 1e-4
        found.append(int(error.argmin()))
    return found


def test_streaming_llm_compact_queries_follow_the_stored_tokens() -> None:
    """Decoding on the compacted cache equals transformers on the kept tokens alone, in a model of one layer."""
    loaded = family("llama_1")
    policy = StreamingLLM(native_recent=8).fit(Budget("native"), geometry_of(loaded), 20, 16)
    session = KVSession(loaded, policy, Budget("native"), 1, max_new=16)
    ids = random_ids(20, 3)
    session.prefill([ids])
    short = KVSession(loaded, FullKV(), Budget("1.0"), 1, max_new=16)
    short.prefill([ids[:4] + ids[12:]])
    for token in (5, 9, 11):
        torch.testing.assert_close(session.decode([token]), short.decode([token]), atol=1e-5, rtol=1e-5)
