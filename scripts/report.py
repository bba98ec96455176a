"""Tables, figures and one page of everything that runs have measured; reads runs, never runs a model.

    python scripts/report.py [runs=results/runs] [output_dir=results] [allow=versions,code] [rescore=true]
                             [diagnose=results/figure1] [paper=results/paper]

Runs that differ in task, model, context length, protocol, prompt source, number format, code or library versions never
share a table; allow= names what may differ all the same (versions, code, device, dtype, prompt_source, protocol), and
the table's title then says it. `runs` takes several folders, with commas. rescore=true judges the stored predictions
again with today's scorers, says what changed, and leaves the runs as they are. `diagnose` is an output_dir of
scripts/diagnose.py, whose figures are put on the page.

Writes output_dir/tables/*.{md,tex,csv}, output_dir/figures/*.{png,pdf} and output_dir/report/index.html, one file that
needs no network; tables/README.md lists them, and what it listed before and is not made again is removed. A run that
cannot be read is a line on stderr and on the page. Exit codes: 0; 2 for a mistake in the input.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench.report.build import Options, build_report  # noqa: E402
from qevict_bench.report.rescoring import rescore  # noqa: E402
from qevict_bench.report.sheet import Declared  # noqa: E402
from qevict_bench.runs import Run, one_line, read_folders  # noqa: E402
from qevict_bench.settings import build  # noqa: E402
from qevict_bench.task import Task  # noqa: E402
from qevict_bench.terminal import allow_any_sign  # noqa: E402
from tasks.longbench.structure import BUCKETS, GROUPS, PRESETS  # noqa: E402
from tasks.ruler.structure import SUBSETS  # noqa: E402

FAMILIES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "ruler": {
        "retrieval": tuple(name for name in SUBSETS if name.startswith("niah")),
        "multi-hop tracing": ("vt",),
        "aggregation": ("cwe", "fwe"),
        "QA": ("qa_1", "qa_2"),
    },
    "longbench": {
        **GROUPS,
        **{bucket: tuple(name for name in PRESETS["longbench_e"] if name.endswith(bucket)) for bucket in BUCKETS},
    },
}
"""Means that stand beside the subsets, by task."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    runs: tuple[str, ...] = ("results/runs",)
    output_dir: Path = Path("results")
    allow: tuple[str, ...] = ()
    rescore: bool = False
    diagnose: str = ""
    paper: Path = ROOT / "results" / "paper"


def arguments(texts: Sequence[str]) -> Arguments:
    """From FIELD=VALUE texts; raises ValueError for anything else."""
    values: dict[str, Any] = {}
    lists = ("runs", "allow")
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text} is no FIELD=VALUE; fields: {', '.join(f.name for f in fields(Arguments))}")
        parts = [part.strip() for part in value.strip("[]").split(",") if part.strip()]
        values[name] = parts if name in lists else {"true": True, "false": False}.get(value, value)
    made: Arguments = build(Arguments, values, "")
    return made


@cache
def _preset(name: str) -> dict[str, Any]:
    """configs/method/NAME.yaml, {} if there is none."""
    path = ROOT / "configs" / "method" / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def declare(config: Mapping[str, Any]) -> Declared:
    """What the class of a method says of itself, with the fields of the run.

    A class that is gone, or that refuses these fields today, says nothing.
    """
    path = str(config.get("_target_", ""))
    module, _, name = path.rpartition(".")
    try:
        cls = getattr(import_module(module), name)
        known = [field for field in fields(cls) if field.init and not field.metadata.get("fitted")]
        defaults = {field.name: field.default for field in known}
        policy = build(cls, {k: v for k, v in config.items() if k in defaults}, "method.")
    except (ImportError, AttributeError, TypeError, ValueError):
        return Declared({}, {}, (), 1, "")
    paper = _preset(f"{name.lower()}_paper")
    published = (
        {**defaults, **{k: v for k, v in paper.items() if k in defaults}} if paper.get("_target_") == path else defaults
    )
    tiers = tuple(tier.name for tier in policy.tiers[1:])
    return Declared(defaults, published, tiers, policy.unit, policy.restore)


def task_of(config: Mapping[str, Any]) -> Task:
    """The task of a run, as the runner builds it."""
    values = dict(config)
    module, _, name = str(values.pop("_target_", "")).rpartition(".")
    made: Task = build(getattr(import_module(module), name), values, "task.")
    return made


def rescored(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Runs with today's scores, and a line for each; one whose task is not to be had keeps its scores."""
    found, lines = [], []
    for run in runs:
        try:
            done = rescore(run, task_of(run.config["task"]))
            found.append(done.run)
            lines.append(done.line)
        except (ValueError, ImportError, AttributeError, TypeError) as error:
            found.append(run)
            lines.append(f"{run.first.run_id} keeps its scores: {one_line(error)}")
    return found, lines


def main(argv: Sequence[str] | None = None) -> int:
    texts = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & {*texts}:
        print(__doc__)
        return 0
    try:
        asked = arguments(texts)
        runs, problems = read_folders(map(Path, asked.runs))
        for line in problems:
            print(f"left out: {line}", file=sys.stderr)
        if not runs:
            raise ValueError(
                f"no run can be read in {', '.join(asked.runs)}; name the results_dir of the runs: runs=DIR"
            )
        changed: list[str] = []
        if asked.rescore:
            runs, changed = rescored(runs)
            print("\n".join(changed))
        options = Options(asked.output_dir, asked.allow, asked.paper, asked.diagnose)
        written = build_report(runs, problems, changed, options, FAMILIES, declare)
    except (ValueError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print(written)
    return 0


if __name__ == "__main__":
    allow_any_sign()
    sys.exit(main())
