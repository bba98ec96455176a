"""QEvict against the paper: Eq. 1 by eager attention, Eq. 3-6 and Algorithm 1 by naive.py, the ledger by its bits."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import naive
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from presets import qevict
from tiny_models import attentions, engine, kept, prompt, random_ids, watched
from torch import Tensor

from methods.qevict import QEvict
from qevict_bench import session as session_module
from qevict_bench.accounting import PlacementCost, unit_bytes, usage
from qevict_bench.attention import Step
from qevict_bench.budget import Budget, Geometry, Infeasible
from qevict_bench.engine import Generation, generate
from qevict_bench.policy import EVICTED, FULL, Placement
from qevict_bench.rope import Rope
from qevict_bench.routing import all_low_bytes
from qevict_bench.selection import capacities
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.slots import Slots
from qevict_bench.store import LayerStore, Moves

LOW = 1
HEADS, GROUP = 3, 2


def session_of(policy: QEvict, spec: str, prompt_len: int, rows: int = 1, max_new: int = 64) -> KVSession:
    budget = Budget(spec)
    return KVSession(
        engine(), policy.fit(budget, geometry_of(engine()), prompt_len, max_new), budget, rows, max_new=max_new
    )


# ---- the worked example, with what parameters really cost ----


def test_worked_example_with_honest_metadata() -> None:
    """Llama-3.1-8B, window 8, 100 MiB: 16-bit scale and zero per channel make M_q 0.258 M_f and K_q 271, not 534."""
    llama = Geometry(num_layers=32, num_kv_heads=8, group_size=4, head_dim=128, itemsize=2)
    like = torch.empty((0, 128), dtype=torch.bfloat16)
    store = LayerStore(qevict(), llama, 0, Rope(torch.nn.Identity(), [], []), like, 1, torch.Generator, Tensor)
    full, low = unit_bytes(store)
    table = store.table.unit_bytes
    payload_full, payload_low = full - table, low - table
    assert payload_full * llama.num_layers == 1 << 20
    assert payload_low / payload_full == pytest.approx(0.258, abs=5e-4)
    hist = torch.tensor([[100.0 * (1 << 20) / llama.num_layers]], dtype=torch.float64)
    num_full, num_low = map(int, capacities(hist, 0.7, payload_full, payload_low))
    assert (num_full, num_low) == (30, 271)
    assert (num_full + num_low) / num_full == pytest.approx(10, abs=0.05)  # coverage, against 18.8 as published
    assert table == 10  # first position, tier, codes, score: one entry per layer
    assert tuple(map(int, capacities(hist, 0.7, full, low))) == (29, 271)  # 29.99 windows with their table entries


# ---- Eq. 1 ----


@pytest.mark.parametrize("decode_scores", ["every_step", "last_step", "replay"])
@pytest.mark.parametrize("prefill_scores", ["all", "observation"])
@pytest.mark.parametrize(("head_scope", "decay"), [("layer", 1.0), ("kv_head", 0.5)])
def test_scores_are_eq_1(decode_scores: str, prefill_scores: str, head_scope: str, decay: float) -> None:
    """Against per-position sums of transformers' eager attention, over 61 prompt tokens (odd chunks) and 16 decoded."""
    prompt_len, decoded, omega, window, sink, observation = 61, 16, 8, 8, 5, 20
    policy = qevict(
        prefill_scores=prefill_scores,
        decode_scores=decode_scores,
        head_scope=head_scope,
        decay=decay,
        observation=observation,
    )
    session = session_of(policy, "1.0", prompt_len)
    ids = random_ids(prompt_len + decoded, 3)
    session.prefill([ids[:prompt_len]], chunk=17)
    for token in ids[prompt_len:]:
        session.decode([token])
    first = 0 if prefill_scores == "all" else prompt_len - observation
    intervals = [list(range(first, prompt_len))]
    for begin in range(prompt_len, prompt_len + decoded, omega):
        rows = list(range(begin, begin + omega))
        intervals.append(rows[-1:] if decode_scores == "last_step" else rows)
    for index, heads in enumerate(attentions(len(ids), 3)):
        groups = [heads] if head_scope == "layer" else [heads[GROUP * h : GROUP * h + GROUP] for h in range(HEADS)]
        view = session.layers[index].view()
        for table_head, group in enumerate(groups):
            expected: dict[int, float] = {}
            for queries in intervals:
                added = naive.window_scores(group, queries, window, sink)
                expected = {w: decay * (expected.get(w, 0.0) + added.get(w, 0.0)) for w in expected | added}
            stored = zip(view.pos_BHU[0, table_head].tolist(), view.columns["score"][0, table_head], strict=True)
            found = {pos: float(score) for pos, score in stored if pos < len(ids)}
            assert found == pytest.approx(expected, abs=2e-4)


