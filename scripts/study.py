"""The study of what the paper leaves open: one change at a time to the preset `qevict`, on every family of tasks.

    python scripts/study.py --model smollm2_135m --budget 0.1 --split dev [--points "key parameters" bits]
    python scripts/study.py --trials [snapkv ...]     every setting tried of each method, the lowest mean KL in bold
    python scripts/study.py --heatmap                 KL over Omega and q

Runs what run.py would, once per change and task of configs/study.yaml, with metrics.fidelity=true (finished runs cost
nothing, so that it can be stopped and issued again), then prints a Markdown table. By default: per family the change of
KL(p_full || p_method) on the gold text in nats per token (below 0 is better than the preset) and of the score in
points (above 0 is better), paired on the same examples, with 95 % intervals; `all` is the mean of the subsets, memory
the range over families; a star where the bootstrap's p is at most 5 %, each cell by itself (fewer than 6 examples have
none). A cell that cannot run, or that lacks a subset, says why; n stands where examples are missing. Exit codes: 0; 1
if a run or an example failed; 2 for a mistake in the input; 130 interrupted.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any, NamedTuple

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench import runner  # noqa: E402
from qevict_bench.figures import heatmaps, save  # noqa: E402
from qevict_bench.kept import Kept  # noqa: E402
from qevict_bench.results import Damaged, read_rows  # noqa: E402
from qevict_bench.rows import Row  # noqa: E402
from qevict_bench.settings import set_anyway  # noqa: E402
from qevict_bench.statistics import ALPHA, bootstraps, macro  # noqa: E402
from qevict_bench.tables import Number, grid  # noqa: E402

ALL = "all"
PRESET = "qevict"
MISTAKES = (ValueError, HydraException, OmegaConfBaseException)


class Family(NamedTuple):
    """Subsets of a task (a name under `runs` of configs/study.yaml)."""

    run: str
    subsets: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """The rows of one run that are ok, by example; `reason` says why there are none."""

    rows: Mapping[str, Row]
    reason: str = ""


@dataclass(frozen=True)
class Study:
    """Runs cells, in order, and remembers them."""

    common: tuple[str, ...]
    results_dir: Path
    runs: Mapping[str, str]
    families: Mapping[str, Family]
    failed: list[str] = field(default_factory=list)
    _done: dict[tuple[str, str], Cell] = field(default_factory=dict)
    _kept: Kept = field(default_factory=Kept)

    def run_all(self, changes: Sequence[str]) -> None:
        """Task by task, so that the prompts of each are made once."""
        for run in {family.run: None for family in self.families.values()}:
            for change in changes:
                self._ran(change, run)

    def cells(self, change: str) -> dict[str, Cell]:
        """What `change` does to the preset, by family, and under ALL everything that ran."""
        whole = {run: self._ran(change, run) for run in {family.run: None for family in self.families.values()}}
        cells = {name: _part(whole[run], subsets) for name, (run, subsets) in self.families.items()}
        if any(not cell.rows for cell in cells.values()):  # a mean over fewer families is another mean
            return cells | {ALL: Cell({}, "n/a")}
        return cells | {ALL: Cell({k: row for cell in cells.values() for k, row in cell.rows.items()})}

    def _ran(self, change: str, run: str) -> Cell:
        if (change, run) not in self._done:
            self._done[change, run] = self._run(change, run)
        return self._done[change, run]

    def _run(self, change: str, run: str) -> Cell:
        method = [] if re.search(r"(^| )method=", change) else [f"method={PRESET}"]
        arguments = [*method, *change.split(), *self.runs[run].split(), *self.common]
        said = f"run.py {shlex.join(arguments)}"
        try:
            with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
                cfg = compose("run", overrides=[*map(set_anyway, arguments), f"results_dir={self.results_dir}"])
            path = self.results_dir / runner.run(cfg, kept=self._kept).run_id
        except Exception as error:  # the other cells go on
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f"error: {reason}: {said}", file=sys.stderr, flush=True)
            if isinstance(error, MISTAKES) and not any(cell.rows for cell in self._done.values()):
                raise ValueError(f"{said}: {reason}") from error  # nor will anything else run
            self.failed.append(f"{change or PRESET}, {run}: {reason}")
            return Cell({}, reason.replace("|", "/"))
        print(f"done: {said}", file=sys.stderr, flush=True)
        rows, _ = read_rows(path / "rows.jsonl")
        good = {name: row for name, row in rows.items() if row.status == "ok"}
        bad = [row for row in rows.values() if row.status != "ok"]
        self.failed.extend(f"{change or PRESET}, {row.example_id}: {row.error}" for row in bad if row.status == "error")
        return Cell(good, bad[0].status if bad else "")


def _part(whole: Cell, subsets: Sequence[str]) -> Cell:
    """The rows of some subsets; none unless all of them have some."""
    rows = {name: row for name, row in whole.rows.items() if row.subset in subsets}
    missing = [subset for subset in subsets if subset not in {row.subset for row in rows.values()}]
    return Cell({}, whole.reason or f"no {missing[0]}") if missing else Cell(rows)


def kl(row: Row) -> float | None:
    """None where the gold text has one token only."""
    return (row.fidelity or {}).get("gold.kl")


def score(row: Row) -> float | None:
    """None where answers are not judged."""
    return 100 * (row.score or 0.0) if row.metrics else None


def change_of(cell: Cell, base: Cell, value: Callable[[Row], float | None], digits: int) -> str:
    """Mean over subsets of the mean of cell - base, of the examples that have the value in both."""
    strata: dict[str, list[tuple[float, str]]] = {}
    for name, row in cell.rows.items():
        mine, its = value(row), value(base.rows[name]) if name in base.rows else None
        if mine is not None and its is not None:
            strata.setdefault(row.subset, []).append((mine - its, row.group or name))
    if not strata:
        return "n/a" if cell.rows and base.rows else cell.reason or base.reason or "n/a"
    values, groups = ([[pair[i] for pair in pairs] for pairs in strata.values()] for i in (0, 1))
    resampled = macro(bootstraps(values, groups))  # type: ignore[arg-type]
    star = "*" if resampled.p_value() <= ALPHA else ""
    num, whole = sum(map(len, values)), sum(value(row) is not None for row in base.rows.values())
    fewer = "" if num == whole else f" (n = {num} of {whole})"
    return Number.of(resampled.interval(), digits, signed=True, mark=star).shown + fewer


def mean_of(cell: Cell, value: Callable[[Row], float | None]) -> float | None:
    """Mean over subsets; None without values."""
    subsets = dict.fromkeys(row.subset for row in cell.rows.values())
    each = [[x for row in cell.rows.values() if row.subset == s and (x := value(row)) is not None] for s in subsets]
    return fmean([fmean(values) for values in each if values]) if any(each) else None


def level(cell: Cell) -> str:
    shown = [("n/a" if x is None else f"{x:.{d}f}") for x, d in ((mean_of(cell, kl), 3), (mean_of(cell, score), 0))]
    return "; ".join(shown) + f" (n = {len(cell.rows)})" if cell.rows else cell.reason


def memory(cells: Iterable[Cell]) -> str:
    """Least and most mean share of FullKV's bytes while the gold text is read (or, of one token, while answering)."""

    def share(row: Row) -> float:
        return (row.fidelity or {}).get("gold.memory", (row.fractions or {})["mean"])

    known = [fmean(share(row) for row in cell.rows.values()) for cell in cells if cell.rows]
    return f"{min(known):.3f} - {max(known):.3f}" if known else ""


