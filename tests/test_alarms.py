"""Every alarm on rows that deserve it and on rows that do not; how alarms are grouped into lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rows import FULL, row, rows

from qevict_bench import alarms
from qevict_bench.alarms import Alarm
from qevict_bench.comparison import compare, pair
from qevict_bench.rows import Row


def found(mine: list[Row], full: list[Row]) -> list[Alarm]:
    pairs = pair(mine, full)
    return alarms.alarms_of(mine, full, compare(pairs), [both for members in pairs.values() for both in members])


def kinds(mine: list[Row], full: list[Row]) -> set[tuple[str, str]]:
    return {(alarm.kind, alarm.subset) for alarm in found(mine, full)}


HALF = {"easy": [1.0, 0.0] * 10, "hard": [0.0, 1.0] * 10}
FULL_HALF = rows(HALF, **FULL)


def test_a_sound_run_has_none() -> None:
    assert found(rows(HALF), FULL_HALF) == []
    assert found(FULL_HALF, FULL_HALF) == []


@pytest.mark.parametrize(
    ("changes", "kind", "figures"),
    [
        ({"status": "error", "error": "RuntimeError: x"}, "error", "1 of 20"),
        ({"status": "infeasible", "error": "nearest 0.3"}, "infeasible", "1 of 20"),
        ({"matched": False}, "unmatched", "1 of 20, 0.200 of 0.200 allowed"),
        ({"prediction": " \n"}, "empty", "1 of 20, FullKV 0 of 20"),
        ({"truncated_tokens": 7}, "truncated", "1 of 20 by up to 7 tokens"),
        ({"overflow_tokens": 300}, "overflow", "1 of 20 by up to 300 tokens"),
    ],
)
def test_a_single_row_is_counted(changes: dict[str, Any], kind: str, figures: str) -> None:
    mine = rows(HALF)
    mine[23] = row("hard", 3, 1.0, **changes)
    assert found(mine, FULL_HALF) == [Alarm(kind, "hard", figures)]


def test_answers_ended_by_length_count_when_they_are_the_majority() -> None:
    mine = rows({"easy": [1.0, 0.0] * 10})
    for number in range(10):
        mine[number] = replace(mine[number], stop="length")
    assert found(mine, FULL_HALF) == []
    mine[10] = replace(mine[10], stop="length")
    assert found(mine, FULL_HALF) == [Alarm("length", "easy", "11 of 20, FullKV 0 of 20")]


def test_floor_and_ceiling() -> None:
    full = rows({"low": [0.0] * 9 + [1.0], "edge": [0.0] * 8 + [1.0] * 2, "top": [1.0] * 10}, **FULL)
    mine = [replace(r, run_id="a", method="m", budget="0.2", prediction="m") for r in full]
    assert found(mine, full) == [Alarm("floor", "low", "10.0"), Alarm("ceiling", "top", "100.0")]


def test_above_full_kv_after_holm() -> None:
    full = rows({"easy": [0.5] * 12, "hard": [0.5] * 12, "other": [0.5] * 12}, **FULL)
    mine = rows({"easy": [1.0] * 12, "hard": [1.0] * 6 + [0.5] * 6, "other": [0.5] * 12})
    # easy: p = 2 / 2^12, times 3; hard: 6 of 6 has p = 1/32, times 2 is above 5 %.
    above = [alarm for alarm in found(mine, full) if alarm.kind == "above"]
    assert [(alarm.subset, alarm.figures) for alarm in above] == [
        ("easy", "+50.0, p 0.001"),
        ("", "macro +25.0, p <.001"),
    ]
    assert not [alarm for alarm in found(full, mine) if alarm.kind == "above"]


def test_identical_predictions_at_other_bytes() -> None:
    mine = [replace(r, prediction="same") for r in rows(HALF)]
    full = [replace(r, prediction="same") for r in FULL_HALF]
    [alarm] = found(mine, full)
    assert alarm == Alarm("identical", "", "FullKV's on 40 of 40 examples, bytes 0.200 of its")
    assert found(mine, [replace(full[0], prediction="other"), *full[1:]]) == []
    as_large = [replace(r, bytes={**(r.bytes or {}), "mean": 1000.0}) for r in mine]
    assert found(as_large, full) == []


def test_examples_without_an_answer_of_the_reference() -> None:
    assert kinds(rows(HALF), FULL_HALF[:39]) == {("unpaired", "hard")}


def test_subsets_with_the_same_alarm_share_a_line() -> None:
    made = [Alarm("floor", f"s{i}", f"{i}.0") for i in range(6)]
    [line] = alarms.lines(made)
    assert line.startswith("floor: FullKV below 20 (s0 0.0; s1 1.0; s2 2.0; s3 3.0; s4 4.0; s5 5.0): ")
    [line] = alarms.lines([*made, Alarm("floor", "s6", "6.0")])
    assert "s4 4.0; 2 more subsets): " in line
    assert made[3].text.startswith("floor: FullKV below 20 (s3 3.0): ")
    assert len(alarms.lines([*made, Alarm("empty", "s1", "1 of 2")])) == 2
