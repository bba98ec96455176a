"""What produced a row: code, library versions, machine. Rows of different origins are never mixed in one run."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch

_CODE = ("qevict_bench", "methods", "tasks")
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "hydra-core")


@dataclass(frozen=True)
class Environment:
    """Recorded as env.json. `code_hash`, `versions` and `device` decide whether a run may be continued."""

    code_hash: str
    versions: dict[str, str]
    device: str
    """Device type: "cpu" or "cuda"."""
    device_name: str
    threads: int
    host: str
    git_sha: str
    git_dirty: bool

    @classmethod
    def current(cls, device: str) -> Self:
        """Describe this process; `device` is where the model runs, such as "cpu" or "cuda"."""
        sha, dirty = _git()
        kind = torch.device(device).type
        name = torch.cuda.get_device_name(device) if kind == "cuda" else cpu_name()
        versions = {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}
        return cls(code_hash(), versions, kind, name, torch.get_num_threads(), socket.gethostname(), sha, dirty)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: Environment) -> list[str]:
        """What keeps rows of `self` and `other` from being mixed, as "name recorded -> now" texts."""
        mine, theirs = ({"code": e.code_hash, "device": e.device, **e.versions} for e in (self, other))
        names = sorted(mine.keys() | theirs.keys())
        return [f"{n} {mine.get(n, 'none')} -> {theirs.get(n, 'none')}" for n in names if mine.get(n) != theirs.get(n)]


@cache
def code_hash() -> str:
    """Hash of every Python file of the engine, the methods and the tasks."""
    specs = {package: find_spec(package) for package in _CODE}
    return hash_of({name: [*(spec.submodule_search_locations or ())] for name, spec in specs.items() if spec})


def hash_of(packages: Mapping[str, Sequence[str | Path]]) -> str:
    """Hash of the Python files below the folders of each package, by relative path and content."""
    digest = hashlib.sha256()
    for package, folders in packages.items():
        for folder in folders:
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def cpu_name() -> str:
    """Model name of the CPU as Linux reports it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def _git() -> tuple[str, bool]:
    """Commit of the checkout this file lies in and whether tracked or new files differ; ("none", False) outside git."""
    folder = Path(__file__).parent
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    outputs = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        try:
            result = subprocess.run(
                ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return "none", False
        outputs.append(result.stdout.strip())
    return outputs[0], bool(outputs[1])
