"""How long does the report take? Makes runs by hand and times scripts/report.py on them.

    python scripts/bench_report.py [--runs 200] [--rows 500] [--folder DIR]

Two models, methods m00, m01, ... at five budgets, rows in ten subsets with fidelity. Prints seconds and peak memory of
the process that made the report.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench.environment import Environment  # noqa: E402
from qevict_bench.rows import SHARES, Row, row_line  # noqa: E402

SUBSETS = 10
BUDGETS = (1.0, 0.4, 0.2, 0.1, 0.05)
ENVIRONMENT = Environment(
    "c0de", "5ha5ed", {"python": "3.11", "torch": "2.13"}, "cpu", "some cpu", 1, "host", "0" * 40, False
)


def row_of(model: str, method: str, budget: float, run_id: str) -> Row:
    """What the rows of a run share."""
    return Row(
        run_id=run_id,
        model=model,
        method=method,
        variant="",
        task="ruler",
        seed=0,
        split="test",
        budget=str(budget),
        basis="sequence",
        enforce="always",
        small_budget="clamp",
        batch_size=1,
        protocol="query_aware",
        mode="reset",
        answer_prefix_at="in_prompt",
        instruction_at="context",
        first_token="compressed",
        prompt_source="own",
        device="cpu",
        dtype="bfloat16",
        git_sha="0" * 40,
    )


def rows_of(first: Row, count: int, skill: float, random: Random) -> Iterator[Row]:
    budget = float(first.budget)
    for number in range(count):
        subset, index = f"subset_{number % SUBSETS}", number // SUBSETS
        score = float(random.random() < skill * budget**0.3)
        yield replace(
            first,
            subset=subset,
            example_id=f"{subset}-{index:04}",
            index=index,
            status="ok",
            answers=("4146649",),
            prediction=f" {random.random()}",
            stop="eos",
            new_tokens=8,
            prompt_tokens=1000,
            score=score,
            metrics={"string_match_all": score},
            bytes={"mean": 1e6 * budget, "workspace": 0.0, "host": 0.0, "payload.full": 1e6 * budget},
            fractions=dict.fromkeys((*SHARES, "allowed"), 0.99 * budget),
            matched=True,
            tier_units={"full": 8.0},
            needle_fate={"full": 0.5, "evicted": 0.5},
            knobs={},
            fidelity={"gold.kl": random.random(), "gold.kl_first": 0.1, "gold.agreement": 0.5, "gold.nll_change": 0.1},
        )


def make(folder: Path, num_runs: int, num_rows: int) -> None:
    random, made = Random(0), 0
    for number in range(10**6):
        for model in ("one", "two"):
            for budget in BUDGETS[: 1 if number == 0 else None]:
                if made == num_runs:
                    return
                method, run_id = "full_kv" if number == 0 else f"m{number:02}", f"{made:012x}"
                path = folder / run_id
                path.mkdir(parents=True)
                rows = rows_of(row_of(model, method, budget, run_id), num_rows, 1.0 - 0.02 * number, random)
                (path / "rows.jsonl").write_bytes(b"".join(map(row_line, rows)))
                config = {
                    "model": {"name": model},
                    "method": {"name": method, "_target_": "methods.snapkv.SnapKV"},
                    "reference": {"name": "full_kv"},
                    "task": {"_target_": "tasks.ruler.Ruler", "context_length": 1024},
                    "protocol": {"name": "query_aware"},
                }
                (path / "config.yaml").write_text(json.dumps(config))
                (path / "env.json").write_text(json.dumps(asdict(ENVIRONMENT)))
                made += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="where to leave runs and report; a temporary one if not given")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        make(folder / "runs", args.runs, args.rows)
        command = [sys.executable, str(ROOT / "scripts/report.py"), f"runs={folder / 'runs'}", f"output_dir={folder}"]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        took = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{args.runs} runs x {args.rows} rows: {took:.1f} s ({used.ru_utime + used.ru_stime:.1f} s of CPU)")
    print(f"peak memory {used.ru_maxrss / 2**20:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
