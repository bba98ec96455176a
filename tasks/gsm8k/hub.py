"""GSM8K on the Hugging Face Hub, or a local copy of such a set: splits test and, if it has it, train.

Columns: question, answer. Of several configurations "main" is taken (openai/gsm8k has "socratic" too).
"""

from __future__ import annotations

import functools

from qevict_bench import hub
from tasks.gsm8k.problems import Data, data, problem

_KNOWN = "openai/gsm8k"


@functools.lru_cache(maxsize=4)
def load(hub_id: str) -> Data:
    """The problems of a set. Raises ValueError, within seconds, if it cannot be had, and for bad rows."""
    splits = hub.splits(hub_id, "main" if "main" in hub.names(hub_id, _KNOWN) else None, _KNOWN)
    if "test" not in splits or not len(splits["test"]):
        raise ValueError(f"hub_id={hub_id!r} has no problem in a split test, only {', '.join(splits) or 'nothing'}")
    found = {
        name: [problem(row, f"{hub_id}, {name}, row {i}") for i, row in enumerate(splits[name])]
        for name in ("test", "train")
        if name in splits
    }
    return data(found["test"], found.get("train", ()))
