"""One example's result: its fields, and how it is written as a line of JSON and read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Row:
    """One example of one run; what the rows of a run share comes first. `index` counts within the subset.

    status: `ok`, `infeasible` (the budget admits no setting, and `error` names the nearest; or the model's context is
    too short for the prompt) or `error` (`error` says why; retried by the next run). `group` and `data_source` as in
    task.Example; `boundary_tokens` as in task.Prompt; `overflow_tokens`: by how much prompt and answer exceed the
    task's nominal length; `turn` counts the questions of a conversation from 0. Only `ok` rows carry a score. `bytes`
    and `fractions` are those of engine.Generation: bytes, and shares of FullKV's bytes at the same step. `tier_units`
    are mean units per tier at the end; moves are summed over layers; `needle_fate` are shares in [0, 1]; `ttft_s` and
    `decode_s` seconds.
    """

    run_id: str
    model: str
    method: str
    variant: str
    task: str
    seed: int
    split: str
    budget: str
    basis: str
    enforce: str
    small_budget: str
    batch_size: int
    protocol: str
    mode: str
    answer_prefix_at: str
    instruction_at: str
    first_token: str
    prompt_source: str
    device: str
    dtype: str
    git_sha: str
    subset: str = ""
    example_id: str = ""
    index: int = 0
    group: str = ""
    data_source: str = ""
    status: str = "error"
    error: str = ""
    prompt_tokens: int = 0
    truncated_tokens: int = 0
    overflow_tokens: int = 0
    boundary_tokens: int = 0
    turn: int = 0
    answers: tuple[str, ...] = ()
    prediction: str = ""
    stop: str = ""
    new_tokens: int = 0
    score: float | None = None
    metrics: Mapping[str, float] | None = None
    bytes: Mapping[str, float] | None = None
    fractions: Mapping[str, float] | None = None
    matched: bool = False
    tier_units: Mapping[str, float] | None = None
    events: int = 0
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0
    needle_fate: Mapping[str, float] | None = None
    knobs: Mapping[str, Any] | None = None
    fidelity: Mapping[str, float] | None = None
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def protocol_words(self) -> str:
        """The protocol with what is not as usual."""
        unusual = [
            self.mode * (self.protocol == "multi_query"),
            "answer prefix after compression" * (self.answer_prefix_at == "after_compression"),
            "instruction with the question" * (self.instruction_at == "question"),
        ]
        return ", ".join([self.protocol, *filter(None, unusual)])

    @property
    def place(self) -> tuple[str, int]:
        return self.subset, self.index

    @property
    def done(self) -> bool:
        """False if the example has to run again."""
        return self.status != "error"


SHARES = ("after_prefill", "peak", "mean", "final", "whole_cache", "prefill_peak")
"""Keys of every ok row's `fractions`; where something bounds the cache, "allowed" too."""
SIZES = ("workspace", "host")
"""Keys of every ok row's `bytes`, beside its components."""
_HUGE, _LARGEST = 1e300, 2**63 - 1


def check_row(row: Row) -> None:
    """Raises ValueError or TypeError for a row that could not be written, or not be read again."""
    parse_row(json.loads(row_line(row)))


def row_line(row: Row) -> bytes:
    """With escapes for all but ASCII, so that text with half a surrogate pair can be written and read too."""
    return json.dumps(asdict(row), allow_nan=False).encode() + b"\n"


def parse_row(values: Any) -> Row:
    """The row in a line of rows.jsonl; raises ValueError for one that this code cannot have written."""
    if not isinstance(values, dict) or values.keys() != _CHECKS.keys():
        raise ValueError("it is not an object with the fields of a row")
    for name, (fits, optional) in _CHECKS.items():
        if not (fits(value) if (value := values[name]) is not None else optional):
            raise ValueError(f"{name} has another type")
    row = Row(**{**values, "answers": tuple(values["answers"])})
    if row.status not in ("ok", "infeasible", "error") or row.index < 0:
        raise ValueError(f"status {row.status!r} or index {row.index} is none")
    if row.status == "ok":
        if row.score is None or not 0 <= row.score <= 1:
            raise ValueError(f"score {row.score} is not in [0, 1]")
        if missing := {*SHARES} - {*(row.fractions or ())} | {*SIZES} - {*(row.bytes or ())}:
            raise ValueError(f"bytes or fractions lack {', '.join(sorted(missing))}")
    return row


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -_HUGE < value < _HUGE  # type: ignore[operator]


_FITS: dict[str, Callable[[object], bool]] = {
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "int": lambda value: type(value) is int and -_LARGEST <= value <= _LARGEST,
    "float": _is_number,
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value),
    "Mapping[str, float]": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "Mapping[str, Any]": lambda value: isinstance(value, dict),
}
"""Whether a JSON value may stand in a field of the row, by the field's annotation."""
_CHECKS = {
    field.name: (_FITS[str(field.type).removesuffix(" | None")], str(field.type).endswith(" | None"))
    for field in fields(Row)
}
"""By field: the check of its value, and whether it may be null."""
