"""What produced a row: code, library versions, machine. Rows of different origins are never mixed in one run.

The code of a run is the engine, the policy's file and the task's package; other methods and tasks may change freely.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

ENGINE = "qevict_bench"
READ_ROWS = (
    "alarms",
    "closing",
    "comparison",
    "forecast",
    "inspection",
    "local_workers",
    "progress",
    "report",
    "runs",
    "statistics",
    "summary",
    "sweeping",
    "sweeps",
    "tables",
    "terminal",
)
"""Modules of the engine that only read rows or show something: no row depends on them, so they may change."""
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "hydra-core")


@dataclass(frozen=True)
class Environment:
    """Recorded as env.json. `code_hash`, `versions` and `device` decide whether a run may be continued."""

    code_hash: str
    """Of engine, task and method."""
    shared_hash: str
    """Of engine and task: what runs of several methods have in common."""
    versions: dict[str, str]
    device: str
    """Device type: "cpu" or "cuda"."""
    device_name: str
    threads: int
    host: str
    git_sha: str
    git_dirty: bool

    @classmethod
    def current(cls, device: str, policy: type, task: type) -> Self:
        """Describe this process, which runs a policy on a task; `device` is where the model runs ("cpu", "cuda")."""
        import torch  # here, so that reading results does not take seconds

        sha, dirty = _git(Path(__file__).parent)
        kind = torch.device(device).type
        name = torch.cuda.get_device_name(device) if kind == "cuda" else cpu_name()
        versions = {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}
        threads, host = torch.get_num_threads(), socket.gethostname()
        code = code_hash(policy, task), code_hash(task)
        return cls(*code, versions, kind, name, threads, host, sha, dirty)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Inverse of to_json; raises ValueError for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError(f"it is not an object with the fields {', '.join(sorted(names))}")
        versions = values["versions"]
        texts = [values[name] for name in names - {"versions", "threads", "git_dirty"}]
        texts += [*versions, *versions.values()] if isinstance(versions, dict) else [versions]
        if any(not isinstance(text, str) for text in texts) or type(values["threads"]) is not int:
            raise ValueError("a field has another type")
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, other: Environment) -> list[str]:
        """What keeps rows of `self` and `other` from being mixed, as "name recorded -> now" texts."""
        mine, theirs = ({"code": e.code_hash, "device": e.device, **e.versions} for e in (self, other))
        names = sorted(mine.keys() | theirs.keys())
        return [f"{n} {mine.get(n, 'none')} -> {theirs.get(n, 'none')}" for n in names if mine.get(n) != theirs.get(n)]


def code_hash(*classes: type) -> str:
    """Hash of the engine (without READ_ROWS) and of the code of `classes`, the policy's and the task's."""
    return hash_of(code_files(*classes))


def code_files(*classes: type) -> dict[str, Path]:
    """The files that `code_hash` covers, by a name that does not depend on where they lie.

    A class's code is its module's file, or all of its package if that is no top-level one (tasks/ruler/*), and the same
    of the classes it derives from. ValueError if a class has no file.
    """
    engine = Path(__file__).parent
    paths = (path for path in engine.rglob("*.py") if path.relative_to(engine).parts[0].split(".")[0] not in READ_ROWS)
    files = {f"{ENGINE}/{path.relative_to(engine).as_posix()}": path for path in paths}
    for cls in classes:
        for base in cls.__mro__:
            if base.__module__.split(".")[0] not in (ENGINE, *sys.stdlib_module_names):
                files |= _files_of(base)
    return files


def _files_of(cls: type) -> Iterator[tuple[str, Path]]:
    try:
        path = Path(inspect.getfile(cls))
    except (TypeError, OSError):
        raise ValueError(f"{cls.__qualname__} is defined in no file, so its rows could not be told apart") from None
    package = cls.__module__.split(".")[: None if path.name == "__init__.py" else -1]
    if path.name == "__init__.py" or len(package) > 1:
        for member in path.parent.rglob("*.py"):
            yield "/".join([*package, member.relative_to(path.parent).as_posix()]), member
    else:
        yield "/".join([*package, path.name]), path


def hash_of(files: Mapping[str, Path]) -> str:
    """Hash of the files' names and contents."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0".encode())
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
def _git(folder: Path) -> tuple[str, bool]:
    """Commit of the checkout that `folder` lies in and whether tracked files differ; ("none", False) outside git.

    New files do not count (results, notes): the code that makes rows is covered by its hash.
    """
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    outputs = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            result = subprocess.run(
                ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return "none", False
        outputs.append(result.stdout.strip())
    return outputs[0], bool(outputs[1])
