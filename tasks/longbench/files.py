"""The official files: NAME.jsonl and NAME_e.jsonl in a folder, in its folder data/, or in data.zip."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from tasks.longbench.items import Found

FETCH = "`hf download zai-org/LongBench data.zip --repo-type dataset --local-dir DIR`"
_LONGEST = 16 << 20
"""Bytes of the longest line that is read; no row of LongBench has a tenth of that."""
_BOM = b"\xef\xbb\xbf"
_ZIP_ERRORS = (OSError, RuntimeError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)


def rows(folder: Path, name: str, setting: str = "") -> Iterator[Found]:
    """The rows of a dataset's file; blank lines are none. `setting` begins messages, "" = data_dir=FOLDER.

    Raises ValueError if there is no such file.
    """
    with _opened(folder, name, setting) as (label, stream):
        number = 0
        while line := stream.readline(_LONGEST + 1):
            number += 1
            where = f"{label}, line {number}"
            if len(line) > _LONGEST and not line.endswith(b"\n"):
                while (rest := stream.readline(_LONGEST)) and not rest.endswith(b"\n"):
                    pass
                yield Found(where, None, f"the line is longer than {_LONGEST >> 20} MiB")
                continue
            if number == 1:
                line = line.removeprefix(_BOM)
            if line.strip():
                yield _parsed(line, where)


def hash_file(folder: Path, name: str, setting: str = "") -> str:
    """Hash of the bytes of a dataset's file. Raises ValueError as `rows`, and for a file without rows."""
    digest, blank = hashlib.sha256(), True
    with _opened(folder, name, setting) as (label, stream):
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
            blank = blank and not chunk.removeprefix(_BOM).strip()
    if blank:
        raise ValueError(f"{label} has no rows; fetch the data anew with {FETCH}, or take {name} out of task.subsets")
    return digest.hexdigest()


def _parsed(line: bytes, where: str) -> Found:
    try:
        return Found(where, json.loads(line.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        return Found(where, None, f"not a JSON object ({' '.join(str(error).split())[:120]})")


@contextmanager
def _opened(folder: Path, name: str, setting: str) -> Iterator[tuple[str, IO[bytes]]]:
    """A dataset's file, with a label for messages."""
    setting = setting or f"data_dir={str(folder)!r}"
    candidates = folder / f"{name}.jsonl", folder / "data" / f"{name}.jsonl"
    archive = folder if folder.suffix == ".zip" else folder / "data.zip"
    try:
        if path := next((path for path in candidates if path.is_file()), None):
            with path.open("rb") as stream:
                yield str(path), stream
            return
        if archive.is_file():
            with zipfile.ZipFile(archive) as packed, packed.open(_member(packed, name)) as stream:
                yield f"{archive}, {name}.jsonl", stream
            return
    except LookupError:
        raise ValueError(
            f"{setting}: {archive} has no {name}.jsonl; take {name} out of task.subsets, or fetch the "
            f"file anew with {FETCH}"
        ) from None
    except _ZIP_ERRORS as error:
        raise ValueError(
            f"{setting}: {name}.jsonl cannot be read ({type(error).__name__}: {error}); fetch the data "
            f"anew with {FETCH}"
        ) from error
    raise ValueError(
        f"{setting} has no {name}.jsonl, nor data/{name}.jsonl or data.zip; where there is a network run "
        f"{FETCH} and set task.data_dir=DIR, or take {name} out of task.subsets"
    )


def _member(packed: zipfile.ZipFile, name: str) -> str:
    found = [member for member in packed.namelist() if PurePosixPath(member).name == f"{name}.jsonl"]
    if not found:
        raise LookupError(name)
    return min(found, key=lambda member: (member.startswith("__"), len(member)))
