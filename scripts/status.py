"""How the runs of a folder stand: python scripts/status.py [RESULTS_DIR] [--sweep NAME] [--watch] [--retry]

One line per run, the one written last at the bottom, and one per cell of a sweep that has no run yet. Reads only, takes
no lock, and may look on while others write, on this machine or another. --retry issues sweeps again for their failed
cells. Exit code 1 if a run has failed examples, no result, or damaged files, 2 if RESULTS_DIR is no folder.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench.inspection import KINDS, Run, inspect, table  # noqa: E402
from qevict_bench.rowfiles import Damaged  # noqa: E402
from qevict_bench.sweeps import FAILED, Sweep, read_sweeps, stand  # noqa: E402
from qevict_bench.terminal import allow_any_sign, plain  # noqa: E402


def runs_in(results_dir: Path, sweeps: Sequence[Sweep], others: bool) -> list[Run]:
    """The cells of these sweeps, and other runs of the folder too if asked for; the one written last comes last."""
    cells = {cell.run_id or cell.label: cell for sweep in sweeps for cell in sweep.cells}
    found = [stand(results_dir, cell) for cell in cells.values()]
    folders = results_dir.iterdir() if others and results_dir.exists() else ()
    names = (path for path in sorted(folders) if path.is_dir() and path.name not in cells)
    found += [run for path in names if (run := inspect(path)) is not None]
    return sorted(found, key=lambda run: run.written_s)


def show(found: Sequence[Run]) -> None:
    """One line per run, and how many there are of each kind."""
    print("\n".join(table(found)))
    counts = Counter(run.kind for run in found)
    plural = "s" if len(found) > 1 else ""
    print(
        f"{len(found)} run{plural}: {', '.join(f'{counts[kind]} {kind}' for kind in KINDS if counts[kind])}", flush=True
    )


def show_failed(found: Sequence[Run]) -> None:
    """One line per failed example or run."""
    for run in found:
        for row in run.failed:
            print(plain(f"{run.name} {row.method} {row.example_id}: {row.error}"))
        if run.kind in FAILED and not run.failed:
            print(plain(f"{run.name} {run.state}"))


def retry(results_dir: Path, sweeps: Sequence[Sweep]) -> int:
    """Issue the sweeps that have failed cells again, for those; the exit code of the last one that fails."""
    code = 0
    for sweep in sweeps:
        if any(stand(results_dir, cell).kind in FAILED for cell in sweep.cells):
            arguments = [text for text in sweep.arguments if not text.startswith("sweep.only=")]
            command = [sys.executable, str(ROOT / "run.py"), *arguments, "sweep.only=failed"]
            code = subprocess.run(command, cwd=sweep.folder, check=False).returncode or code
    return code


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="How the runs of a folder stand.")
    parser.add_argument("results_dir", nargs="?", type=Path, default=Path("results/runs"), metavar="RESULTS_DIR")
    parser.add_argument("--failed", action="store_true", help="list every failed example with its reason")
    parser.add_argument("--sweep", metavar="NAME", help="only the cells of this sweep, or of the `last` one")
    parser.add_argument("--retry", action="store_true", help="issue sweeps again for their failed cells")
    parser.add_argument("--watch", type=float, nargs="?", const=5.0, metavar="S", help="show it every S (5) seconds")
    options = parser.parse_args(arguments)
    results_dir: Path = options.results_dir
    try:
        if results_dir.exists() and not results_dir.is_dir():
            raise ValueError(f"{results_dir} is not a folder; name the results_dir of the runs")
        known = read_sweeps(results_dir)
        sweeps = [s for s in known if options.sweep in (None, s.name)] if options.sweep != "last" else known[-1:]
        if options.sweep and not sweeps:
            names = ", ".join(sweep.name for sweep in known)
            raise ValueError(f"--sweep {options.sweep}: {results_dir} has no such sweep; choose of: {names or 'none'}")
    except (ValueError, Damaged) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.retry:
        return retry(results_dir, sweeps)
    while True:
        found = runs_in(results_dir, sweeps, others=options.sweep is None)
        if not found:
            print(f"no runs in {results_dir}")
        elif options.failed:
            show_failed(found)
        else:
            show(found)
        if options.watch is None or not any(run.kind == "running" for run in found):
            return int(any(run.failed or run.kind in FAILED for run in found))
        time.sleep(options.watch)
        if sys.stdout.isatty():
            print("\033[H\033[J", end="")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet in `| head`
    allow_any_sign()
    sys.exit(main())
