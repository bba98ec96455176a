"""Progress on stderr: a bar with remaining time on a terminal, else a plain line now and then (log files, CI)."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

LINE_EVERY_S = 20.0


class Progress:
    """Counts examples; a context manager. With `total` 0 it shows nothing."""

    def __init__(self, label: str, total: int):
        self._label, self._total, self._count = label, total, 0
        self._start = self._last_line = time.monotonic()
        self._bar = (
            tqdm(total=total, desc=label, unit="ex", dynamic_ncols=True) if total and sys.stderr.isatty() else None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int) -> None:
        self._count += count
        if self._bar is not None:
            self._bar.update(count)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            left_s = (now - self._start) / self._count * max(self._total - self._count, 0)
            text = f"{self._label}: {self._count}/{self._total} examples, about {left_s:.0f} s left"
            print(text, file=sys.stderr, flush=True)


class Waiting:
    """Called again and again while something is awaited: sleeps a little, says so at the start and now and then."""

    def __init__(self, label: str, pause_s: float = 0.5):
        self._label, self._pause_s, self._last_line = label, pause_s, float("-inf")

    def __call__(self, owner: str) -> None:
        if time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            print(f"waiting for {self._label}, held by {owner}", file=sys.stderr, flush=True)
        time.sleep(self._pause_s)
