"""GSM8K on the Hugging Face Hub, or a local copy of such a set: splits test and, if it has it, train.

Columns: question, answer. Of several configurations "main" is taken (openai/gsm8k has "socratic" too).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tasks.gsm8k.problems import Data, data, problem

_TIMEOUT_S = 5.0


@functools.lru_cache(maxsize=4)
def load(hub_id: str) -> Data:
    """The problems of a set. Raises ValueError, within seconds, if it cannot be had, and for bad rows."""
    splits = _splits(hub_id)
    if "test" not in splits or not len(splits["test"]):
        raise ValueError(f"hub_id={hub_id!r} has no problem in a split test, only {', '.join(splits) or 'nothing'}")
    found = {
        name: [problem(row, f"{hub_id}, {name}, row {i}") for i, row in enumerate(splits[name])]
        for name in ("test", "train")
        if name in splits
    }
    return data(found["test"], found.get("train", ()))


def _splits(hub_id: str) -> Any:
    """The set as split -> rows, from the local cache of the Hub if it is there."""
    from datasets import disable_progress_bars
    from huggingface_hub.utils.tqdm import disable_progress_bars as disable_download_bars

    disable_progress_bars()
    disable_download_bars()
    if Path(hub_id).is_dir():
        return _loaded(hub_id, hub_id)
    try:
        return _loaded(hub_id, _snapshot(hub_id, cached=True))
    except Exception:  # not there, or not complete
        return _loaded(hub_id, _downloaded(hub_id))


def _loaded(hub_id: str, folder: str) -> Any:
    from datasets import get_dataset_config_names, load_dataset

    try:
        names = get_dataset_config_names(folder)
        return load_dataset(folder, "main" if "main" in names else None)
    except Exception as error:  # the library raises many kinds
        raise ValueError(
            f"hub_id={hub_id!r}: {folder} cannot be read as a data set ({_reason(error)}); fetch it anew with "
            f"`{_command(hub_id)}` and set task.hub_id=DIR"
        ) from error


def _downloaded(hub_id: str) -> str:
    try:
        return _snapshot(hub_id, cached=False)
    except Exception as error:  # missing, gated, no network, no such name
        raise ValueError(
            f"hub_id={hub_id!r} is no folder here, and the Hub did not give it ({_reason(error)}); where there is a "
            f"network run `{_command(hub_id)}`, put DIR on this machine and set task.hub_id=DIR"
        ) from error


def _snapshot(hub_id: str, *, cached: bool) -> str:
    """The folder of the set's files. Unlike load_dataset it does not retry for half a minute without a network."""
    from huggingface_hub import HfApi, snapshot_download

    commit = None if cached else HfApi().dataset_info(hub_id, timeout=_TIMEOUT_S).sha
    return str(snapshot_download(hub_id, repo_type="dataset", revision=commit, local_files_only=cached))


def _command(hub_id: str) -> str:
    name = "openai/gsm8k" if Path(hub_id).is_dir() else hub_id
    return f"hf download {name} --repo-type dataset --local-dir DIR"


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
