"""Several processes of this machine on one sweep, each with a GPU and a share of the cores of its own."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_MARK = "QEVICT_BENCH_WORKER"
IS_ONE = _MARK in os.environ
"""Whether this process was started by `run`."""
_RUN = Path(__file__).parents[2] / "run.py"
_PATIENCE_S = 60.0
log = logging.getLogger(__name__)


def run(arguments: Sequence[str], launcher: Mapping[str, Any], folder: Path) -> None:
    """Start run.py with `arguments` once per GPU (or `launcher.workers` times) and wait for all; they log in `folder`.

    What they achieve is told by the runs' folders. Raises ValueError if there is no GPU and no number of workers.
    """
    gpus = _gpus()
    count = launcher.get("workers", 0) or len(gpus)
    if type(count) is not int or count < 0:
        raise ValueError(f"launcher.workers={count} is no number of processes; give one, or 0 for one per GPU")
    if not count:
        raise ValueError(
            "launcher=local_gpus: torch sees no GPU here; launcher.workers=N starts N processes all the same"
        )
    folder.mkdir(parents=True, exist_ok=True)
    log.info("%d processes: %s", count, folder / "worker-*.log")
    with ExitStack() as stack:
        children = [
            stack.enter_context(_Child(command, environment, folder / f"worker-{index}.log"))
            for index, (command, environment) in enumerate(commands(arguments, gpus, count))
        ]
        codes = [child.process.wait() for child in children]
    for index, code in enumerate(codes):
        if code:
            log.warning("process %d ended with exit code %d: %s", index, code, folder / f"worker-{index}.log")


def commands(arguments: Sequence[str], gpus: Sequence[str], count: int) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Command line and environment of each process."""
    own = [
        text
        for text in arguments
        if not re.match(r"\+*(launcher|shard)[.=]", text) and text not in ("-m", "--multirun")
    ]
    threads = str(max(1, len(os.sched_getaffinity(0)) // count))
    for index in range(count):
        gpu = {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}
        share = ["launcher=here", f"shard.count={count}", f"shard.index={index}"]
        environment = {"OMP_NUM_THREADS": threads, **os.environ, _MARK: str(index), **gpu}
        yield [sys.executable, str(_RUN), "-m", *own, *share], environment


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


class _Child:
    """A process that is asked to end, and then made to, when its parent has to."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_file: Path) -> None:
        with open(log_file, "ab") as stream:
            self.process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