def points_table(study: Study, points: Mapping[str, Sequence[str]]) -> str:
    """KL and score of every change beside the preset's."""
    study.run_all(["", *(change for changes in points.values() for change in changes)])
    base = study.cells("")
    lines = [[f"preset {PRESET} (levels)", memory(base.values()), *map(level, base.values())]]
    for point, changes in points.items():
        for change in changes:
            cells = study.cells(change)
            shown = [
                f"{change_of(cell, base[name], kl, 3)}; {change_of(cell, base[name], score, 0)}"
                if cell.rows
                else cell.reason
                for name, cell in cells.items()
            ]
            lines.append([f"{point}: {_short(change)}", memory(cells.values()), *shown])
    return grid(["change", "memory", *(f"{name}: KL; score" for name in base)], lines)


def trials_table(study: Study, trials: Mapping[str, Sequence[str]]) -> str:
    """KL and score of every setting tried, on the examples that all settings of a method share; its lowest mean KL in
    bold.
    """
    lines = []
    study.run_all([f"method={method} {each}".strip() for method, settings in trials.items() for each in settings])
    for method, settings in trials.items():
        tried = [(each, study.cells(f"method={method} {each}".strip())) for each in settings]
        ran = [set(cells[ALL].rows) for _, cells in tried if cells[ALL].rows]
        shared = set.intersection(*ran) if ran else set()
        known = {each: x for each, cells in tried if (x := mean_of(_of(cells[ALL], shared), kl)) is not None}
        for each, cells in tried:
            cells = {family: _of(cell, shared) for family, cell in cells.items()}
            best = "**" if each in known and known[each] == min(known.values()) else ""
            name = f"{best}{_short(each) or 'as it is'}{best}"
            lines.append([method, name, memory(cells.values()), *map(level, cells.values())])
    return grid(["method", "setting", "memory", *(f"{x}: KL; score" for x in (*study.families, ALL))], lines)


