"""Files of rows: read whole, refused where they are damaged, and lengthened so that a crash leaves whole lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from qevict_bench.rows import Row, parse_row


class Damaged(ValueError):
    """A result file that cannot be read; the message names file and line."""


def read_rows(path: Path) -> tuple[dict[str, Row], int]:
    """The newest row per example id, and the length in bytes of the file without its torn last line (if it has one).

    Raises Damaged for any other line that is not a row, or not one of the same run, or that gives an example another
    place (subset, index) or a place another example than a line above. A missing file has no rows.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}, 0
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror}); make it readable or remove it") from None
    whole = data.rfind(b"\n") + 1
    rows: dict[str, Row] = {}
    ids: dict[tuple[str, int], str] = {}
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            row = parse_row(json.loads(line))
            known = rows.get(row.example_id, row)
            if row.run_id != next(iter(rows.values()), row).run_id:
                raise ValueError(f"it belongs to run {row.run_id}, the first line does not")
            if known.place != row.place or ids.setdefault(row.place, row.example_id) != row.example_id:
                raise ValueError(f"{row.example_id} at index {row.index} of {row.subset} contradicts a line above")
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged_line(path, number, str(error)) from None
        rows[row.example_id] = row
    return rows, whole


def damaged_line(path: Path, number: int, reason: str) -> Damaged:
    """What to raise for a line of rows.jsonl."""
    return Damaged(
        f"{path}:{number} is damaged ({reason}); repair or delete that line, or start over with resume=restart"
    )


def lengthen(stream: FileIO, lines: Iterable[bytes]) -> None:
    """Append lines so that they survive the death of this process and of the machine; all of them, or none."""
    rest, size = b"".join(lines), os.fstat(stream.fileno()).st_size
    try:
        while rest:
            rest = rest[stream.write(rest) :]
        os.fsync(stream.fileno())
    except OSError:
        with suppress(OSError):
            stream.truncate(size)
        raise
