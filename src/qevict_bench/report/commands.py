"""The commands that make runs, as far as their configurations tell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from qevict_bench.closing import PAPER_MODELS
from qevict_bench.runs import Run
from qevict_bench.settings import STREAMS


def command_of(run: Run) -> str:
    """The command that makes this run."""
    return "python run.py " + shlex.join(_parts(run))


def shared_command(runs: Sequence[Run]) -> str:
    """One command for all; what differs between them reads `...`. FullKV's runs come with the others."""
    made = [run for run in runs if not run.is_reference] or runs
    values: dict[str, dict[str, None]] = {}
    for number, run in enumerate(made):
        known = {field: value for field, _, value in (part.partition("=") for part in _parts(run))}
        for field in [*values, *known]:
            absent = {"": None} if number else {}
            values.setdefault(field, absent)[known.get(field, "")] = None
    parts: dict[str, None] = {}
    order = ("method", "model", "task")
    for field in sorted(values, key=lambda field: [*order, field.partition(".")[0]].index(field.partition(".")[0])):
        found = values[field]
        several = "method.FIELD=..." if field.startswith("method.") else f"{field}=..."
        parts[several if len(found) > 1 else f"{field}={next(iter(found))}"] = None
    return "python run.py " + shlex.join(parts)


def _parts(run: Run) -> list[str]:
    """FIELD=VALUE texts that make this run, as far as its configuration tells."""
    row, config = run.first, run.config
    model, task = config["model"], config["task"]
    parts = [f"method={row.method}", *(f"method.{text}" for text in row.variant.split(",") if text)]
    hub = isinstance(model, dict) and model.get("source") in ("hub", "local") and row.model not in PAPER_MODELS
    field = "id" if hub and model["source"] == "hub" else "path"
    parts += [f"model={model['source']}", f"model.{field}={model[field]}"] if hub else [f"model={row.model}"]
    parts.append(f"task={row.task}")
    if isinstance(task, dict):
        parts += [f"task.{name}={_value(value)}" for name, value in task.items() if name != "_target_"]
    parts.append(f"budget={row.budget}")
    usual = {
        "basis": "sequence",
        "enforce": "always",
        "small_budget": "clamp",
        "first_token": "compressed",
        "split": "test",
        "protocol": "query_aware",
        "seed": 0,
    }
    parts += [f"{name}={getattr(row, name)}" for name, value in usual.items() if getattr(row, name) != value]
    at = {"mode": "reset", "answer_prefix_at": "in_prompt", "instruction_at": "context"}
    parts += [f"protocol.{name}={getattr(row, name)}" for name, value in at.items() if getattr(row, name) != value]
    metrics = config.get("metrics")
    measured = any(row.fidelity for row in run.rows) or not run.is_reference  # its config.yaml is of the run it is for
    if isinstance(metrics, dict) and metrics.get("fidelity") and measured:
        parts += ["metrics.fidelity=true"]
        parts += [f"metrics.fidelity_tokens={n}" for n in [metrics.get("fidelity_tokens", 48)] if n != 48]
        streams = metrics.get("fidelity_streams", STREAMS)
        parts += [f"metrics.fidelity_streams=[{','.join(streams)}]"] if set(streams) != set(STREAMS) else []
    limit = max(config.get("limit") or 0, *(row.index + 1 for row in run.asked or run.rows))  # it may have been raised
    return [*parts, f"limit={limit}", f"batch_size={row.batch_size}"]


def _value(value: object) -> str:
    """As Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