def _of(cell: Cell, names: set[str]) -> Cell:
    return Cell({name: row for name, row in cell.rows.items() if name in names}, cell.reason)


def heatmap(study: Study, omegas: Sequence[int], shares: Sequence[float]) -> str:
    """KL and score per family over Omega (lines) and q (columns); KL as a figure in the results folder too."""
    changes = {(o, q): f"method.omega={o} method.q={q}" for o in omegas for q in shares}
    study.run_all(list(changes.values()))
    cells = {at: study.cells(change) for at, change in changes.items()}
    parts = []
    for name in (*study.families, ALL):
        lines = [[str(o), *(level(cells[o, q][name]) for q in shares)] for o in omegas]
        parts.append(f"{name} (KL; score)\n\n{grid(['Omega', *(f'q {q}' for q in shares)], lines)}")
    panels = {x: [[mean_of(cells[o, q][x], kl) for q in shares] for o in omegas] for x in (*study.families, ALL)}
    caption = f"KL(p_full || p_method) on the gold text, nats per token. {' '.join(study.common)}"
    figure = heatmaps(panels, [str(o) for o in omegas], [str(q) for q in shares], ("q", "Omega"), caption)
    where = "-".join(each.split("=")[1] for each in study.common[:3])
    parts += [f"figure: {path}" for path in save(figure, study.results_dir, f"heatmap-{where}")]
    return "\n\n".join(parts)


def _short(change: str) -> str:
    return change.replace("method.", "").replace("method=", "")


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    signal.signal(signal.SIGTERM, _end)
    known: dict[str, Any] = yaml.safe_load((ROOT / "configs/study.yaml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m")
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--split", default="dev", choices=["dev", "test"])
    parser.add_argument("--limit", type=int, default=4, help="examples per subset")
    parser.add_argument("--length", type=int, default=1024, help="tokens of context")
    parser.add_argument("--families", nargs="+", default=list(known["families"]), choices=list(known["families"]))
    parser.add_argument("--results-dir", type=Path, default=Path("results/study"))
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--points", nargs="+", default=list(known["points"]), choices=list(known["points"]))
    what.add_argument("--trials", nargs="*", choices=list(known["trials"]), help="of these methods, or of all")
    what.add_argument("--heatmap", action="store_true")
    args = parser.parse_args(argv)
    common = [f"model={args.model}", f"budget={args.budget}", f"split={args.split}", f"limit={args.limit}"]
    common += [f"batch_size={args.limit}", f"profile.context_length={args.length}", "metrics.fidelity=true"]
    common += ["metrics.fidelity_streams=[gold]"]
    families = {name: Family(**known["families"][name]) for name in args.families}
    study = Study(tuple(common), args.results_dir, known["runs"], families)
    try:
        if args.heatmap:
            text = heatmap(study, known["heatmap"]["omega"], known["heatmap"]["q"])
        elif args.trials is not None:
            text = trials_table(study, {name: known["trials"][name] for name in args.trials or known["trials"]})
        else:
            text = points_table(study, {point: known["points"][point] for point in args.points})
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
