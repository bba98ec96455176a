"""Where weights lie on this machine: a conversion in the user's cache, or a snapshot of the Hub.

Everything here gives a folder in the transformers format. Conversions are made once, by one process, and checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import io
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from qevict_bench.cache import cache_dir

log = logging.getLogger(__name__)

CONVERTER = "1"  # another value when what a conversion writes changes: older conversions are then redone
MARKER = "converted.json"
HUB_TIMEOUT_S = 5.0
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
HUB_COPIES = ["original/*", "consolidated*"]  # second copies of the weights
VOLATILE = ("transformers_version", "dtype", "torch_dtype", "_name_or_path")  # fields that do not change the model

# What the installed HTTP library raises, whichever it is: httpx for huggingface_hub 1.x, httpx2 for 2.x.
HUB_ERRORS = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and remarks of transformers; errors are raised all the same."""
    verbosity, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()


def hub_snapshot(model_id: str, revision: str) -> Path:
    """The snapshot folder, named after its commit: from the local cache if it is complete there, else downloaded.

    Raises ValueError, within seconds, if the model is in neither place.
    """
    if not model_id:
        raise ValueError("model=hub needs an id: model.id=OWNER/NAME")
    fetch = functools.partial(snapshot_download, model_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_COPIES)
    try:
        folder = Path(fetch(revision=revision, local_files_only=True))
        if is_complete(folder):
            return folder
    except HUB_ERRORS:
        log.info("%s is not in the local Hugging Face cache: asking the Hub", model_id)
    try:
        commit = HfApi().model_info(model_id, revision=revision, timeout=HUB_TIMEOUT_S).sha  # fails fast, unlike fetch
        return Path(fetch(revision=commit))
    except HUB_ERRORS as error:
        raise ValueError(
            f"model.id={model_id!r} (revision {revision!r}) is not complete in the local Hugging Face cache, and the "
            f"Hub did not give it ({type(error).__name__}). Check the id and the network; for a gated model accept its "
            "licence and run 'hf auth login'; or use model=local model.path=FOLDER with a copy"
        ) from error


def is_complete(folder: Path) -> bool:
    """Whether a folder holds configuration, tokenizer and every shard of the weights."""
    index = folder / "model.safetensors.index.json"
    shards = set(_read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    has_tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    return has_tokenizer and all((folder / name).is_file() for name in {"config.json", *shards})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): restore the file") from error
    return fields


def build_once(target: Path, key: Mapping[str, str], build: Callable[[Path], None], note: str) -> Path:
    """The folder `target`, as `build` filled it for `key`: built if it is absent, damaged or of another key.

    `build` writes into an empty folder beside `target` that takes its name only when complete, so a killed build
    leaves nothing that looks finished. Of several processes one builds (logging `note`) and the others wait.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    if _is_intact(target, key):
        return target
    with open(target.with_name(f"{target.name}.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process: %s", note)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_intact(target, key):
            return target
        log.info("%s", note)
        for leftover in target.parent.glob(f".{target.name}.*"):
            shutil.rmtree(leftover)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            build(scratch)
            files = {path.name: _digest(path) for path in sorted(scratch.iterdir())}
            (scratch / MARKER).write_text(json.dumps({"key": dict(key), "files": files}, indent=2))
            if target.exists():
                shutil.rmtree(target)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _is_intact(target: Path, key: Mapping[str, str]) -> bool:
    try:
        marker = json.loads((target / MARKER).read_text())
        return marker["key"] == dict(key) and all(
            sha256_of(target / name) == digest for name, digest in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def embedded_folder(name: str, package: str, install: str) -> Path:
    """The converted weights of the distribution `package`; `install` is the command told to a user without it.

    The distribution holds either a .gguf file, located by the package's file list and never imported, or parts of
    one and a function `assemble(path)` that joins and checks them. Raises ValueError if any of it is missing.
    """
    missing = f"model={name} needs the package {package}: {install} (or make setup)"
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(missing) from error
    listed = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    if listed and not listed[0].is_file():
        raise ValueError(f"{missing}; the one installed has lost its file {listed[0].name}")

    def build(folder: Path) -> None:
        if listed:
            convert_gguf(listed[0], folder)
        else:
            convert_gguf(_assemble(package, folder / "assembled.gguf", missing), folder)
            (folder / "assembled.gguf").unlink()

    key = {"package": package, "version": distribution.version, "converter": CONVERTER}
    if listed:
        key["gguf_sha256"] = sha256_of(listed[0])
    target = cache_dir() / "models" / f"{name}-{distribution.version}"
    return build_once(target, key, build, f"converting {name} (once, up to a minute) ...")


def _assemble(package: str, target: Path, missing: str) -> Path:
    try:
        return Path(importlib.import_module(package.replace("-", "_")).assemble(target))
    except (ImportError, FileNotFoundError) as error:
        raise ValueError(f"{missing}; a part of it is missing ({error})") from error


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model, dequantized and rounded to bfloat16, and its tokenizer in the transformers format.

    Raises ValueError if the installed transformers misreads the tokenizer.
    """
    with quiet(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    if len(tokenizer.tokenize("number")) != 1:  # 5.17 loses Gemma's merges
        raise ValueError(f"transformers {transformers.__version__} misreads the tokenizer of {gguf.name}; use 5.24")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)  # 5.17 takes SmolLM2's BOS for it
    with quiet():
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def identity_of(folder: Path) -> str:
    """What a model folder holds, as a text: configuration, weights and tokenizer, not the version that wrote them."""
    identity: dict[str, object] = {}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            fields = _read_json(folder / name)
            identity[name] = {field: value for field, value in fields.items() if field not in VOLATILE}
    others = [
        path
        for pattern in ("*.safetensors", "tokenizer.*", "vocab.json", "merges.txt", "*.jinja")
        for path in folder.glob(pattern)
    ]
    identity.update({path.name: sha256_of(path) for path in others})
    return json.dumps(identity, sort_keys=True)


def sha256_of(path: Path) -> str:
    """The file's sha256, remembered in the cache folder for as long as its size and modification time stay."""
    stat = path.stat()
    entry = cache_dir() / "hashes" / _sha256_text(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}")
    if entry.is_file():
        return entry.read_text()
    digest = _digest(path)
    entry.parent.mkdir(exist_ok=True)
    scratch = entry.with_name(f"{entry.name}.{os.getpid()}")
    scratch.write_text(digest)
    scratch.replace(entry)
    return digest


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
