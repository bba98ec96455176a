"""Summaries and closing reports of hand-made rows: paired figures, Holm marks, alarms, runs without any score."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from rows import FACTS, FULL, row, rows

from qevict_bench import closing
from qevict_bench.rows import Row
from qevict_bench.summary import Summary, summarize

NAMES = [
    *(f"niah_{kind}" for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
]


def made(mine: Sequence[Row], full: Sequence[Row]) -> Summary:
    summary = summarize(mine, full, FACTS)
    json.dumps(summary.to_json(), allow_nan=False)
    return summary


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_stars_mark_what_is_left_after_holm() -> None:
    half = [1.0, 0.0] * 10
    full = rows(dict.fromkeys(NAMES, half), **FULL)
    lost = {name: [0.0] * 20 if name == "vt" else half for name in NAMES}
    lost["cwe"] = [0.0] * 12 + [1.0, 0.0] * 4  # 6 lost of 6: p = 1/32, but 1 in 13 tests
    summary = made(rows(lost), full)
    text = closing.render(summary)
    assert line_of(text, "vt").endswith("] *")
    assert line_of(text, "cwe").endswith("]")
    assert summary.adjusted["vt"] == pytest.approx(13 * 2 / 2**10)
    assert summary.adjusted["cwe"] == pytest.approx(12 / 32)
    assert "All subsets: p <.001 (bootstrap), wins/ties/losses 0/244/16." in text
    assert "*: differs from FullKV" in text


def test_thirteen_subsets_with_alarms_stay_readable() -> None:
    full = rows({name: [0.0] * 4 for name in NAMES}, **FULL)
    mine = rows({name: [0.0] * 4 for name in NAMES}, stop="length", prediction="", overflow_tokens=99, matched=False)
    summary = made(mine, full)
    text = closing.render(summary)
    assert max(map(len, text.splitlines())) <= 100
    section = text.split("Before you believe the scores:\n")[1].split("\n\n")[0].splitlines()
    starts = [line.split(":")[0].strip() for line in section if not line.startswith("    ")]
    assert starts == ["unmatched", "empty", "length", "overflow", "floor"]
    assert len(section) <= 20
    stored = summary.to_json()["alarms"]
    assert [alarm["subset"] for alarm in stored if alarm["kind"] == "floor"] == NAMES
    assert stored[0]["text"].startswith("unmatched: bytes do not match the budget (niah_single_1 4 of 4, ")


def test_a_run_whose_examples_are_all_infeasible_says_only_that() -> None:
    reason = "budget=0.001 cannot hold one window; the nearest feasible fraction is 0.04"
    mine = rows({"easy": [1.0] * 4}, status="infeasible", error=reason, budget="0.001")
    summary = made(mine, [])
    assert summary.all_infeasible
    assert (summary.num_infeasible, summary.macro, summary.overall) == (4, None, None)
    text = closing.render(summary)
    assert "Nothing could be run: all 4 examples are infeasible at budget 0.001." in text
    assert text.count("the nearest feasible fraction is 0.04") == 1
    assert text.splitlines()[-1].endswith("score=n/a full_kv=n/a diff=[n/a,n/a] memory=n/a workspace=n/a")


def test_some_infeasible_examples_are_an_alarm() -> None:
    mine = [row("easy", 0), row("easy", 1, status="infeasible", error="nearest 0.3")]
    summary = made(mine, rows({"easy": [1.0, 1.0]}, **FULL))
    assert not summary.all_infeasible
    text = closing.render(summary)
    assert "infeasible: the budget admits no setting (easy 1 of 2)" in text
    assert "nearest 0.3" in text


def test_questions_on_one_context_are_resampled_together() -> None:
    scores = {"qa": [1.0] * 25 + [0.0] * 25}
    full = [row("qa", i, 0.5, group=f"c{i // 5}", **FULL) for i in range(50)]
    mine = [row("qa", i, score, group=f"c{i // 5}") for i, score in enumerate(scores["qa"])]
    summary = made(mine, full)
    assert summary.overall is not None
    assert (summary.overall.num_pairs, summary.overall.num_clusters) == (50, 10)
    assert summary.overall.exact_p == 1.0
    apart = made([row("qa", i, s) for i, s in enumerate(scores["qa"])], full).overall
    assert apart is not None
    assert summary.overall.diff.high > 1.5 * apart.diff.high
    assert "The 50 examples share 10 contexts, resampled as such." in closing.render(summary)
