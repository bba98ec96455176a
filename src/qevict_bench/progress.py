"""Progress on stderr: a bar with remaining time on a terminal, else a plain line now and then (log files, CI)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from qevict_bench.leases import Held

LINE_EVERY_S = 20.0


@contextmanager
def counting(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that is told how many examples more are done."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc=label, unit="ex", dynamic_ncols=True) as bar:
            yield bar.update
        return
    start = last_line = time.monotonic()
    done = 0

    def advance(count: int) -> None:
        nonlocal done, last_line
        done += count
        now = time.monotonic()
        if now - last_line >= LINE_EVERY_S:
            last_line = now
            left_s = (now - start) / done * max(total - done, 0)
            print(f"{label}: {done}/{total} examples, about {left_s:.0f} s left", file=sys.stderr, flush=True)

    yield advance


class Patience:
    """Called again and again while a folder is held; raises Held once that took longer than a process needs to join."""

    def __init__(self, most_s: float = 2.0):
        self._most_s, self._begin = most_s, time.monotonic()

    def __call__(self, owner: str) -> None:
        if time.monotonic() - self._begin > self._most_s:
            raise Held(owner)
        time.sleep(0.05)


class Waiting:
    """Called again and again while something is awaited: sleeps a little, says so at the start and now and then."""

    def __init__(self, label: str, pause_s: float = 0.5):
        self._label, self._pause_s, self._last_line = label, pause_s, float("-inf")

    def __call__(self, owner: str) -> None:
        if time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            print(f"waiting for {self._label}, held by {owner}", file=sys.stderr, flush=True)
        time.sleep(self._pause_s)