def test_quantized_windows_go_on_scoring(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 20 %, every decoded query's softmax over full, quantized and new tokens adds to the windows that are held."""
    added: dict[tuple[int, int], float] = {}

    def spy(layer: LayerStore, q_BHQD: Tensor, slots: Slots, step: Step, probed_BQ: Tensor, scale: float) -> None:
        before = layer.table.rect().columns.clone()
        real(layer, q_BHQD, slots, step, probed_BQ, scale)
        if step.phase == "decode":
            rect = layer.table.rect()
            order = [  # reading order: the quantized windows, then the rest, each by position
                *(
                    (p, layer.policy.unit)
                    for p, t in zip(rect.pos[0, 0].tolist(), rect.tier[0, 0].tolist(), strict=True)
                    if t == LOW
                ),
                *(
                    (int(p), int(min(e, layer.seq_len[0]) - p))
                    for p, e, t in zip(rect.pos[0, 0], rect.end[0, 0], rect.tier[0, 0], strict=True)
                    if t == FULL
                ),
            ]
            units = [p for p, n in order for _ in range(n)]
            assert len(units) == slots.count[0]
            for head in range(HEADS * GROUP):
                at = slots.start[head // GROUP]
                keys = slots.k[at : at + len(units)].double()
                prob = (keys @ q_BHQD[0, head, 0].double() * scale).softmax(0).tolist()
                for unit, p in zip(units, prob, strict=True):
                    added[(layer.layer_idx, unit)] = added.get((layer.layer_idx, unit), 0.0) + p / (HEADS * GROUP)
            change = (rect.columns - before)[0, 0, 0]
            for pos, delta in zip(rect.pos[0, 0].tolist(), change.tolist(), strict=True):
                assert delta == pytest.approx(added.pop((layer.layer_idx, pos), 0.0), abs=1e-5)
                quantized.update({pos: delta} if pos in [p for p, n in order if n and p in low_of(layer)] else {})

    real = session_module.observe
    quantized: dict[int, float] = {}
    monkeypatch.setattr(session_module, "observe", spy)
    session = session_of(qevict(decode_scores="every_step"), "0.2", 256)
    session.prefill([random_ids(256, 3)])
    for step in range(20):
        session.decode([step + 1])
    assert quantized
    assert max(quantized.values()) > 1e-3


def low_of(layer: LayerStore) -> set[int]:
    rect = layer.table.rect()
    return set(rect.pos[rect.tier == LOW].tolist())


def test_replay_scores_the_interval_at_its_end() -> None:
    """Buffered queries, scored together at the event, give the same scores, moves and logits: two rows, one stops."""
    runs = []
    for decode_scores in ("every_step", "replay"):
        session = session_of(qevict(decode_scores=decode_scores), "0.3", 330, rows=2)
        session.prefill([random_ids(330, 3), random_ids(357, 4)])
        logits = []
        for step in range(32):
            if step == 19:
                session.freeze(0)
            logits.append(session.decode([step + 1, step + 2])[session.active])
        runs.append((session, logits))
    (every, logits), (replay, replay_logits) = runs
    assert sum(t.evictions for t in every.trace) > 0
    assert sum(t.promotions for t in every.trace) > 0
    for row in range(2):
        assert kept(every, row) == kept(replay, row)
    assert all(torch.equal(a, b) for a, b in zip(logits, replay_logits, strict=True))
    for index, layer in every.layers.items():
        twin = replay.layers[index].view().columns["score"]
        torch.testing.assert_close(layer.view().columns["score"][1, :, :-2], twin[1, :, :-2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("decode_scores", ["replay", "last_step"])
def test_a_question_cuts_an_interval_short(decode_scores: str) -> None:
    """3 decoded tokens, a question of 5, an interval of 8: which queries are scored, at fraction 1."""
    session = session_of(qevict(decode_scores=decode_scores, prefill_scores="all"), "1.0", 61)
    ids = random_ids(77, 3)
    session.prefill([ids[:61]])
    for token in ids[61:64]:
        session.decode([token])
    session.append([ids[64:69]])
    for token in ids[69:]:
        session.decode([token])
    decoded = [*range(61, 64), *range(69, 77)] if decode_scores == "replay" else [63, 76]
    for index, heads in enumerate(attentions(77, 3)):
        expected = naive.window_scores(heads, [*range(61), *range(64, 69), *decoded], 8, 5)
        view = session.layers[index].view()
        stored = zip(view.pos_BHU[0, 0].tolist(), view.columns["score"][0, 0].tolist(), strict=True)
        assert {pos: score for pos, score in stored if pos < 77} == pytest.approx(expected, abs=2e-4)


# ---- Algorithm 1 ----


@cache
def rope() -> Rope:
    return Rope(engine().model.model.rotary_emb, ["full_attention"], ["default"])


def store_of(policy: QEvict, length: int, seed: int = 0) -> LayerStore:
    """One layer that has seen a random prompt of `length` tokens."""
    geometry = replace(geometry_of(engine()), num_layers=1)
    like = torch.empty((0, geometry.head_dim))
    generator = torch.Generator()
    store = LayerStore(policy, geometry, 0, rope(), like, 1, lambda row: generator, lambda: like)
    store.prompt_len = [length]
    extend(store, length, seed)
    return store


def extend(store: LayerStore, new: int, seed: int, room: int = 0) -> None:
    store.reserve([0], [new], room)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, new, store.geometry.head_dim)
    store.append([0], [new], *(torch.randn(shape, generator=generator) for _ in range(2)))


class Driver:
    """A layer and its twin Algorithm 1, driven through events with scores from outside."""

    def __init__(self, policy: QEvict, length: int) -> None:
        self.policy, self.store = policy, store_of(policy, length)
        self.twin = naive.Router(set(), set(), set(), set())

    def event(self, share: str, scores: Iterator[int], room: int) -> None:
        store, policy, twin = self.store, self.policy, self.twin
        seen = store.seq_len[0]
        store.table.cover([seen + room])
        view = store.view()
        column = view.columns["score"]
        column.copy_(torch.tensor([[[float(next(scores)) for _ in range(column.shape[-1])]]]))
        score = dict(zip(view.pos_BHU[0, 0].tolist(), column[0, 0].tolist(), strict=True))
        allowed = int(Fraction(share) * store.geometry.full_bytes(seen))
        allowance = PlacementCost([store], [room], [allowed], everything=False)
        [placement] = policy.place([view], allowance)
        moves = store.apply(placement, [room])
        store.event_len = [seen]

        candidates = twin.candidates(seen, policy.recent, policy.window, policy.sink)
        twin.full |= {w for w in candidates if w not in twin.low}
        full, low = self.split(candidates, score, allowed, room)
        promotions, demotions, evictions = twin.move(candidates, full, low)
        if policy.promotion == "none":
            assert promotions == 0
        assert [int(m) for m in moves] == [promotions, demotions, evictions]
        rect = store.table.rect()
        held = dict(zip(rect.pos[0, 0].tolist(), rect.tier[0, 0].tolist(), strict=True))
        assert {w for w, t in held.items() if t == LOW} == twin.low
        assert {w for w, t in held.items() if t == FULL and w in candidates} == twin.full
        assert {w for w, t in held.items() if t == FULL} - twin.full == self.protected(seen, room)
        assert set(rect.pos[rect.coded == LOW].tolist()) == twin.ledger
        assert usage(store, 0).total == int(allowance.bytes_of([Placement(rect.tier)]))
        assert usage(store, 0).total <= allowed or not (twin.full or twin.low)

    def protected(self, seen: int, room: int) -> set[int]:
        policy = self.policy
        tiles = range(policy.sink, seen + room, policy.window)
        young = {w for w in tiles if w + policy.window - 1 >= seen - policy.recent}
        return young | ({0} if policy.sink else set())

    def split(
        self, candidates: list[int], score: dict[int, float], allowed: int, room: int
    ) -> tuple[list[int], list[int]]:
        """Eq. 3 and fill on the bytes the protected tokens leave; then one window at a time until the bytes fit."""
        store, policy, twin = self.store, self.policy, self.twin
        geometry, table = store.geometry, store.table.unit_bytes
        seen = store.seq_len[0]
        young = self.protected(seen, room)
        tokens = min(policy.sink, seen) + sum(
            min(w + policy.window, seen) - w for w in young if w >= policy.sink and w < seen
        )
        hist = allowed - HEADS * geometry.slot_bytes * (tokens + room) - table * len(young)
        m_full, m_low = map(int, unit_bytes(store))
        if self.settled(candidates, m_full, m_low, hist):
            return candidates, []
        eligible = [w for w in candidates if policy.promotion != "none" or w not in twin.low]
        k_full, k_low = naive.eq3(Fraction(hist), str(policy.q), Fraction(m_full), Fraction(m_low))
        least = min(k_full, len(eligible))
        if policy.fill:
            sizes = (Fraction(m_full), Fraction(m_low))
            k_full, k_low = naive.fill_up(
                max(Fraction(hist), Fraction(0)), k_full, k_low, *sizes, len(candidates), len(eligible)
            )
        k_full = min(k_full, len(eligible))
        least = min(least, k_full)
        while True:
            full, low = twin.split(score, eligible, candidates, k_full, k_low)
            codes = m_low - table
            cost = len(full) * m_full + len(low) * m_low + codes * sum(w in twin.ledger for w in full)
            if cost <= hist or not (full or low):
                return full, low
            k_low = len(low)
            if k_low and k_full <= least:
                k_low -= 1
                continue
            k_full, k_low = k_full - 1, k_low + 1
            least = min(least, k_full)
            if policy.fill:  # a full window that kept its codes frees more than one low one takes
                k_low = max(k_low, (hist - k_full * m_full) // m_low)

    def settled(self, candidates: list[int], m_full: int, m_low: int, hist: int) -> bool:
        """Everything that is left is full precision and fits: nothing has to move, whatever Eq. 3 says."""
        codes = (m_low - self.store.table.unit_bytes) * len(self.twin.ledger)
        return not self.twin.low and len(candidates) * m_full + codes <= hist


@example(64, [(16, 0), (1, 0)], "0.3", 0.1, (2, 4, 9), True, "dequantize")  # two low windows for a full one with codes
@example(  # all that was ever quantized is evicted: nothing is left in host memory
    length=146, steps=[(19, 0), (4, 0)], share="0.3", q=0.1, shape=(8, 5, 32), fill=True, promotion="host"
)
@given(
    length=st.integers(64, 200),
    steps=st.lists(st.tuples(st.integers(1, 19), st.integers(0, 10**6)), min_size=1, max_size=5),
    share=st.sampled_from(("0.3", "0.4", "0.6", "0.9")),
    q=st.sampled_from((0.1, 0.5, 0.7, 1.0)),
    shape=st.sampled_from(((8, 5, 32), (8, 0, 16), (4, 3, 7), (2, 4, 9))),
    fill=st.booleans(),
    promotion=st.sampled_from(("dequantize", "host", "none")),
)
@settings(max_examples=120, deadline=None)
def test_routing_is_algorithm_1(
    length: int,
    steps: list[tuple[int, int]],
    share: str,
    q: float,
    shape: tuple[int, int, int],
    fill: bool,
    promotion: str,
) -> None:
    """Random scores with ties, events after random numbers of tokens, on a real store with exact bytes."""
    window, sink, recent = shape
    policy = qevict(window=window, sink=sink, recent=recent, q=q, fill=fill, promotion=promotion)
    driver = Driver(policy, length)
    for i, (new, seed) in enumerate([(0, 1), *steps]):
        if new:
            extend(driver.store, new, seed)
        draws = torch.randint(0, 5, (4096,), generator=torch.Generator().manual_seed(seed + i)).tolist()
        driver.event(share, iter(draws), room=8)


@pytest.mark.parametrize("params", [{"prefill_scores": "all"}, {"window": 5, "sink": 3}, {"head_scope": "kv_head"}])
def test_protected_units_stay_and_evicted_ones_never_return(params: dict[str, Any]) -> None:
    policy = qevict(**params)
    session = session_of(policy, "0.3", 257, max_new=120)
    session.prefill([random_ids(257, 5)])
    fitted = session.policy
    assert isinstance(fitted, QEvict)
    gone: dict[tuple[int, int], set[int]] = {}
    for step in range(1, 97):
        session.decode([step % 90 + 1])
        if step % policy.omega:
            continue
        seen = session.seq_len[0]
        tiles = set(range(fitted.sink, seen, fitted.window))
        for (index, layer), head in itertools.product(enumerate(kept(session, 0)), range(len(kept(session, 0)[0]))):
            held = {p: t for p, t in layer[head] if p < seen}
            assert set(held) - {0} <= tiles
            assert held[0] == FULL
            assert all(held[w] == FULL for w in tiles if w + fitted.window - 1 >= seen - fitted.recent)
            evicted = (tiles | {0}) - set(held)
            assert gone.setdefault((index, head), set()) <= evicted
            gone[index, head] = evicted
    assert all(gone.values())


# ---- the ledger ----


def entry(store: LayerStore, window: int, head: int) -> tuple[Tensor, ...]:
    """Packed codes and parameters of one window in one KV head, keys then values."""
    rect = store.table.rect()
    coded = [p for p, c in zip(rect.pos[0, 0].tolist(), rect.coded[0, 0].tolist(), strict=True) if c == LOW]
    at = head * len(coded) + coded.index(window)
    parts: list[Tensor] = []
    for lane in (store.keys.lanes[0], store.values.lanes[0]):
        parts += [part[at].clone() for part in lane.slot]
        group = at if lane.group_of is None else int(lane.group_of[at])
        parts += [part[group].clone() for part in lane.shared]
    return tuple(parts)


def place(store: LayerStore, tiers: dict[int, int]) -> None:
    """Send the named windows to the given tiers, the others stay."""
    rect = store.table.rect()
    wanted = [[tiers.get(p, t) for p, t in zip(rect.pos[0, 0].tolist(), rect.tier[0, 0].tolist(), strict=True)]]
    store.apply(Placement(torch.tensor([wanted])), [8])


def full_keys(store: LayerStore, window: int) -> tuple[Tensor, Tensor]:
    """Stored full-precision keys and values [H, W, D] of one window."""
    rect = store.table.rect()
    lens = store.unit_lens(rect)
    before = int(
        sum(n for p, t, n in zip(rect.pos[0, 0], rect.tier[0, 0], lens[0, 0], strict=True) if t == FULL and p < window)
    )
    unit = store.policy.unit
    at = [store.full.start[h] + before for h in range(HEADS)]
    return (
        torch.stack([store.full.k[a : a + unit] for a in at]).clone(),
        torch.stack([store.full.v[a : a + unit] for a in at]).clone(),
    )


@pytest.mark.parametrize("key_params", ["window", "group:8", "group:3", "static", "window8"])
@pytest.mark.parametrize("promotion", ["dequantize", "host"])
def test_codes_outlive_promotion(key_params: str, promotion: str) -> None:
    """demote, promote, demote: the same codes and parameters, whatever the neighbours do; `host` restores every bit."""
    store = store_of(qevict(key_params=key_params, promotion=promotion), 101)
    exact = {w: full_keys(store, w) for w in (5, 13, 21, 29, 37)}
    place(store, dict.fromkeys((5, 13, 21, 29), LOW))
    codes = {(w, h): entry(store, w, h) for w in (5, 13, 21, 29) for h in range(HEADS)}
    read = store.read(keep_working_copy=False)
    decoded = [read.k[read.start[h] + 8 : read.start[h] + 16].clone() for h in range(HEADS)]  # window 13 is the second
    place(store, {13: FULL, 29: EVICTED})
    promoted = full_keys(store, 13)
    if promotion == "host":
        assert all(torch.equal(a, b) for a, b in zip(promoted, exact[13], strict=True))
    else:
        assert torch.equal(promoted[0], torch.stack(decoded))
        assert not torch.equal(promoted[0], exact[13][0])
    extend(store, 3, 9)
    place(store, {37: LOW, 5: FULL})
    place(store, {13: LOW})
    for (window, head), before in codes.items():
        if window != 29:
            after = entry(store, window, head)
            assert len(after) == len(before)
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    place(store, {13: FULL, 5: FULL})
    again = full_keys(store, 13)
    assert all(torch.equal(a, b) for a, b in zip(again, promoted, strict=True))


def test_promotion_none_refuses_a_reconstruction() -> None:
    store = store_of(qevict(promotion="none"), 101)
    place(store, {13: LOW})
    with pytest.raises(ValueError, match="promotion=none"):
        place(store, {13: FULL})


def test_host_copies_are_billed_to_the_host() -> None:
    store = store_of(qevict(promotion="host"), 101)
    place(store, {13: LOW, 21: LOW})
    window = 8 * HEADS * store.geometry.slot_bytes
    assert usage(store, 0).host == 2 * window
    place(store, {13: FULL, 21: EVICTED})
    assert usage(store, 0).host == window


def test_a_promoted_window_costs_both_tiers() -> None:
    store = store_of(qevict(), 101)
    full, low = unit_bytes(store)
    table = store.table.unit_bytes
    place(store, {5: FULL})
    start = usage(store, 0).total
    place(store, {13: LOW})
    assert usage(store, 0).total == start - full + low
    place(store, {13: FULL})
    promoted = usage(store, 0)
    assert promoted.total == start + low - table  # M_f + M_q, with one table entry
    assert promoted.counted["ledger"] > 0
    assert promoted.counted["payload.int2"] == 0
    place(store, {13: EVICTED})
    freed = usage(store, 0)
    assert freed.total == start - full
    assert freed.counted["ledger"] == freed.counted["params"] == 0


# ---- every field at work ----

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"key_params={k}": {"key_params": k} for k in ("window", "group:8", "static", "window8")},
    **{f"promotion={p}": {"promotion": p} for p in ("dequantize", "host", "none")},
    **{f"aged_score={a}": {"aged_score": a} for a in ("zero", "mean_candidate")},
    **{f"decode_scores={d}": {"decode_scores": d} for d in ("last_step", "replay")},
    "prefill_scores=all": {"prefill_scores": "all"},
    "head_scope=kv_head": {"head_scope": "kv_head"},
    "decay": {"decay": 0.9},
    "bits=4/2": {"key_bits": 4},
    "window=1": {"window": 1, "key_params": "static"},
    "window=32": {"window": 32},
    "q=0": {"q": 0.0},
    "q=1": {"q": 1.0},
    "omega=3": {"omega": 3},
}


def run(policy: QEvict, spec: str, length: int = 512, new: int = 20) -> Generation:
    [made] = generate(
        replace(engine(), eos_ids=()),
        policy,
        Budget(spec),
        [prompt(random_ids(length, 7))],
        max_new_tokens=[new],
        stop=(),
        seed=0,
        example_ids=["a"],
    )
    return made


@pytest.mark.parametrize("fields", [{"window": 1}, {"window": 2, "key_bits": 8, "value_bits": 8}])
def test_a_quantized_window_must_be_smaller(fields: dict[str, Any]) -> None:
    """Two 16-bit parameters per channel outweigh what few tokens save; as two tiers (q = 0) the window is fine."""
    with pytest.raises(ValueError, match="larger window"):
        qevict(**fields)
    assert qevict(q=0.0, **fields).window == fields["window"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_fits_and_spends_its_budget(variant: str) -> None:
    for spec in ("0.2", "0.4") if variant == "window=32" else ("0.1", "0.2", "0.4"):
        made = run(qevict(**VARIANTS[variant]), spec)
        assert len(made.new_ids) == 20
        assert made.matched
        assert made.fractions["peak"] <= float(spec)
        assert made.tier_units["full"] > 0
        if variant == "promotion=none":
            assert made.promotions == 0
        if variant == "q=0":
            assert made.tier_units["int2"] == made.demotions == made.promotions == 0


def test_literal_eq_3_may_leave_bytes_unspent() -> None:
    """fill=false: at 40 % everything fits the quantized tier long before its bytes are used, so it is no match."""
    literal, filled = (run(qevict(fill=fill, key_params="static"), "0.4") for fill in (False, True))
    assert literal.fractions["mean"] < filled.fractions["mean"]
    assert filled.matched
    assert not literal.matched


@pytest.mark.parametrize("aged_score", ["accumulated", "zero", "mean_candidate"])
def test_scores_of_windows_that_age(aged_score: str) -> None:
    """What a window brings into its first competition: its own score, nothing, or the mean of the known candidates."""
    policy = qevict(aged_score=aged_score, fill=False)
    store = store_of(policy, 101)

    def event(scores: dict[int, float]) -> dict[int, float]:
        store.table.cover([store.seq_len[0] + 8])
        view = store.view()
        for u, pos in enumerate(view.pos_BHU[0, 0].tolist()):
            view.columns["score"][0, 0, u] = scores.get(pos, 100.0)
        allowed = store.geometry.full_bytes(store.seq_len[0])
        policy.place([view], PlacementCost([store], [8], [allowed], everything=False))
        store.event_len = list(store.seq_len)
        return dict(zip(view.pos_BHU[0, 0].tolist(), view.columns["score"][0, 0].tolist(), strict=True))

    known = list(range(5, 69 - 7, 8))  # last position below 101 - 32
    assert event({w: float(w) for w in known}) == event({w: float(w) for w in known})  # after the prompt nothing is new
    extend(store, 8, 1)
    after = event({w: float(w) for w in known})
    assert [after[w] for w in known] == [float(w) for w in known]
    expected = {"accumulated": 100.0, "zero": 0.0, "mean_candidate": sum(known) / len(known)}[aged_score]
    assert after[69 - 8] == (float(69 - 8) if 69 - 8 in known else expected)
    assert after[known[-1] + 8] == pytest.approx(expected)
    assert after[known[-1] + 16] == 100.0  # still recent


# ---- ablations: routing=once | random, evict=false ----

WINDOWS = (5, 13, 21, 29, 37, 45, 53, 61)  # whose last position has left the 32 newest of 101 tokens


def one_event(
    store: LayerStore, policy: QEvict, num_full: int, scores: dict[int, float]
) -> tuple[dict[int, int], Moves]:
    """Tiers of windows after an event whose history may cost as much as `num_full` full windows, and what moved."""
    store.table.cover([store.seq_len[0] + 8])
    view = store.view()
    for u, pos in enumerate(view.pos_BHU[0, 0].tolist()):
        view.columns["score"][0, 0, u] = scores.get(pos, view.columns["score"][0, 0, u])
    aged = (view.pos_BHU >= 5) & (view.end_BHU <= store.seq_len[0] - 32)
    base = PlacementCost([store], [8], [0], everything=False)
    protected = int(base.bytes_of([Placement(torch.where(aged, EVICTED, FULL))]))
    allowed = protected + num_full * int(unit_bytes(store)[FULL])
    [placement] = policy.place([view], PlacementCost([store], [8], [allowed], everything=False))
    moves = store.apply(placement, [8])
    store.event_len = list(store.seq_len)
    rect = store.table.rect()
    return dict(zip(rect.pos[0, 0].tolist(), rect.tier[0, 0].tolist(), strict=True)), moves


def test_routed_once_by_hand() -> None:
    """Bytes of 2 full windows at q = 0.5: K_f = 1, and 3082 B pay for K_q = 3 windows of 778 B; four are evicted.

    8 tokens later window 69 has aged and enters with the mean of the known, (8 + 7 + 6 + 5) / 4 = 6.5: it goes between
    13 and 21, and 29 has to leave. Full precision is for windows that still have it: 5 and 69.
    """
    policy = qevict(q=0.5, fill=False, routing="once", aged_score="mean_candidate")
    store = store_of(policy, 101)
    assert [int(n) for n in unit_bytes(store)] == [3082, 778]
    tiers, moves = one_event(store, policy, 2, {w: 8.0 - i for i, w in enumerate(WINDOWS)})
    assert {w: tiers[w] for w in WINDOWS if w in tiers} == {5: FULL, 13: LOW, 21: LOW, 29: LOW}
    assert [int(n) for n in moves] == [0, 3, 4]
    twin = copy.deepcopy(store)
    extend(store, 8, 1)
    tiers, moves = one_event(store, policy, 2, {})
    assert {w: t for w, t in tiers.items() if 5 <= w <= 69} == {5: FULL, 13: LOW, 69: LOW, 21: LOW}
    assert [int(n) for n in moves] == [0, 1, 1]

    extend(twin, 8, 1)  # even a score that has grown (nothing in the method lets it) would promote nothing
    again = copy.deepcopy(twin)
    tiers, moves = one_event(twin, policy, 2, {13: 100.0})
    assert tiers[13] == LOW
    assert int(moves.promotions) == 0
    tiers, moves = one_event(again, replace(policy, routing="attention"), 2, {13: 100.0})
    assert tiers[13] == FULL
    assert int(moves.promotions) == 1


def test_routed_once_and_enforced_for_the_prompt_alone_is_one_decision() -> None:
    """Nothing moves while decoding, nor when a question is appended; no query but the prompt's is looked at."""
    budget = Budget("0.3", enforce="prefill")
    fitted = qevict(routing="once").fit(budget, geometry_of(engine()), 257, 40)
    policy, calls, _ = watched(fitted)
    session = KVSession(engine(), policy, budget, 1, max_new=40)
    session.prefill([random_ids(257, 5)])
    observed, before = calls["observe"], kept(session, 0)
    scores = [layer.view().columns["score"].clone() for layer in session.layers.values()]
    for token in random_ids(20, 6):
        session.decode([token])
    session.append([random_ids(9, 7)])
    assert calls["observe"] == observed > 0
    trace = session.trace[0]
    assert trace.promotions == 0
    assert (trace.demotions > 0) & (trace.evictions > 0)
    for layer, old in zip(kept(session, 0), before, strict=True):
        assert layer[0][: len(old[0])] == old[0]
        assert all(tier == FULL for _, tier in layer[0][len(old[0]) :])
    for layer, old_scores in zip(session.layers.values(), scores, strict=True):
        assert torch.equal(layer.view().columns["score"][..., : old_scores.shape[-1]], old_scores)


def test_routed_once_still_holds_the_budget() -> None:
    made = run(qevict(routing="once", aged_score="mean_candidate"), "0.2", new=60)
    assert made.fractions["peak"] <= 0.2
    assert made.promotions == 0
    assert made.events == 1 + 60 // 8
    assert made.matched


def test_random_routing_by_hand() -> None:
    """The best are those with the highest draws of the row's generator, in the order of live units; drawn anew."""
    policy = qevict(q=0.5, fill=False, routing="random")
    store = store_of(policy, 101)
    generator, twin = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    store.rng = lambda row: generator
    store.table.cover([109])
    drawn = dict(zip(store.table.rect().pos[0, 0].tolist(), torch.rand(14, generator=twin).tolist(), strict=True))
    best = sorted(WINDOWS, key=lambda w: -drawn[w])
    tiers, _ = one_event(store, policy, 2, {})
    assert {w: tiers[w] for w in WINDOWS if w in tiers} == {best[0]: FULL, **dict.fromkeys(best[1:4], LOW)}
    again = dict(zip(tiers, torch.rand(len(tiers), generator=twin).tolist(), strict=True))
    left, _ = one_event(store, policy, 2, {})
    assert dict(zip(left, store.view().columns["score"][0, 0].tolist(), strict=True)) == {w: again[w] for w in left}
    assert [w for w, t in left.items() if t == FULL and w in WINDOWS] == [max(best[:4], key=lambda w: again[w])]


def test_random_routing_looks_at_no_attention() -> None:
    policy, calls, _ = watched(qevict(routing="random").fit(Budget("0.4"), geometry_of(engine()), 400, 40))
    session = KVSession(engine(), policy, Budget("0.4"), 1, max_new=40)
    session.prefill([random_ids(400, 5)])
    for token in random_ids(40, 6):
        session.decode([token])
    assert calls["observe"] == calls["probe"] == 0
    assert session.trace[0].promotions > 0


NO_EVICTION = qevict(evict=False, key_params="static")


def test_without_eviction_the_bytes_beside_int2_are_full_precision() -> None:
    """With bytes of 4 full windows, eight at 394 B leave 9176 B: 3 of them full, 2688 B dearer each, as ranked."""
    store = store_of(NO_EVICTION, 101)
    full, low = (int(n) for n in unit_bytes(store))
    assert (full, low) == (3082, 394)
    tiers, moves = one_event(store, NO_EVICTION, 4, {w: 8.0 - i for i, w in enumerate(WINDOWS)})
    assert {w: tiers[w] for w in WINDOWS} == dict.fromkeys(WINDOWS[:3], FULL) | dict.fromkeys(WINDOWS[3:], LOW)
    assert [int(n) for n in moves] == [0, 5, 0]
    with pytest.raises(Infeasible, match=r"\[101\] tokens do not fit without eviction"):
        one_event(store_of(NO_EVICTION, 101), NO_EVICTION, 1, {})


@pytest.mark.parametrize("params", [{"key_params": "static"}, {"key_params": "window8"}, {"head_scope": "kv_head"}])
def test_what_all_int2_costs_is_what_the_store_says(params: dict[str, Any]) -> None:
    """At every length; equal where the unfinished window is as long as it can be."""
    policy = replace(NO_EVICTION, **params)
    for length in range(101, 117):
        store = store_of(policy, length)
        store.table.cover([length + 8])
        view = store.view()
        aged = view.alive_BHU & (view.pos_BHU >= 5) & (view.end_BHU <= length - 32)
        cost = PlacementCost([store], [8], [0], everything=False)
        exact = int(cost.bytes_of([Placement(torch.where(aged, LOW, FULL))]))
        bound = all_low_bytes(policy, store.geometry, 32, length)
        assert bound >= exact
        assert bound == exact or (length - 37) % 8 != 7


@pytest.mark.parametrize("spec", ["0.2", "0.4"])
def test_without_eviction_nothing_is_evicted(spec: str) -> None:
    made = run(NO_EVICTION, spec, new=60)
    assert made.evictions == 0
    assert made.demotions > 0
    assert made.fractions["peak"] <= float(spec)
    assert made.matched


def test_infeasible_without_eviction_names_the_nearest_fraction() -> None:
    geometry = geometry_of(engine())
    with pytest.raises(Infeasible, match="nearest feasible fraction is 0.") as refusal:
        NO_EVICTION.fit(Budget("0.1"), geometry, 512, 20)
    nearest = str(refusal.value).rpartition("is ")[2]
    assert NO_EVICTION.fit(Budget(nearest), geometry, 512, 20).recent == 0
    with pytest.raises(Infeasible, match=f"is {nearest}"):
        NO_EVICTION.fit(Budget(f"{float(nearest) - 0.001:.3f}"), geometry, 512, 20)
    with pytest.raises(Infeasible, match="5 sink and 32 recent tokens"):
        NO_EVICTION.fit(Budget("0.2", small_budget="refuse"), geometry, 512, 20)
    assert NO_EVICTION.fit(Budget("0.2"), geometry, 512, 20).recent < 32
    assert NO_EVICTION.fit(Budget("0.5"), geometry, 512, 20).recent == 32
    assert run(NO_EVICTION, nearest).evictions == 0


def test_shared_parameters_cannot_be_bounded_without_eviction() -> None:
    with pytest.raises(ValueError, match="cannot bound what group:N costs"):
        qevict(evict=False, key_params="group:8")


# ---- scripts/promotion_mass.py ----


def test_promotion_mass_is_full_kv_attention(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "scripts" / "promotion_mass.py"
    spec = importlib.util.spec_from_file_location("promotion_mass", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(script)
    sys.path[:] = before
    policy = qevict()
    moves = script.measure(engine(), policy, Budget("0.3"), random_ids(340, 3), 300)
    assert {move.kind for move in moves} == {"promoted", "aged", "displaced"}
    assert {move.seen for move in moves} <= set(range(308, 340, 8))
    expected = {
        (seen, layer): naive.window_scores(heads, list(range(seen, seen + 8)), policy.window, policy.sink)
        for layer, heads in enumerate(attentions(340, 3))
        for seen in range(308, 340, 8)
    }
    for move in moves:
        layer, _, window = move.place
        assert move.mass == pytest.approx(expected[move.seen, layer][window], abs=1e-4)
        if move.kind == "aged":
            assert move.seen - 8 < window + 8 + policy.recent <= move.seen
    assert script.main(["--model", "tiny", "--prompt", "300", "--tokens", "32", "--budget", "0.3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].startswith("promoted ")
    assert len(printed) == 4
