"""Does fidelity rank methods as accuracy does? A table of all runs with metrics.fidelity=true in a folder, as Markdown.

    python scripts/fidelity_table.py results/runs [--model smollm2_135m] [--task ruler] [--subsets niah_single_1 ...]

Per budget and method, over the examples that all of its runs share (with gold texts of two tokens or more): mean bytes
/ FullKV bytes while the gold text is read, score in percent, and on the gold text
KL(p_full || p_method) of token 1 and of the others (nats), top-1 agreement (percent) and the change of the gold text's
negative log-likelihood (nats per token), means over examples with 95 % intervals. Below each budget: Spearman's rank
correlation over methods of score and -KL, with an interval of a bootstrap over examples (the same for all methods).
Exit codes: 0; 2 for a mistake in the input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench.results import Damaged, read_rows  # noqa: E402
from qevict_bench.rows import Row  # noqa: E402
from qevict_bench.statistics import bootstrap, spearman  # noqa: E402
from qevict_bench.tables import Cell, Number, grid  # noqa: E402

RESAMPLES = 2000
COLUMNS = {"kl": ("gold.kl", 1, 3), "kl_1": ("gold.kl_first", 1, 3), "agreement": ("gold.agreement", 100, 0)}
COLUMNS |= {"nll_change": ("gold.nll_change", 1, 3)}

SAME = ("dtype", "seed", "split", "basis", "enforce", "protocol", "mode", "answer_prefix_at", "instruction_at")
SAME += ("first_token",)
"""Fields in which runs of one table agree."""
Rows = dict[str, Row]


def runs_of(folder: Path, model: str, task: str, subsets: Sequence[str]) -> dict[str, dict[str, Rows]]:
    """Rows by budget, method and example. Raises ValueError if there are none."""
    found: dict[str, dict[str, Rows]] = {}
    for path in sorted(folder.glob("*/rows.jsonl")):
        rows = {
            name: row
            for name, row in read_rows(path)[0].items()
            if row.fidelity and "gold.kl" in row.fidelity and (not subsets or row.subset in subsets)
        }
        first = next(iter(rows.values()), None)
        if first is not None and (first.model, first.task) == (model, task):
            label = f"{first.method} {first.variant}".strip()
            known = found.setdefault(first.budget, {}).setdefault(label, {})
            if {*known} & {*rows}:
                raise ValueError(f"{path}: another run in {folder} has {label} at {first.budget} with these examples")
            known |= rows
    if not found:
        raise ValueError(f"{folder} has no run of task={task} with model={model} and metrics.fidelity=true")
    return found


def table(methods: dict[str, Rows]) -> str:
    """The methods of one budget, the nearest to FullKV first, on the examples they share."""
    names = sorted(set.intersection(*({*rows} for rows in methods.values())))
    if not names:
        raise ValueError(f"no example is shared by {', '.join(methods)}: use --subsets, or a folder for each setting")
    check(methods)
    order = sorted(methods, key=lambda label: _mean(methods[label], names, "gold.kl"))
    head = ["method", "memory", "n", "score, %", "KL", "KL of token 1", "agreement", "NLL change"]
    lines: list[list[Cell]] = []
    for label in order:
        rows = [methods[label][name] for name in names]
        cells: list[Cell] = [_cell([100 * (row.score or 0.0) for row in rows], rows, 0)]
        for name, scale, digits in COLUMNS.values():
            cells.append(_cell([scale * (row.fidelity or {})[name] for row in rows], rows, digits))
        memory = fmean((row.fidelity or {})["gold.memory"] for row in rows)
        lines.append([label, Number(memory, 3), str(len(rows)), *cells])
    return f"{grid(head, lines)}\n\n{_ranks(methods, names)}"


def check(methods: dict[str, Rows]) -> None:
    """Raise ValueError unless the runs differ in method only."""
    rows = {label: next(iter(rows.values())) for label, rows in methods.items()}
    (name, first), *others = rows.items()
    for label, other in others:
        for field in SAME:
            if (mine := getattr(first, field)) != (its := getattr(other, field)):
                raise ValueError(f"{name} has {field}={mine}, {label} {field}={its}: use a folder for each setting")


def _mean(rows: Rows, names: Sequence[str], value: str) -> float:
    return fmean((rows[name].fidelity or {})[value] for name in names)


def _cell(values: Sequence[float], rows: Sequence[Row], digits: int) -> Cell:
    found = bootstrap(values, [row.group for row in rows] if all(row.group for row in rows) else ()).interval()
    return Number.of(found, digits)


def _ranks(methods: dict[str, Rows], names: Sequence[str]) -> str:
    score_ME = np.array([[rows[name].score or 0.0 for name in names] for rows in methods.values()])
    kl_ME = np.array([[(rows[name].fidelity or {})["gold.kl"] for name in names] for rows in methods.values()])
    value = spearman(score_ME.mean(1).tolist(), (-kl_ME.mean(1)).tolist())
    if len(methods) < 3:
        return f"Spearman needs at least 3 methods, here are {len(methods)}"
    if value is None:
        return f"Spearman over {len(methods)} methods: undefined, all scores are the same"
    drawn = np.random.default_rng(0).integers(len(names), size=(RESAMPLES, len(names)))
    found = [spearman(score_ME[:, at].mean(1).tolist(), (-kl_ME[:, at].mean(1)).tolist()) for at in drawn]
    low, high = np.quantile([each for each in found if each is not None], [0.025, 0.975])
    return f"Spearman of score and -KL over {len(methods)} methods: {value:.2f} [{low:.2f}, {high:.2f}]"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="results_dir of the runs")
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--task", default="ruler")
    parser.add_argument("--subsets", nargs="*", default=[], help="all that the runs share if none is named")
    args = parser.parse_args(argv)
    try:
        for budget, methods in runs_of(args.folder, args.model, args.task, args.subsets).items():
            print(f"budget {budget}\n\n{table(methods)}\n")
    except (ValueError, Damaged) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
