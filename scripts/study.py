"""The study of what the paper leaves open: one change at a time to the preset `qevict`, on every family of tasks.

    python scripts/study.py --model smollm2_135m --budget 0.1 --split dev [--points "key parameters" bits] [--heatmap]

Runs run.py once per change and family of configs/study.yaml with metrics.fidelity=true (finished runs cost nothing, so
that it can be stopped and issued again), then prints Markdown tables: per family the change of KL(p_full || p_method)
on the gold text in nats per token (below 0 is better than the preset) and of the score in points (above 0 is better),
paired on the same examples, with 95 % intervals; the mean memory of the runs; a star where the interval excludes 0.
With --heatmap, KL over Omega and q per family. A cell that cannot run says why. Exit codes: 0; 1 if a run failed; 2 for
a mistake in the input.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench.results import Damaged, read_rows  # noqa: E402
from qevict_bench.rows import Row  # noqa: E402
from qevict_bench.statistics import bootstrap  # noqa: E402

KL = "gold.kl"


@dataclass(frozen=True)
class Cell:
    """The rows of one run that are ok, by example; `reason` says why there are none."""

    rows: dict[str, Row]
    reason: str = ""

    @property
    def memory(self) -> float:
        """Mean share of FullKV's bytes while the gold text is read (while answering, where it has one token)."""
        shares = [(row.fidelity or {}).get("gold.memory", (row.fractions or {})["mean"]) for row in self.rows.values()]
        return fmean(shares)


@dataclass(frozen=True)
class Study:
    """Runs cells, in order, and remembers them."""

    common: tuple[str, ...]
    results_dir: Path
    families: dict[str, str]
    failed: list[str]

    def cell(self, change: str, family: str) -> Cell:
        """Run (or find finished) what `change` does to the preset on a family."""
        method = [] if re.search(r"(^| )method=", change) else ["method=qevict"]
        arguments = [*method, *change.split(), *self.families[family].split(), *self.common]
        command = [sys.executable, str(ROOT / "run.py"), *arguments, f"results_dir={self.results_dir}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.findall(r"^run ([0-9a-f]{12}):", done.stdout, flags=re.MULTILINE)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{'done' if found else last}: run.py {shlex.join(arguments)}", file=sys.stderr, flush=True)
        last = last.replace("|", "/")
        if done.returncode == 2 and not change:  # the preset itself: nothing else can run either
            raise ValueError(f"run.py {shlex.join(arguments)}: {last}")
        if not found:
            self.failed.append(f"{change or 'qevict'}, {family}: {last}")
            return Cell({}, last)
        rows, _ = read_rows(self.results_dir / found[0] / "rows.jsonl")
        good = {name: row for name, row in rows.items() if row.status == "ok"}
        bad = next((row for row in rows.values() if row.status != "ok"), None)
        return Cell(good, "" if good or bad is None else bad.status)


def kl(row: Row) -> float | None:
    """None where the gold text has one token only."""
    return (row.fidelity or {}).get(KL)


def score(row: Row) -> float | None:
    """None where answers are not judged."""
    return 100 * (row.score or 0.0) if row.metrics else None


def change_of(cell: Cell, base: Cell, value: Callable[[Row], float | None], digits: int) -> str:
    """Mean of cell - base over the examples that have the value in both."""
    pairs = {name: (value(row), value(base.rows[name])) for name, row in cell.rows.items() if name in base.rows}
    known = {name: (mine, its) for name, (mine, its) in pairs.items() if mine is not None and its is not None}
    if not known:
        return "n/a" if pairs else cell.reason or base.reason or "no example is ok in both"
    groups = [base.rows[name].group for name in known]
    values = [mine - its for mine, its in known.values()]
    found = bootstrap(values, groups if all(groups) else ()).interval()
    star = "*" if found.low > 0 or found.high < 0 else ""
    return f"{found.value:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]{star}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def points_table(study: Study, points: dict[str, list[str]]) -> str:
    """KL and score of every change beside the preset's."""
    base = {family: study.cell("", family) for family in study.families}
    levels = [_level(cell) for cell in base.values()]
    lines = [["preset qevict (levels)", _memory(base.values()), *levels]]
    for point, changes in points.items():
        for change in changes:
            cells = {family: study.cell(change, family) for family in study.families}
            label = f"{point}: {change.replace('method.', '').replace('method=', '')}"
            shown = [
                f"{change_of(cell, base[family], kl, 3)}; {change_of(cell, base[family], score, 0)}"
                if cell.rows
                else cell.reason
                for family, cell in cells.items()
            ]
            lines.append([label, _memory(cells.values()), *shown])
    return table(["change", "memory", *(f"{family}: KL; score" for family in study.families)], lines)


def _level(cell: Cell) -> str:
    if not cell.rows:
        return cell.reason
    kls, scores = ([x for row in cell.rows.values() if (x := value(row)) is not None] for value in (kl, score))
    shown = (f"{fmean(x):.{digits}f} (n = {len(x)})" if x else "n/a" for x, digits in ((kls, 3), (scores, 0)))
    return "; ".join(shown)


def _memory(cells: Any) -> str:
    known = [cell.memory for cell in cells if cell.rows]
    return f"{min(known):.3f} - {max(known):.3f}" if known else ""


def heatmap(study: Study, omegas: Sequence[int], shares: Sequence[float]) -> str:
    """KL per family over Omega (lines) and q (columns)."""
    parts = []
    for family in study.families:
        cells = {
            pair: study.cell("method.omega={} method.q={}".format(*pair), family) for pair in product(omegas, shares)
        }
        lines = [[str(omega), *(_level(cells[omega, q]) for q in shares)] for omega in omegas]
        parts.append(f"{family} (KL; score)\n\n{table(['Omega', *(f'q {q}' for q in shares)], lines)}")
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    known: dict[str, Any] = yaml.safe_load((ROOT / "configs/study.yaml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--split", default="dev", choices=["dev", "test"])
    parser.add_argument("--limit", type=int, default=6, help="examples per subset")
    parser.add_argument("--length", type=int, default=1024, help="tokens of context")
    parser.add_argument("--points", nargs="*", default=list(known["points"]), choices=list(known["points"]))
    parser.add_argument("--families", nargs="*", default=list(known["families"]), choices=list(known["families"]))
    parser.add_argument("--heatmap", action="store_true")
    parser.add_argument("--results-dir", type=Path, default=Path("results/study"))
    args = parser.parse_args(argv)
    common = [f"model={args.model}", f"budget={args.budget}", f"split={args.split}", f"limit={args.limit}"]
    common += [f"batch_size={args.limit}", f"profile.context_length={args.length}", "metrics.fidelity=true"]
    families = {family: known["families"][family] for family in args.families}
    study = Study(tuple(common), args.results_dir, families, [])
    try:
        text = points_table(study, {point: known["points"][point] for point in args.points})
        if args.heatmap:
            text += f"\n\n{heatmap(study, known['heatmap']['omega'], known['heatmap']['q'])}"
    except (ValueError, Damaged) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; re-issue the command to continue", file=sys.stderr)
        return 130
    print(f"{' '.join(common)}\n\n{text}")
    return 1 if study.failed else 0


if __name__ == "__main__":
    sys.exit(main())
