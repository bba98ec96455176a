"""Scalars and curves of a record made by hand, with values worked out beside it, and means over streams."""

from __future__ import annotations

from math import isnan, nan
from typing import Any

import pytest
import torch
from presets import qevict
from tiny_models import KeepSuffix

from qevict_bench.diagnostics import NOT_YET, History, Layout
from qevict_bench.measures import Answer, Curve, Measured, busiest, differences, mean_curve, measure, spread, spreads
from qevict_bench.policy import EVICTED, FULL
from qevict_bench.record import Record, Sizes
from qevict_bench.statistics import bootstrap

LOW = 1


def record(**changes: Any) -> Record:
    """One layer and head, units of one token, a sink and one recent token; events after 4, 5 and 6 tokens.

    Unit 1 goes from full to low, unit 2 from low to full, unit 3 is evicted once it competes, unit 4 competes last.
    """
    tiers = [
        [FULL, FULL, LOW, FULL, NOT_YET, NOT_YET],
        [FULL, LOW, FULL, EVICTED, FULL, NOT_YET],
        [FULL, LOW, FULL, EVICTED, FULL, FULL],
    ]
    mass = [[0.4, 0.2, 0.1, 0.1, 0.2, 0.0], [0.3, 0.1, 0.2, 0.1, 0.2, 0.1], [0.0] * 6]
    history = History(
        Layout(1, 0, 1, 1),
        torch.tensor([4, 5, 6]),
        torch.tensor([1, 1, 0]),
        torch.tensor(tiers, dtype=torch.int8)[:, None, None],
        torch.tensor(mass)[:, None, None],
    )
    values: dict[str, Any] = {
        "name": "by hand",
        "policy": KeepSuffix(),
        "history": history,
        "prefill_LHU": torch.tensor([[[2.0, 0.5, 0.8, 0.1, 0.0, 0.0]]]),
        "shares_S5": torch.tensor([[0.4, 0.2, 0.1, 0.2, 0.1], [0.3, 0.2, 0.1, 0.3, 0.1]]),
        "oracle_missed_S": torch.tensor([0.03, 0.5]),
        "kl_S": torch.tensor([0.25, nan]),
        "same_S": torch.tensor([1.0, nan]),
        "output_error_SL": torch.tensor([[0.2], [0.9]]),
        "decoded_S": torch.tensor([True, False]),
        "score_KLTU": None,
        "score_first_LTU": None,
        "score_last_LTU": None,
        "coded_KLHU": None,
        "sizes": (Sizes(100, 0, 40, 80), Sizes(90, 9, 40, 80), Sizes(100, 20, 20, 80)),
        "fraction": 0.3,
    }
    return Record(**{**values, **changes})


EXPECTED = {
    "k_full": 4 / 3,  # units 1; 2; 2 and 4
    "k_quantized": 1.0,
    "protected": (0.5 + 0.5 + 0.25) / 3,
    "fraction": 0.3,
    "fmm.mean": 0.05,  # nothing evicted at event 0, unit 3 at event 1, no step after event 2
    "fmm.end": 0.1,
    "fmm.lost.mean": (0.15 + 0.2) / 2,  # unit 2 over two steps; units 1 and 3 in the last
    "fmm.lost.end": 0.2,
    "fmm.hindsight.mean": 0.05,  # units 1 and 3 both have 0.1
    "regret.mean": 0.0,
    "regret.end": 0.0,
    "missed": 0.1,  # of the decoded step alone, as everything that follows
    "missed.oracle": 0.03,
    "mass.sink": 0.4,
    "mass.full": 0.2,
    "mass.quantized": 0.1,
    "mass.recent": 0.2,
    "mass.evicted": 0.1,
    "mass_no_sinks.full": 0.2 / 0.6,
    "mass_no_sinks.evicted": 0.1 / 0.6,
    "mass_no_sinks.exact": 0.4 / 0.6,
    "churn.held": 0.0,
    "churn.full": 0.5,  # {1} became {2}, which stayed
    "lir.deployed.1": 1 / 3,  # unit 2 entered; units 1 and 3 are out
    "spells.deployed.1": 3.0,
    "lir.deployed.2": 0.0,
    "lir.deployed.1.strict": 0.0,  # of unit 1 alone, which was in Full
    "spells.deployed.1.strict": 1.0,
    "lir.by_score.1": 1 / 3,  # unit 2 is full from the first event on, unit 1 comes second at the last; 3 and 4 are out
    "spells.by_score.1": 3.0,
    "lir.by_score.2": 0.5,
    "kl": 0.25,
    "same_token": 1.0,
    "output_error": 0.2,
    "first.promotions": 0.0,
    "first.demotions": 1.0,
    "first.evictions": 0.0,
    "moves.promotions": 0.5,
    "moves.demotions": 0.5,
    "moves.evictions": 0.5,
    "ledger.bytes": 29 / 3,
    "ledger.share": 0.1,
    "ledger.peak": 0.2,
    "needle.after_prefill.full": 1.0,
    "needle.before_answer.full": 0.0,
    "needle.before_answer.quantized": 0.5,
    "needle.end.evicted": 0.5,
}


