"""Haystack sizes found before, so that an example made again needs no tokenizer.

One file per (tokenizer, length, seed, split, data folders, generator) in the user cache. One JSON line per example: its
id, the number of units, and a hash of the text they gave. A line that is damaged, or whose text differs, is as good as
none.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from qevict_bench.cache import cache_dir
from qevict_bench.task import Example, Prompter
from tasks.ruler.fit import Draft, fit

_HINT = 0.99  # of the first example's units: somewhat fewer, so that most others fit

log = logging.getLogger(__name__)


class Lengths:
    """The sizes of one file. If the cache folder cannot be written, sizes are found anew each time."""

    def __init__(self, prompter: Prompter, context_length: int, seed: int, split: str, data: str) -> None:
        key = f"{prompter.fingerprint}/{context_length}/{seed}/{split}/{data}/{_generator()}"
        self._context_length, self._prompter = context_length, prompter
        try:
            self._path: Path | None = cache_dir() / "ruler" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.jsonl"
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            log.warning("haystack sizes are not kept: %s", error)
            self._path = None
        self._known = self._read()

    def examples(self, drafts: Iterable[Draft]) -> Iterator[Example]:
        """The examples of one subset at the sizes that fit, the first one's being tried first for the others.

        Raises ValueError as `fit` does.
        """
        hint = 0
        for draft in drafts:
            num_units, example = self._sized(draft, hint)
            hint = hint or int(_HINT * num_units)
            yield example

    def _sized(self, draft: Draft, hint: int) -> tuple[int, Example]:
        num_units, text_hash = self._known.get(draft.id, (0, ""))
        if draft.min_units <= num_units <= min(draft.max_units, self._context_length):
            known = draft.build(num_units)
            if _hash(known) == text_hash:
                return num_units, known
        num_units, found = fit(draft, self._context_length, self._prompter, hint)
        self._keep(draft.id, num_units, _hash(found))
        return num_units, found

    def _read(self) -> dict[str, tuple[int, str]]:
        known: dict[str, tuple[int, str]] = {}
        try:
            lines = self._path.read_bytes().splitlines() if self._path is not None else []
        except OSError:
            return known
        for line in lines:
            try:
                name, num_units, text_hash = json.loads(line)
                known[str(name)] = (int(num_units), str(text_hash))
            except (ValueError, TypeError, OverflowError, RecursionError):
                continue
        return known

    def _keep(self, name: str, num_units: int, text_hash: str) -> None:
        self._known[name] = (num_units, text_hash)
        if self._path is None:
            return
        try:
            with open(
                self._path, "ab", buffering=0
            ) as stream:  # one short write: lines of several processes stay whole
                stream.write(json.dumps([name, num_units, text_hash]).encode() + b"\n")
        except OSError as error:
            log.warning("haystack sizes are not kept: %s", error)
            self._path = None


def _hash(example: Example) -> str:
    return hashlib.sha256(repr(example).encode()).hexdigest()[:16]


@functools.cache
def _generator() -> str:
    """Hash of the code that makes examples."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
