"""The report's tables and figures as one run of Weights & Biases: python scripts/wandb_dashboard.py [FIELD=VALUE ...]

    python scripts/report.py && python scripts/wandb_dashboard.py [output_dir=results] [project=qevict-bench]
                                [name=report] [mode=offline|online] [dir=results]

Reads output_dir/tables/*.csv and output_dir/figures/*.png as scripts/report.py wrote them. Offline (the default) it
writes below dir/wandb, to be sent by `wandb sync`; online needs `wandb login`. Exit codes: 0; 1 if W&B refuses it;
2 for a mistake in the input.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench.settings import build  # noqa: E402
from qevict_bench.terminal import allow_any_sign, plain  # noqa: E402


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    output_dir: Path = Path("results")
    project: str = "qevict-bench"
    name: str = "report"
    mode: Literal["offline", "online"] = "offline"
    dir: Path = Path("results")


def arguments(texts: Sequence[str]) -> Arguments:
    """From FIELD=VALUE texts; raises ValueError for anything else."""
    for text in texts:
        if "=" not in text:
            raise ValueError(f"{text} is no FIELD=VALUE; fields: {', '.join(f.name for f in fields(Arguments))}")
    made: Arguments = build(Arguments, dict(text.split("=", 1) for text in texts), "")
    return made


def log(asked: Arguments) -> str:
    """Log everything that is there, and say what it was. Raises ValueError if there is no report."""
    tables, figures = (sorted((asked.output_dir / name).glob(f"*.{end}")) for name, end in PARTS)
    if not tables and not figures:
        raise ValueError(f"output_dir={asked.output_dir} has no tables or figures; run scripts/report.py first")
    import wandb

    asked.dir.mkdir(parents=True, exist_ok=True)
    with wandb.init(
        project=asked.project,
        name=asked.name,
        job_type="report",
        mode=asked.mode,
        dir=str(asked.dir),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, init_timeout=30),
    ) as run:
        for path in tables:
            header, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
            data = [[*row, *[""] * (len(header) - len(row))][: len(header)] for row in rows]
            run.log({f"tables/{path.stem}": wandb.Table(columns=header, data=data)}, step=0)
        for path in figures:
            run.log({f"figures/{path.stem}": wandb.Image(str(path))}, step=0)
        return f"{len(tables)} tables and {len(figures)} figures in run {run.id} ({asked.mode}, {asked.dir / 'wandb'})"


PARTS = (("tables", "csv"), ("figures", "png"))


def main(argv: Sequence[str] | None = None) -> int:
    texts = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & {*texts}:
        print(__doc__)
        return 0
    try:
        print(log(arguments(texts)))
    except (ValueError, OSError) as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return 2
    except Exception as error:  # whatever W&B raises
        print(f"error: W&B did not take the report ({plain(f'{type(error).__name__}: {error}')})", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    allow_any_sign()
    sys.exit(main())