def test_scalars_are_what_was_worked_out() -> None:
    found = measure(record(), Answer((1, 3), 1), 0)
    assert found.stream == "by hand"
    assert {key: found.scalars[key] for key in EXPECTED} == pytest.approx(EXPECTED, abs=1e-7)


def test_what_is_undefined_is_nan_or_absent() -> None:
    found = measure(record(), Answer((), 0), 0).scalars
    assert isnan(found["lir.deployed.4"])
    assert found["spells.deployed.4"] == 0
    assert not any(key.startswith(("needle", "agreement")) for key in found)
    appended = measure(record(decoded_S=torch.tensor([False, False])), Answer((), 0), 0).scalars
    assert all(isnan(appended[key]) for key in ("missed", "mass.sink", "mass_no_sinks.exact", "kl", "output_error"))


def test_score_agreement_of_both_modes() -> None:
    history = record().history
    wide = torch.zeros(history.tier_KLTU.shape)
    two = history.tier_KLTU.clone()
    two[0, 0, 0, 1:3] = LOW  # two quantized units, so that there is something to rank
    changed = History(history.layout, history.seq_len_K, history.steps_K, two, history.mass_KLHU)
    own = wide.masked_fill(two <= FULL, nan)
    own[0, 0, 0, 1:3] = torch.tensor([0.4, 0.2])  # twice FullKV's 0.2 and 0.1
    coded = own.clone()
    coded[0, 0, 0, 1:3] = torch.tensor([0.1, 0.2])
    found = measure(record(history=changed, score_KLTU=own, coded_KLHU=coded), Answer((), 0), 0).scalars
    assert found["agreement.deployed.measured.cosine"] == pytest.approx(1)
    assert found["agreement.deployed.measured.spearman"] == pytest.approx(1)
    assert found["agreement.codec.measured.cosine"] == pytest.approx(0.8)
    assert found["agreement.codec.measured.spearman"] == pytest.approx(-1)
    assert found["agreement.deployed.uniform.cosine"] == pytest.approx(0.3 / (2**0.5 * 0.05**0.5))


def test_standing_of_scores() -> None:
    """At the last event unit 2 is full, unit 1 low, unit 4 has just begun to compete as full."""
    own = torch.tensor([[0.0, 0.5, 0.25, 0.0, 0.0, nan], [0.0, 0.3, 0.75, 0.0, 2.0, 0.0], [nan] * 6])[:, None, None]
    first = torch.tensor([[[9.0, 1.0, 2.0, 0.5, nan, nan]]])
    last = torch.tensor([[[9.0, 1.8, 3.0, 0.5, 2.2, 0.0]]])
    scores = {"score_KLTU": own, "score_first_LTU": first, "score_last_LTU": last}
    found = measure(record(**scores), Answer((), 0), 0).scalars
    assert found["score.prefill_share"] == pytest.approx((1.0 + 2.0) / (1.8 + 3.0 + 2.2))
    assert found["score.tokens_to_promote"] == pytest.approx((2.2 - 1.8) / ((0.5 + 0.3) / 2))
    decayed = measure(record(**scores, policy=qevict(decay=0.5)), Answer((), 0), 0).scalars
    assert isnan(decayed["score.prefill_share"])


