"""What a sweep would take, told without running it: tokens, bytes, cells that cannot run, and time by earlier runs.

The first example of each subset stands for the others; its prompt is made with the model's tokenizer. Weights are not
loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qevict_bench.asking import Job
from qevict_bench.budget import Geometry, Infeasible
from qevict_bench.kept import Kept
from qevict_bench.protocol import lengths
from qevict_bench.rowfiles import Damaged, read_rows
from qevict_bench.rows import Row
from qevict_bench.runner import Plan
from qevict_bench.session import geometry_of
from qevict_bench.standing import known_sizes
from qevict_bench.task import Prompter
from qevict_bench.terminal import columns, fitted

_MIB = 2**20
_WIDTH, _LABEL = 120, 50
_HEADER = ("cell", "examples", "tokens", "cache", "prefill", "time")


@dataclass(frozen=True)
class Forecast:
    """Of one run: what is left of it. `tokens` are prompts and answers at their longest; `cache_bytes` are allowed at
    the end of the longest answer, `prefill_bytes` are held while the longest prompt is read, by a whole batch;
    `seconds` is None if no earlier run tells.
    """

    label: str
    examples: int
    tokens: int
    cache_bytes: int
    prefill_bytes: int
    seconds: float | None
    infeasible: str


def forecasts(planned: Iterable[tuple[str, Plan]], kept: Kept) -> Iterator[Forecast]:
    """Of every cell (label and plan), and of the references that they need and that are no cells themselves."""
    cells = list(planned)
    own = {plan.job.run_id for _, plan in cells}
    speeds: dict[Path, dict[tuple[str, ...], float]] = {}
    needed: dict[str, Plan] = {}
    for label, plan in cells:
        speed = speeds.setdefault(plan.settings.results_dir, _speeds(plan.settings.results_dir))
        found = _forecast(label, plan, plan.job, kept, speed)
        yield found
        if not found.infeasible and plan.reference.run_id not in own:
            needed.setdefault(plan.reference.run_id, plan)
    for plan in needed.values():
        label = f"reference {plan.reference_name}, {plan.reference.row.model}"
        yield _forecast(label, plan, plan.reference, kept, speeds[plan.settings.results_dir])


def _forecast(label: str, plan: Plan, job: Job, kept: Kept, speeds: dict[tuple[str, ...], float]) -> Forecast:
    settings, path = plan.settings, plan.settings.results_dir / job.run_id
    loaded = kept.fact(("outline", repr(plan.spec)), plan.spec.outline)
    geometry: Geometry = geometry_of(loaded)
    prompter = Prompter(loaded.tokenizer, loaded.chat, plan.protocol.instruction_at, loaded.max_context)
    key = repr((plan.task, plan.spec, prompter.instruction_at, settings.seed, settings.split, "first"))
    first = kept.fact(key, lambda: list(plan.task.examples(prompter, 1, settings.seed, settings.split)))
    sizes, rows = known_sizes(path / "summary.json"), _rows(path)
    done = [row for row in rows if row.done and row.index < settings.limit]
    examples = tokens = cache = prefill = 0
    infeasible = ""
    for example in first:
        left = min(settings.limit, sizes.get(example.subset, settings.limit))
        left -= sum(row.subset == example.subset for row in done)
        prompt = kept.fact((key, example.id), partial(prompter.encode, example))
        read, later = lengths(plan.protocol.steps(prompt), example.max_new_tokens)
        examples += left
        tokens += left * (len(prompt.ids) + example.max_new_tokens)
        prefill = max(prefill, settings.batch_size * geometry.full_bytes(read))
        allowed = job.budget.allowed_bytes(geometry, read, read + later, later) or geometry.full_bytes(read + later)
        cache = max(cache, settings.batch_size * allowed)
        try:
            job.policy.fit(job.budget, geometry, read, later)
        except Infeasible as error:
            infeasible = infeasible or f"{example.subset}: {' '.join(str(error).split())}"
    speed = speeds.get(_kind(job.row))
    seconds = 0.0 if not examples else None if speed is None else speed * tokens
    return Forecast(label, examples, tokens, cache, prefill, seconds, infeasible)


def _rows(path: Path) -> list[Row]:
    try:
        return list(read_rows(path / "rows.jsonl")[0].values())
    except Damaged:
        return []


def _kind(row: Row) -> tuple[str, ...]:
    return row.model, row.method, row.task, row.device, row.dtype


def _speeds(results_dir: Path) -> dict[tuple[str, ...], float]:
    """Seconds per token of prompt and answer, by kind of run."""
    seconds: dict[tuple[str, ...], float] = {}
    tokens: dict[tuple[str, ...], int] = {}
    for path in results_dir.glob("*/rows.jsonl"):
        for row in _rows(path.parent):
            if row.status == "ok":
                kind = _kind(row)
                seconds[kind] = seconds.get(kind, 0.0) + row.ttft_s + row.decode_s
                tokens[kind] = tokens.get(kind, 0) + row.prompt_tokens + row.new_tokens
    return {kind: seconds[kind] / tokens[kind] for kind in seconds}


def render(found: Sequence[Forecast]) -> str:
    """A line per run, and the sum."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for each in found:
        figures = (f"{each.examples:,}", f"{each.tokens:,}", _mib(each.cache_bytes), _mib(each.prefill_bytes))
        rows.append((each.label, *figures, _duration(each.seconds)) if not each.infeasible else (each.label, "0"))
    able = [each for each in found if not each.infeasible]
    known = [each.seconds for each in able if each.seconds is not None]
    sums = (f"{sum(each.examples for each in able):,}", f"{sum(each.tokens for each in able):,}")
    rows.append((f"{len(found)} runs", *sums, "", "", _duration(sum(known)) if known else "unknown"))
    widths = [min(_LABEL, max(columns(row[at]) for row in rows if at < len(row))) for at in range(len(_HEADER))]
    lines = ["  ".join(fitted(text, width) for text, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    for number, each in enumerate(found, 1):
        if each.infeasible:
            lines[number] += f"  infeasible: {each.infeasible}"
    unknown = len(able) - len(known)
    notes = [f"{unknown} runs without a time: no earlier run in results_dir is like them."] if unknown else []
    notes.append(
        "Bytes are of a batch: allowed at the end of the longest answer; held while the longest prompt is read."
    )
    return "\n".join([*lines, *notes])


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f}MiB"


def _duration(seconds: Any) -> str:
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
