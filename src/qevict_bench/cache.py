"""The folder for what can be made again: converted weights, hashes, sizes of generated prompts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def cache_dir() -> Path:
    """$QEVICT_BENCH_CACHE, or ~/.cache/qevict_bench. ValueError if it cannot be written."""
    folder = Path(os.environ.get("QEVICT_BENCH_CACHE") or Path.home() / ".cache" / "qevict_bench").expanduser()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ValueError(f"The cache folder {folder} cannot be written: set QEVICT_BENCH_CACHE to another")
    return folder
