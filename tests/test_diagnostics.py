"""Diagnostics of hand-made streams, worked out in fractions, and against their definitions in loops."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qevict_bench.agreement import agreement, score_agreement
from qevict_bench.diagnostics import (
    NOT_YET,
    History,
    Layout,
    Spells,
    best,
    churn,
    fmm,
    hindsight_fmm,
    hindsight_missed,
    kinds,
    lir,
    moves,
    needle_fate,
    oracle_by_next_mass,
    oracle_by_score,
    regret,
    shares,
    without_sinks,
)
from qevict_bench.policy import EVICTED, FULL

LOW = 1
TOKENS = Layout(unit=1, offset=0, sink=0, recent=0)


def close(found: Tensor, expected: Sequence[float]) -> None:
    torch.testing.assert_close(
        found.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6, equal_nan=True
    )


def history(
    tiers: Sequence[Sequence[int]],
    masses: Sequence[Sequence[float]],
    steps: Sequence[int],
    *,
    seq_len: Sequence[int] = (),
    layout: Layout = TOKENS,
) -> History:
    """One layer, one KV head; `tiers` and `masses` per event and unit. By default every unit is complete."""
    tier_KU, mass_KU = torch.tensor(tiers, dtype=torch.int8), torch.tensor(masses)
    seen = torch.tensor(list(seq_len) or [tier_KU.shape[1] * layout.unit] * len(tier_KU))
    return History(layout, seen, torch.tensor(steps), tier_KU[:, None, None], mass_KU[:, None, None])


# Four tokens, three events, followed by 2, 2 and 1 steps.
TIERS = [[FULL, LOW, EVICTED, FULL], [FULL, FULL, EVICTED, LOW], [LOW, EVICTED, EVICTED, FULL]]
MASSES = [[0.8, 0.6, 0.4, 0.2], [1.0, 0.2, 0.6, 0.2], [0.5, 0.25, 0.25, 0.0]]
SMALL = history(TIERS, MASSES, [2, 2, 1])


# ---- units ----


def test_units_of_a_layout() -> None:
    layout = Layout(unit=4, offset=2, sink=2, recent=3)  # 0 1 | 2 3 4 5 | 6 7 8 9 | 10 11 ..
    assert layout.unit_of(torch.tensor([0, 1, 2, 5, 6, 11])).tolist() == [0, 0, 1, 1, 2, 3]
    assert (layout.first_U(4).tolist(), layout.end_U(4).tolist()) == ([0, 2, 6, 10], [2, 6, 10, 14])
    assert [layout.num_units(num) for num in (2, 3, 6, 7)] == [1, 2, 2, 3]
    seen = torch.tensor([8, 9, 12, 13, 17])  # a unit competes once its last position is older than the 3 newest
    assert layout.candidate_KU(seen, 4).long().tolist() == [
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 1],
    ]


def test_units_without_offset() -> None:
    layout = Layout(unit=2, offset=0, sink=3, recent=0)  # the sink reaches into unit 1
    assert layout.unit_of(torch.arange(5)).tolist() == [0, 0, 1, 1, 2]
    assert layout.sink_U(4).tolist() == [True, True, False, False]
    assert layout.candidate_KU(torch.tensor([7]), 4).tolist() == [[False, False, True, False]]


def test_the_offset_never_competes() -> None:
    """Its length is another, so that counts would not be bytes."""
    assert Layout(unit=4, offset=2, sink=0, recent=0).candidate_KU(torch.tensor([8]), 2).tolist() == [[False, True]]


# ---- what eviction costs ----


def test_future_missed_mass() -> None:
    close(
        fmm(SMALL),
        [
            (0.4 + 0.6 + 0.25) / 5,  # token 2, all five steps
            (0.6 + 0.25) / 3,
            0.25 + 0.25,  # tokens 1 and 2
        ],
    )


def test_quantized_as_evicted() -> None:
    close(
        fmm(SMALL, quantized_lost=True),
        [
            (0.6 + 0.2 + 0.25 + 0.4 + 0.6 + 0.25) / 5,  # tokens 1, 2
            (0.6 + 0.25 + 0.2 + 0.0) / 3,  # tokens 2, 3
            0.5 + 0.25 + 0.25,  # tokens 0, 1, 2
        ],
    )


def test_regret() -> None:
    hindsight = [
        0.4 / 5,  # futures 2.3, 1.05, 1.25, 0.4: the least one
        0.2 / 3,  # 1.5, 0.45, 0.85, 0.2
        0.0 + 0.25,  # 0.5, 0.25, 0.25, 0: the least two
    ]
    close(hindsight_fmm(SMALL), hindsight)
    close(regret(SMALL), [1.25 / 5 - 0.4 / 5, 0.85 / 3 - 0.2 / 3, 0.5 - 0.25])


def test_hindsight_evicts_what_competes() -> None:
    """Token 3 is recent and token 0 a sink: of 1 and 2 the better choice is 1 (1.05 against 1.25)."""
    guarded = history(TIERS, MASSES, [2, 2, 1], layout=Layout(1, 0, sink=1, recent=1))
    close(hindsight_fmm(guarded)[:1], [1.05 / 5])
    close(hindsight_fmm(guarded)[2:], [0.5])  # two are gone, and only these two compete


def test_what_was_evicted_beside_the_candidates_counts_too() -> None:
    """A method that evicts among the recent: hindsight may take those or any candidate."""
    gone = history([[FULL, FULL, EVICTED, FULL]], [[0.1, 0.2, 0.6, 0.1]], [1], layout=Layout(1, 0, 0, recent=2))
    close(hindsight_fmm(gone), [0.1])
    close(regret(gone), [0.5])


def test_no_step_after_the_last_event() -> None:
    ended = history(TIERS, [*MASSES[:2], [0.0] * 4], [2, 2, 0])
    close(fmm(ended), [(0.4 + 0.6) / 4, 0.6 / 2, math.nan])
    close(regret(ended), [(1.0 - 0.4) / 4, (0.6 - 0.2) / 2, math.nan])


@pytest.mark.parametrize("shared", [True, False])
def test_fmm_is_its_definition(shared: bool) -> None:
    """Mean over steps s > t, layers and query heads of sum_{i in E_t} m_s(i), term by term; steps one by one."""
    generator = torch.Generator().manual_seed(3)
    steps, layers, kv_heads, group, tokens = [3, 2, 4, 1], 2, 3, 2, 7
    p_SLHGU = torch.rand(sum(steps), layers, kv_heads, group, tokens, generator=generator)
    p_SLHGU /= p_SLHGU.sum(-1, keepdim=True)
    tier = torch.zeros(len(steps), layers, 1 if shared else kv_heads, tokens, dtype=torch.int8)
    for k in range(len(steps)):
        gone = torch.rand(tier.shape[1:], generator=generator) < 0.3
        tier[k] = torch.where(gone | (tier[max(k - 1, 0)] == EVICTED), EVICTED, tier[k])
    begins = [sum(steps[:k]) for k in range(len(steps))]
    mass = torch.stack([p_SLHGU[b : b + n].mean(3).sum(0) for b, n in zip(begins, steps, strict=True)])
    made = History(TOKENS, torch.full((len(steps),), tokens), torch.tensor(steps), tier, mass)
    for k, begin in enumerate(begins):
        terms = []
        for s in range(begin, sum(steps)):
            for layer in range(layers):
                for head in range(kv_heads * group):
                    row = tier[k, layer, 0 if shared else head // group]
                    missed = p_SLHGU[s, layer, head // group, head % group][row == EVICTED]
                    terms.append(float(missed.sum()))
        assert float(fmm(made)[k]) == pytest.approx(sum(terms) / len(terms), abs=1e-6)
    assert bool((regret(made) >= -1e-12).all())


def test_an_oracle_of_each_step() -> None:
    """Two heads, one step: each evicts as many as it has, the least of that step."""
    mass_LHU = torch.tensor([[[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]])
    tier_LTU = torch.tensor([[[EVICTED, FULL, FULL, FULL], [EVICTED, LOW, EVICTED, FULL]]])
    found = hindsight_missed(mass_LHU, tier_LTU, torch.tensor([True, True, True, True]), TOKENS)
    close(found, [[0.1, 0.1 + 0.2]])
    found = hindsight_missed(mass_LHU, tier_LTU, torch.tensor([False, False, True, False]), TOKENS)
    close(found, [[0.2, 0.1 + 0.3]])  # of tokens 0 and 2: the evicted and the candidates


def test_an_evicted_offset_stays_evicted() -> None:
    mass_LHU, tier_LTU = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[[EVICTED, EVICTED, FULL]]])
    found = hindsight_missed(mass_LHU, tier_LTU, torch.tensor([False, True, True]), Layout(4, 2, 0, 0))
    close(found, [[0.5 + 0.2]])


# ---- where attention goes ----


def test_shares_by_tier() -> None:
    """sink | full | quantized | evicted | recent, of two heads that hold the middle differently."""
    sink, candidate = torch.tensor([1, 0, 0, 0, 0]).bool(), torch.tensor([0, 1, 1, 1, 0]).bool()
    tier_TU = torch.tensor([[FULL, FULL, LOW, EVICTED, NOT_YET], [FULL, LOW, FULL, 2, FULL]])
    kind_TU = kinds(tier_TU, candidate, sink)
    assert kind_TU.tolist() == [[0, 1, 2, 4, 3], [0, 2, 1, 2, 3]]
    mass_HPU = torch.tensor([[[0.5, 0.2, 0.1, 0.1, 0.1]], [[0.1, 0.2, 0.3, 0.1, 0.3]]])
    # head 0: 5/10 2/10 1/10 1/10 1/10; head 1: sink 1/10, full 3/10, quantized 3/10, recent 3/10, evicted 0
    close(shares(mass_HPU, kind_TU), [[0.3, 0.25, 0.2, 0.2, 0.05]])
    close(without_sinks(torch.tensor([0.3, 0.25, 0.2, 0.2, 0.05])), [25 / 70, 20 / 70, 20 / 70, 5 / 70])


def test_tiers_tell_the_truth_about_protected_places() -> None:
    """A sink or a recent token that is evicted or quantized counts as that."""
    sink, candidate = torch.tensor([True, True, False]), torch.tensor([False, False, False])
    assert kinds(torch.tensor([[EVICTED, LOW, LOW]]), candidate, sink).tolist() == [[4, 2, 2]]


def test_shared_tiers_hold_for_all_heads() -> None:
    mass_HPU = torch.tensor([[[0.5, 0.5]], [[0.1, 0.9]]])
    close(shares(mass_HPU, torch.tensor([[1, 4]])), [[0, 0.3, 0, 0, 0.7]])


def test_needle_fate() -> None:
    layout = Layout(unit=2, offset=1, sink=1, recent=0)  # 0 | 1 2 | 3 4 | 5 6
    tier = torch.tensor([[[[FULL, LOW, EVICTED, NOT_YET]], [[FULL, FULL, 2, NOT_YET]]]], dtype=torch.int8)
    made = History(layout, torch.tensor([6]), torch.tensor([1]), tier, torch.zeros(1, 2, 2, 4))
    found = needle_fate(made, torch.tensor([2, 3, 4, 5]), event=0)
    # layer 0: 2 quantized, 3 and 4 evicted, 5 full; layer 1: 2 full, 3 and 4 quantized, 5 full
    assert found == pytest.approx({"full": 3 / 8, "quantized": 3 / 8, "evicted": 2 / 8})
    with pytest.raises(ValueError, match="at least one position"):
        needle_fate(made, torch.tensor([], dtype=torch.int64), event=0)


# ---- how steady routing is ----


def test_moves() -> None:
    found = moves(
        history(
            [[FULL, LOW, EVICTED, NOT_YET], [LOW, FULL, EVICTED, LOW], [2, EVICTED, EVICTED, FULL]], MASSES, [1] * 3
        )
    )
    assert found.promotions_K.tolist() == [0, 1, 1]
    assert found.demotions_K.tolist() == [1, 2, 0]  # between low-bit tiers: none
    assert found.evictions_K.tolist() == [1, 0, 1]


def test_churn() -> None:
    """Of six tokens the last one is recent at the first event, so it does not count between the first two."""
    tiers = [
        [FULL, FULL, LOW, LOW, EVICTED, NOT_YET],
        [FULL, LOW, FULL, EVICTED, EVICTED, FULL],
        [FULL, LOW, LOW, EVICTED, EVICTED, EVICTED],
    ]
    made = history(tiers, [[0.0] * 6] * 3, [1, 1, 1], seq_len=[5, 6, 6])
    found = churn(made)
    assert found.value == pytest.approx((1 - 3 / 4 + (1 - 3 / 4)) / 2)  # 0123 -> 012; 0125 -> 012
    assert (found.num, found.undefined) == (2, 0)
    found = churn(made, with_quantized=False)
    assert found.value == pytest.approx((1 - 1 / 3 + (1 - 1 / 3)) / 2)  # 01 -> 02; 025 -> 0


def test_churn_is_a_mean_over_layers_and_heads_of_what_is_defined() -> None:
    tier = torch.tensor([[[FULL, FULL], [EVICTED, EVICTED]], [[FULL, EVICTED], [EVICTED, EVICTED]]], dtype=torch.int8)
    made = History(TOKENS, torch.tensor([2, 2]), torch.tensor([1, 1]), tier[:, None], torch.zeros(2, 1, 2, 2))
    assert churn(made) == (pytest.approx(1 - 1 / 2), 1, 1)  # the second head holds nothing at both events
    assert math.isnan(churn(history([[EVICTED]], [[0.0]], [1])).value)


def masks(*units: str) -> tuple[Tensor, Tensor]:
    """Events as letters: F in Full, o outside, . not competing yet."""
    full = torch.tensor([[unit[k] == "F" for unit in units] for k in range(len(units[0]))])
    candidate = torch.tensor([[unit[k] != "." for unit in units] for k in range(len(units[0]))])
    return full[:, None, None], candidate


@pytest.mark.parametrize(
    ("unit", "span", "expected", "strict"),
    [
        ("FFFFFFFF", 1, (0, 0), (0, 0)),
        ("FooooFFF", 4, (1, 1), (1, 1)),
        ("FoooFFFF", 4, (0, 0), (0, 0)),  # three events are no spell of four
        ("FoooFFFF", 2, (1, 1), (1, 1)),
        ("FooooFooo", 4, (1, 1), (1, 1)),
        ("FoooFooooF", 1, (2, 2), (2, 2)),
        ("ooooFFFF", 4, (1, 1), (0, 0)),  # never in Full before
        ("..ooooFF", 4, (1, 1), (0, 0)),  # recent tokens are not Full in this sense
        ("..Fooooo", 4, (0, 1), (0, 1)),  # evicted, or cut off by the end
        ("Fooo", 4, (0, 0), (0, 0)),
        ("ooooFooooF", 4, (2, 2), (1, 1)),
        ("oFoFoF", 1, (3, 3), (2, 2)),
        ("FoooooooooF", 8, (1, 1), (1, 1)),
    ],
)
def test_lir(unit: str, span: int, expected: tuple[int, int], strict: tuple[int, int]) -> None:
    assert lir(*masks(unit), span) == expected
    assert lir(*masks(unit), span, strict=True) == strict


def test_lir_counts_spells_of_all_units() -> None:
    found = lir(*masks("FooooF", "ooooFF", "oooooo", "FFFFFF"))
    assert found == Spells(2, 3)
    assert found.share == pytest.approx(2 / 3)
    assert math.isnan(lir(*masks("FFFF")).share)
    with pytest.raises(ValueError, match="span=0"):
        lir(*masks("F"), span=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("Fo", min_size=9, max_size=9), min_size=1, max_size=4), st.integers(1, 5), st.booleans())
def test_lir_is_what_a_pattern_finds(units: list[str], span: int, strict: bool) -> None:
    spells = [spell for unit in units for spell in re.finditer(f"o{{{span},}}", unit)]
    if strict:
        spells = [spell for spell in spells if spell.start() > 0]
    entered = [spell for spell in spells if spell.end() < 9]
    assert lir(*masks(*units), span, strict) == (len(entered), len(spells))


# ---- oracles ----


def test_oracle_by_score() -> None:
    """K_f is 1, 1, 2 as in the run; scores 1 3 2 0, then 1.8 3.6 2.4 0.2, then 2.8 3.8 3.0 0.4."""
    tiers = [[FULL, LOW, LOW, EVICTED], [LOW, FULL, LOW, EVICTED], [FULL, LOW, FULL, EVICTED]]
    made = history(tiers, MASSES, [2, 2, 1])
    found = oracle_by_score(made, torch.tensor([[[1.0, 3.0, 2.0, 0.0]]]))
    assert found[:, 0, 0].long().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0]]
    late = oracle_by_score(made, torch.tensor([[[2.5, 2.6, 0.0, 0.0]]]))  # 2.5 2.6, 3.3 3.2, 4.3 3.4
    assert late[:, 0, 0].long().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert lir(late, made.candidate_KU, span=1) == (2, 4)  # 0 enters late, 1 goes and returns; 2 and 3 never


def test_oracle_by_next_mass() -> None:
    tiers = [[FULL, LOW, LOW, EVICTED], [LOW, FULL, FULL, EVICTED], [FULL, LOW, FULL, EVICTED]]
    made = history(tiers, [*MASSES[:2], [0.0] * 4], [2, 2, 0])
    found = oracle_by_next_mass(made)
    assert found[:, 0, 0].long().tolist() == [[1, 0, 0, 0], [1, 0, 1, 0]]  # most of 0.8 ..; of 1.0 0.2 0.6


def test_oracles_see_what_competes() -> None:
    made = history([[FULL, FULL, FULL, FULL]], MASSES[:1], [2], layout=Layout(1, 0, sink=1, recent=1))
    assert made.k_full_KLT.tolist() == [[[2]]]
    assert oracle_by_next_mass(made)[0, 0, 0].tolist() == [False, True, True, False]


def test_shared_tiers_rank_by_the_mean_over_heads() -> None:
    """Eq. 1 has one score per layer: means 0.45, 0.5, 0.05; the first head alone would choose token 0."""
    mass = torch.tensor([[[[0.8, 0.1, 0.1], [0.1, 0.9, 0.0]]]])
    tier = torch.tensor([[[[LOW, FULL, LOW]]]], dtype=torch.int8)
    made = History(TOKENS, torch.tensor([3]), torch.tensor([1]), tier, mass)
    assert oracle_by_next_mass(made)[0, 0].tolist() == [[False, True, False]]
    first = torch.tensor([[[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]])
    assert oracle_by_score(made, first)[0, 0].tolist() == [[True, False, False]]


def test_ties_go_to_the_earlier_unit() -> None:
    found = best(torch.ones(5), torch.tensor([0, 1, 1, 1, 1]).bool(), torch.tensor(2))
    assert found.tolist() == [False, True, True, False, False]
    assert not bool(best(torch.ones(3), torch.ones(3, dtype=torch.bool), torch.tensor(0)).any())


# ---- do scores agree ----


def test_agreement() -> None:
    cosine, spearman, overlap = agreement(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([4.0, 3.0, 0.0]), top=1)
    assert cosine == pytest.approx(24 / 25)
    assert spearman == pytest.approx(1 - 6 * (1 + 1 + 0) / (3 * 8))  # 1 - 6 sum d^2 / (n (n^2 - 1))
    assert overlap == 0
    assert agreement(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([4.0, 3.0, 0.0]), top=2)[2] == 1
    assert agreement(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]), top=7)[2] == 1  # no more than there are


def test_equal_scores_share_their_rank() -> None:
    """Ranks 1.5 1.5 3 4 against 1 2 3 4: deviations -1 -1 .5 1.5 and -1.5 -.5 .5 1.5."""
    spearman = agreement(torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.1, 0.2, 0.3, 0.4]), top=1)[1]
    assert spearman == pytest.approx(4.5 / math.sqrt(4.5 * 5))


@pytest.mark.parametrize(
    ("first", "second", "top", "undefined"),
    [
        ([1.0], [1.0], 1, (True, True, True)),
        ([0.0, 0.0], [1.0, 2.0], 1, (True, True, False)),
        ([1.0, 1.0], [1.0, 2.0], 1, (False, True, False)),
        ([1.0, 2.0], [1.0, 2.0], 0, (False, False, True)),
    ],
)
def test_undefined_agreement(
    first: list[float], second: list[float], top: int, undefined: tuple[bool, bool, bool]
) -> None:
    found = agreement(torch.tensor(first), torch.tensor(second), top)
    assert tuple(map(math.isnan, found)) == undefined


def test_score_agreement_is_a_mean_beside_its_baselines() -> None:
    """Two layers; the third unit is not quantized, and the fourth has no increment of its own."""
    full = torch.tensor([[[[3.0, 4.0, 9.0, 9.0]], [[1.0, 1.0, 9.0, 9.0]]]])
    mine = torch.tensor([[[[4.0, 3.0, 0.0, math.nan]], [[1.0, 0.0, 0.0, math.nan]]]])
    where = torch.tensor([True, True, False, True]).expand(full.shape)
    found = score_agreement(mine, full, where, torch.ones(1, 2, 1, dtype=torch.int64), seed=0)
    assert found.measured.cosine == (pytest.approx((24 / 25 + 1 / math.sqrt(2)) / 2), 2, 0)
    assert found.measured.spearman == (pytest.approx(-1), 1, 1)  # FullKV's second increments are constant
    assert found.uniform.cosine.value == pytest.approx((7 / (5 * math.sqrt(2)) + 1) / 2)
    assert found.uniform.overlap.value == pytest.approx(1 / 2)  # one of two, at random
    shuffled = found.shuffled.cosine.value
    assert min(abs(shuffled - (first + 1) / 2) for first in (1, 24 / 25)) < 1e-6


def test_shuffling_is_seeded() -> None:
    full = torch.rand(3, 2, 1, 9, generator=torch.Generator().manual_seed(0))
    everywhere, top = torch.ones(full.shape, dtype=torch.bool), torch.full((3, 2, 1), 3)
    first, again, other = (score_agreement(full, full, everywhere, top, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first.measured.cosine.value == pytest.approx(1)
    assert first.measured.overlap.value == 1
    assert first.shuffled.overlap.value < 1
