"""Data sets of the Hugging Face Hub: from a local copy, from the cache of its library, or fetched whole.

A set that is nowhere near is an error within seconds: the Hub is asked once, with a deadline, before anything that
would retry for half a minute is called.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.utils.tqdm import disable_progress_bars as disable_download_bars
from yaml import YAMLError

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0

T = TypeVar("T")

# HTTPError of the HTTP library, httpx for huggingface_hub 1.x and httpx2 for 2.x, and OSError.
_HTTP_ERRORS = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
_HUB_ERRORS: tuple[type[Exception], ...] = (ValueError, EntryNotFoundError, *_HTTP_ERRORS)
"""A name that can be none is a ValueError."""
_DAMAGE = (OSError, ValueError, TypeError, RuntimeError, YAMLError, zipfile.BadZipFile)
"""What damaged or foreign files raise, beside DatasetsError."""


@functools.lru_cache(maxsize=4)
def names(hub_id: str, known: str) -> tuple[str, ...]:
    """The configurations of a set. `hub_id` is OWNER/NAME or a folder; `known` a set of this form, for messages.

    Raises ValueError, with the command that fetches the set, if it cannot be had or read.
    """
    return _read(hub_id, known, _names)


@functools.lru_cache(maxsize=16)
def splits(hub_id: str, name: str | None, known: str) -> Mapping[str, Any]:
    """Split -> rows (datasets.Dataset) of the configuration `name`, None for the set's default. Else as `names`."""
    return _read(hub_id, known, functools.partial(_splits, name=name))


def folder(hub_id: str, known: str) -> Path:
    """Where the files of a set lie, for sets that are not in a form of `datasets`. Else as `names`."""
    return _read(hub_id, known, Path)


def _names(folder: str) -> tuple[str, ...]:
    from datasets import get_dataset_config_names

    return tuple(get_dataset_config_names(folder))


def _splits(folder: str, name: str | None) -> dict[str, Any]:
    from datasets import load_dataset

    return dict(load_dataset(folder, name))


def _read(hub_id: str, known: str, read: Callable[[str], T]) -> T:
    """What `read` makes of the folder with the set's files."""
    command = f"`hf download {_name(hub_id, known)} --repo-type dataset --local-dir DIR`"

    def found(folder: str) -> T:
        from datasets import disable_progress_bars
        from datasets.exceptions import DatasetsError

        disable_progress_bars()
        try:
            with _quiet():
                return read(folder)
        except (DatasetsError, *_DAMAGE) as error:
            raise ValueError(
                f"hub_id={hub_id!r}: {folder} cannot be read as a data set ({_reason(error.__cause__ or error)}); "
                f"fetch it anew with {command} and set task.hub_id=DIR"
            ) from error

    if os.path.isdir(hub_id):
        return found(str(Path(hub_id).resolve()))  # some relative paths are names to load_dataset
    with suppress(*_HUB_ERRORS):
        return found(snapshot_download(hub_id, repo_type="dataset", local_files_only=True))
    try:
        folder = _fetch(hub_id)
    except _HUB_ERRORS as error:
        raise ValueError(
            f"hub_id={hub_id!r} is no folder here, and the Hub did not give it ({_reason(error)}); where there is a "
            f"network run {command}, put DIR on this machine and set task.hub_id=DIR"
        ) from error
    return found(folder)


def _fetch(hub_id: str) -> str:
    with _quiet():
        commit = _in_time(lambda: HfApi().dataset_info(hub_id, timeout=TIMEOUT_S).sha)
    log.info("fetching the data set %s from the Hub", hub_id)
    with _quiet():
        return snapshot_download(hub_id, repo_type="dataset", revision=commit)


def _in_time(ask: Callable[[], T]) -> T:
    """What `ask` gives or raises, or TimeoutError: its own timeout holds for each of the Hub's addresses anew."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # raised below
            answer.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return answer.result(TIMEOUT_S)
    except TimeoutError as error:
        raise TimeoutError(f"{error}" or f"no answer within {TIMEOUT_S:g} s") from error


def _name(hub_id: str, known: str) -> str:
    """What to fetch: `known` where `hub_id` is, or can only be, a path."""
    return hub_id if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", hub_id) and not os.path.isdir(hub_id) else known


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and remarks; errors are raised all the same."""
    disable_download_bars()
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub", "httpx", "httpx2")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
