"""What other processes make of a task: nothing may hang on the hash seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def made_elsewhere(task: str) -> str:
    """Fingerprint and hash of the examples of `task` ("tasks.needle:NeedleGrid()") as two other processes make them."""
    module, _, call = task.partition(":")
    code = (
        f"import hashlib; from {module} import {call.partition('(')[0]}; from qevict_bench.task import Prompter; "
        "from small_tokenizers import merging_tokenizer; prompter = Prompter(merging_tokenizer(chat=False), False); "
        f"task = {call}; made = repr(list(task.examples(prompter, 9, 0, 'test'))); "
        "print(task.fingerprint(), hashlib.sha256(made.encode()).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    return outputs.pop()
