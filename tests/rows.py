"""Rows, and runs on disk, made by hand for tests of what only reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from qevict_bench.environment import Environment
from qevict_bench.rows import Row
from qevict_bench.summary import Facts

COMMON: dict[str, Any] = {
    "run_id": "aaaaaaaaaaaa",
    "model": "fake",
    "method": "qevict",
    "variant": "",
    "task": "fake",
    "seed": 0,
    "split": "test",
    "budget": "0.2",
    "basis": "sequence",
    "enforce": "always",
    "small_budget": "clamp",
    "batch_size": 1,
    "protocol": "query_aware",
    "mode": "reset",
    "answer_prefix_at": "in_prompt",
    "instruction_at": "context",
    "first_token": "compressed",
    "prompt_source": "own",
    "device": "cpu",
    "dtype": "float32",
    "git_sha": "abc",
}
FULL: dict[str, Any] = {"run_id": "ffffffffffff", "method": "full_kv", "budget": "1.0"}
FACTS = Facts(30, 30, True, "full_kv", "ffffffffffff", 4, {})
ENVIRONMENT = Environment(
    "c0de", "5ha5ed", {"python": "3.11", "torch": "2.13"}, "cpu", "some cpu", 1, "host", "abc", False
)
CONFIG: dict[str, Any] = {
    "model": {"name": "fake", "chat": "auto"},
    "method": {"name": "qevict", "_target_": "methods.qevict.QEvict"},
    "reference": {"name": "full_kv", "_target_": "methods.full_kv.FullKV"},
    "task": {"_target_": "fakes.FakeTask", "context_length": 64},
    "protocol": {"name": "query_aware"},
}


def row(subset: str = "easy", index: int = 0, score: float | None = 1.0, **changes: Any) -> Row:
    """An `ok` row (another status makes it one without a score) whose cache holds 0.2 of FullKV's bytes."""
    values = {**COMMON, **changes}
    share = 1.0 if values["budget"] == "1.0" else 0.2
    names = ("after_prefill", "peak", "mean", "final", "whole_cache", "prefill_peak", "allowed")
    ok = values.get("status", "ok") == "ok"
    made: dict[str, Any] = {
        "subset": subset,
        "example_id": f"{subset}-{index:04}",
        "index": index,
        "status": "ok",
        "score": score if ok else None,
        "prediction": f"answer {values['method']} {score}",
        "answers": ("yes",),
        "prompt_tokens": 50,
        "stop": "eos",
        "new_tokens": 2,
        "matched": True,
        "bytes": {"mean": 1000 * share, "workspace": 0.0, "host": 0.0},
        "fractions": dict.fromkeys(names, share),
        "metrics": {"match": score} if ok else None,
        "knobs": {},
        "tier_units": {},
        "needle_fate": {},
        "ttft_s": 0.1,
        "decode_s": 0.1,
    }
    return Row(**{**made, **values})


def rows(scores: dict[str, Sequence[float]], **changes: Any) -> list[Row]:
    """A row per score of each subset."""
    return [row(subset, i, score, **changes) for subset, values in scores.items() for i, score in enumerate(values)]


def write(path: Path, written: Sequence[Row], **changes: Any) -> Path:
    """The folder of a run. `changes`: config (sections that replace those of CONFIG), environment, summary."""
    path.mkdir(parents=True)
    lines = [json.dumps(asdict(row)) for row in written]
    (path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    method = {"name": written[0].method, "_target_": f"methods.{written[0].method}.It"} if written else {}
    (path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "method": method, **changes.get("config", {})}))
    environment = asdict(ENVIRONMENT) | changes.get("environment", {})
    (path / "env.json").write_text(json.dumps(environment))
    if "summary" in changes:
        (path / "summary.json").write_text(json.dumps(changes["summary"]))
    return path