def test_curves_stand_at_tokens_after_the_prefill() -> None:
    found = measure(record(), Answer((), 0), 0).curves
    assert list(found) == ["fmm", "moves", "bytes", "attention", "predictions", "output_error"]
    assert (found["fmm"].axis, found["fmm"].at) == ("tokens", (0, 1, 2))
    assert found["fmm"].columns["evicted"] == pytest.approx((0, 0.1, nan), nan_ok=True)
    assert found["fmm"].columns["evicted_or_quantized"] == pytest.approx((0.15, 0.2, nan), nan_ok=True)
    assert found["moves"].columns["promotions"] == (0, 1, 0)
    assert found["moves"].columns["k_full"] == (1, 1, 2)
    assert found["bytes"].columns["ledger"] == (0, 9, 20)
    assert found["attention"].at == (1, 2)
    assert found["attention"].columns["evicted_by_oracle"] == pytest.approx((0.03, 0.5))
    assert found["predictions"].columns["kl"] == pytest.approx((0.25, nan), nan_ok=True)
    assert found["output_error"] == Curve("layer", (0,), {"error": (pytest.approx(0.2),)})


def test_the_busiest_layer_and_head() -> None:
    """Changes of units that competed before: neither aging nor the first routing is one."""
    tier = torch.zeros((3, 2, 2, 6), dtype=torch.int8)
    tier[0, 0, 0] = LOW
    tier[1:, 0, 1, 3] = EVICTED  # at event 0 unit 3 was recent
    tier[1, 1, 1, 2] = LOW
    base = record().history
    history = History(base.layout, base.seq_len_K, base.steps_K, tier, base.mass_KLHU)
    tier[1:, 0, 0] = LOW
    assert busiest(history) == (1, 1)
    tier[:] = FULL
    assert busiest(history) == (0, 0)


# ---- over streams ----


def test_a_spread_is_the_bootstrap_of_what_is_defined() -> None:
    values = [0.1, nan, 0.4, 0.25]
    expected = bootstrap([0.1, 0.4, 0.25]).interval()
    assert spread(values) == (expected.value, expected.low, expected.high, 3)
    assert spread([nan])[3] == 0
    assert spread([2.0]) == (2, 2, 2, 1)


def test_spreads_and_curves_over_streams() -> None:
    def stream(name: str, at: tuple[int, ...], values: tuple[float, ...], **scalars: float) -> Measured:
        return Measured(name, scalars, {"fmm": Curve("tokens", at, {"evicted": values})})

    streams = [
        stream("a", (0, 8), (0.1, nan), x=1.0),
        stream("b", (0, 8, 16), (0.3, 0.5, 0.7), x=3.0, y=5.0),
    ]
    found = spreads(streams)
    assert (found["x"].value, found["x"].num, found["y"].value, found["y"].num) == (2, 2, 5, 1)
    points, each = mean_curve(streams, lambda one: (one.curves["fmm"].at, one.curves["fmm"].columns["evicted"]))
    assert points == [0, 8, 16]
    assert [(spread_.value, spread_.num) for spread_ in each] == [(pytest.approx(0.2), 2), (0.5, 1), (0.7, 1)]


def test_runs_are_compared_on_the_same_streams() -> None:
    def run(**kl: float) -> list[Measured]:
        return [Measured(name, {"kl": value}, {}) for name, value in kl.items()]

    runs = {"p": run(a=1.0, b=2.0, c=5.0), "q": run(c=4.0, b=4.0, a=nan), "r": run(a=0.0)}
    found = differences(runs, "kl")
    assert list(found) == [("p", "q"), ("p", "r"), ("q", "r")]
    assert [(each.value, each.num) for each in found.values()][:2] == [(0.5, 2), (-1.0, 1)]  # (4 - 5 + 4 - 2) / 2
    assert found["q", "r"].num == 0
