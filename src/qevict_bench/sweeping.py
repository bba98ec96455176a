"""Carrying out a sweep: its cells one after the other in this process, or by others, and how they stand in the end."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omegaconf import DictConfig

from qevict_bench import local_workers
from qevict_bench.closing import last_line
from qevict_bench.environment import Environment
from qevict_bench.forecast import forecasts, render
from qevict_bench.inspection import inspect
from qevict_bench.kept import Kept
from qevict_bench.leases import Held
from qevict_bench.results import RunFailed
from qevict_bench.runner import Company, Plan, carry_out, make_plan
from qevict_bench.settings import build
from qevict_bench.standing import read_json
from qevict_bench.summary import Summary
from qevict_bench.sweeps import FAILED, OVER, Cell, Sweep, forget_failure, labels, note_failure, stand, table
from qevict_bench.tracking import Off

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """`dry_run`: say what the sweep would take, and run nothing. `only`: all cells, or those that have failed."""

    dry_run: bool = False
    only: Literal["all", "failed"] = "all"


class Planned(NamedTuple):
    """A cell and its run; None if none can be made of it."""

    cell: Cell
    plan: Plan | None


class Sweeping:
    """One command's sweep. `arguments` are the command's, `options` and `launcher` those groups of configs/run.yaml."""

    def __init__(self, arguments: Sequence[str], options: Mapping[str, Any], launcher: Mapping[str, Any]) -> None:
        self._arguments, self._launcher = tuple(arguments), dict(launcher)
        self._options: Options = build(Options, options, "sweep.")
        self._kept = Kept()
        self._planned: list[Planned] = []

    def plan(self, overrides: Sequence[str], cfg: DictConfig) -> None:
        """One more cell: its fields, and the configuration that they give."""
        try:
            plan = make_plan(cfg, self._kept)
        except ValueError as error:
            self._planned.append(Planned(Cell("", tuple(overrides), "", " ".join(str(error).split())), None))
        else:
            self._planned.append(Planned(Cell("", tuple(overrides), plan.job.run_id), plan))

    def run(self, launch: Callable[[Sequence[Sequence[str]]], None]) -> None:
        """Carry it out; `launch` gives cells to Hydra's launcher.

        Raises ValueError if no cell can be planned, RunFailed if one has no result in the end.
        """
        plans = [plan for _, plan in self._planned if plan is not None]
        if not plans:
            raise ValueError(self._planned[0].cell.problem)
        results_dir = plans[0].settings.results_dir
        cells = [replace(p.cell, label=x) for p, x in zip(self._planned, self._labels(), strict=True)]
        planned = [Planned(cell, plan) for cell, (_, plan) in zip(cells, self._planned, strict=True)]
        if self._options.dry_run:
            for cell in (cell for cell in cells if cell.problem):
                print(f"{cell.label} cannot be run: {cell.problem}")
            named = {plan.job.run_id: (cell.label, plan) for cell, plan in planned if plan is not None}
            print(render(list(forecasts(named.values(), self._kept))), flush=True)
            return
        if self._options.only == "failed":
            planned = [p for p in planned if stand(results_dir, p.cell).kind in FAILED]
        if local_workers.IS_ONE:
            self._work(results_dir, planned)
            return
        if self._launcher["name"] == "local_gpus" and plans[0].settings.resume == "restart":
            raise ValueError(
                "resume=restart with launcher=local_gpus: one process would set aside what another one does"
            )
        wanted = {cell.run_id or cell.label: cell for cell in reversed(cells)}
        sweep = Sweep(self._arguments, os.getcwd(), tuple(cell for cell in cells if cell in wanted.values()))
        sweep.write(results_dir)
        if self._launcher["name"] == "here":
            self._work(results_dir, planned)
        elif self._launcher["name"] == "local_gpus":
            local_workers.run(self._arguments, self._launcher, results_dir / ".sweeps" / sweep.name)
        else:
            launch([list(cell.overrides) for cell, plan in planned if plan is not None and not finished(plan)])
        conclude(results_dir, sweep)

    def _labels(self) -> list[str]:
        return labels([cell.overrides for cell, _ in self._planned])

    def _work(self, results_dir: Path, planned: Sequence[Planned]) -> None:
        """Cells that nobody works on, then those that others did."""
        held: list[tuple[str, Plan]] = []
        for number, (cell, plan) in enumerate(planned, 1):
            name = f"cell {number} of {len(planned)} ({cell.label})" if cell.label else f"cell {number}"
            if plan is None:
                log.error("%s failed: %s", name, cell.problem)
            elif finished(plan):
                log.info("%s is finished: run %s", name, plan.job.run_id)
            else:
                try:
                    self._attempt(name, plan, first=True)
                except Held as other:
                    log.info("%s is running elsewhere: %s", name, other)
                    held.append((name, plan))
        for name, plan in held:
            self._attempt(name, plan, first=False)

    def _attempt(self, name: str, plan: Plan, first: bool) -> None:
        log.info("%s: run %s", name, plan.job.run_id)
        try:
            print(last_line(attempt(plan, self._kept, first)), flush=True)
        except Held:
            raise
        except Exception as error:  # the other cells go on
            log.error(
                "%s failed: %s", name, " ".join(str(error).split()), exc_info="QEVICT_BENCH_TRACEBACK" in os.environ
            )


def attempt(plan: Plan, kept: Kept, first: bool = False) -> Summary:
    """Carry out one cell, and write down why if it has no result."""
    results_dir, run_id = plan.settings.results_dir, plan.job.run_id
    try:
        summary = carry_out(plan, None, kept, Company(first))
    except Held:
        raise
    except Exception as error:
        note_failure(results_dir, run_id, error)
        raise
    forget_failure(results_dir, run_id)
    return summary


def finished(plan: Plan) -> bool:
    """Whether a run has all that its command asks for, made under the same conditions; loads nothing."""
    if plan.settings.resume == "restart" or not isinstance(plan.tracker, Off):
        return False
    path = plan.settings.results_dir / plan.job.run_id
    found = inspect(path)
    if found is None or found.kind not in OVER:
        return False
    wanted = {"limit": plan.settings.limit, "subsets": list(plan.task.subsets)}
    same = not Environment.from_json(read_json(path / "env.json")).differences(plan.job.environment)
    return same and read_json(path / "wanted.json") == wanted


def conclude(results_dir: Path, sweep: Sweep) -> None:
    """Print how the cells stand; raises RunFailed unless each has a result, or is infeasible, or has others at it."""
    stands = [stand(results_dir, cell) for cell in sweep.cells]
    print("\n".join(table(results_dir, sweep.cells, stands)), flush=True)
    bad = [run for run in stands if run.kind not in (*OVER, "running")]
    if bad:
        raise RunFailed(
            f"{len(bad)} of {len(stands)} cells of sweep {sweep.name} have no result; mend that and re-issue the "
            f"command, or let `python scripts/status.py {results_dir} --retry` do so"
        )
