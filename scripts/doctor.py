"""Is a method fit for a table? python scripts/doctor.py method=snapkv model=tiny

Runs the admission gates (src/qevict_bench/gates.py) on random prompts of 320 tokens, one line each: pass, fail or n/a,
the measured value, and what it means; the last line is the badge. A gate is n/a where the method has nothing to examine
or, `vacuous`, where nothing happened that could have gone wrong: try a smaller budget. Takes the fields of
configs/run.yaml, such as budget=0.3 or method.window=16; a budget that the method cannot meet on so short a prompt is
raised, and that is said. Models run in float32, where rounding hides nothing, unless model.dtype says otherwise.
Seconds per method on the tiny model, some minutes on an embedded one. Exit codes: 0 all gates pass, 1 one fails, 2 a
mistake in the input, 130 interrupted.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

import run as cli  # noqa: E402
from qevict_bench.attention import register  # noqa: E402
from qevict_bench.budget import Infeasible  # noqa: E402
from qevict_bench.gate_runs import affordable  # noqa: E402
from qevict_bench.gates import FAIL, Outcome, badge, outcomes  # noqa: E402
from qevict_bench.models import LoadedModel  # noqa: E402
from qevict_bench.runner import make_plan  # noqa: E402


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="run")
def main(cfg: DictConfig) -> None:
    try:
        code = examine(cfg)
    except (ValueError, Infeasible) as error:
        code = cli.report(ValueError(str(error)))
    if code:
        sys.exit(code)


def examine(cfg: DictConfig) -> int:
    """Run every gate and print what it finds; the exit code. Raises ValueError or Infeasible before the first gate."""
    begin, plan = time.perf_counter(), make_plan(cfg)
    spec = replace(plan.spec, dtype="float32") if plan.spec.dtype == "auto" else plan.spec
    loaded: LoadedModel = spec.load(register())
    budget = affordable(loaded, plan.job.policy, plan.job.budget)
    print(f"{cfg.method.name} on {loaded.name} ({loaded.dtype}, {loaded.device}) at budget={budget.spec}", flush=True)
    if budget != plan.job.budget:
        print(f"      (budget={plan.job.budget.spec} is infeasible on prompts this short)")
    found = []
    for outcome in outcomes(loaded, plan.job.policy, budget):
        found.append(outcome)
        print(line(outcome), flush=True)
    print(f"{badge(found)} in {time.perf_counter() - begin:.0f} s", flush=True)
    return int(any(outcome.status == FAIL for outcome in found))


def line(outcome: Outcome) -> str:
    """One row of the report."""
    measured = "" if math.isnan(outcome.measured) else f"{outcome.measured:.3g}"
    said = " ".join(outcome.said.split())
    return f"{outcome.status:4}  {outcome.gate:21}  {measured:>8}  {said}"


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    sys.exit(cli.command_line(sys.argv[1:], main))
