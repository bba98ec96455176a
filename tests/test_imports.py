"""Who may import whom: the dependency diagram of the project, enforced on the source as written.

Imports inside functions and under TYPE_CHECKING count like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "src" / "qevict_bench"

# Module of the engine -> the modules of the engine it may import. Modules that are not listed are bound only by the
# rules below the table. `models` includes the two modules that it alone is made of.
MAY_IMPORT: dict[str, set[str]] = {
    "budget": set(),
    "rope": set(),
    "metrics": set(),
    "longbench_metrics": set(),
    "kernels": {"codecs"},
    "packing": set(),
    "codecs": {"budget", "packing"},
    "nuq": {"cache", "codecs", "packing"},
    "scoring": {"budget", "codecs"},
    "selection": {"budget", "codecs", "policy"},
    "policy": {"budget", "codecs"},
    "fitting": {"budget", "policy", "selection"},
    "routing": {"budget", "codecs", "fitting", "policy", "scoring", "selection"},
    "observing": {"budget", "policy", "scoring", "selection"},
    "slots": {"budget", "codecs"},
    "units": {"budget", "codecs"},
    "store": {"budget", "codecs", "policy", "rope", "slots", "units"},
    "accounting": {"budget", "codecs", "policy", "slots", "store", "units"},
    "attention": {"kernels", "policy", "rope", "slots", "store"},
    "tiny": set(),
    "cache": set(),
    "hub": set(),
    "weights": {"cache"},
    "models": {"budget", "cache", "tiny", "weights"},
    "trace": {"budget"},
    "task": {"metrics"},
    "protocol": {"task"},
    "leases": set(),
    "environment": set(),
    "progress": {"leases"},
    "kept": {"task"},
    "settings": {"budget"},
    "rows": set(),
    "rowfiles": {"rows"},
    "workers": {"leases", "rowfiles", "rows"},
    "results": {"environment", "leases", "rowfiles", "rows", "workers"},
    "sharing": {"environment", "leases", "results", "rowfiles", "rows", "workers"},
    "standing": {"rowfiles", "rows"},
    "terminal": set(),
    "inspection": {"leases", "rowfiles", "rows", "standing", "terminal", "workers"},
    "sweeps": {"inspection", "results", "rowfiles", "standing", "terminal"},
    "local_workers": set(),
    "statistics": set(),
    "diagnostics": {"policy"},
    "agreement": {"diagnostics"},
    "comparison": {"rows", "statistics"},
    "alarms": {"comparison", "rows", "statistics"},
    "closing": {"alarms", "comparison", "statistics", "summary"},
    "tables": {"statistics"},
    "runs": {"comparison", "environment", "rowfiles", "rows", "standing", "terminal"},
    "report": {
        *("alarms", "closing", "comparison", "figures", "results", "rows", "runs", "settings", "statistics"),
        *("tables", "task"),
    },
}
METHODS_MAY_IMPORT = {
    f"qevict_bench.{name}"
    for name in ("policy", "observing", "scoring", "selection", "routing", "fitting", "codecs", "nuq", "budget")
}
TASKS_MAY_IMPORT = {f"qevict_bench.{name}" for name in ("task", "metrics", "longbench_metrics", "cache", "hub")}
HYDRA = {"hydra", "omegaconf"}
OURS = ("qevict_bench", "methods", "tasks", "run", "scripts", "tests")


def imports(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Every module that the source of `module` imports, dotted and absolute.

    `from package import name` gives package.name for our own packages, since the name may be a module.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names_modules = base in OURS or node.module is None
            yield from (f"{base}.{alias.name}" for alias in node.names) if names_modules else [base]


def imports_of(path: Path) -> set[str]:
    base = ROOT / "src" if path.is_relative_to(ROOT / "src") else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return set(imports(path.read_text(), ".".join(parts[:-1] if is_package else parts), is_package))


def top(name: str) -> str:
    return name.partition(".")[0]


def part_of_engine(path: Path) -> str:
    """store for qevict_bench/store.py, kernels for qevict_bench/kernels/any.py."""
    return path.relative_to(ENGINE).with_suffix("").parts[0]


def python_files(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", python_files(ENGINE), ids=shown)
def test_the_engine(path: Path) -> None:
    found = imports_of(path)
    forbidden = {name for name in found if top(name) in ("methods", "tasks", "run", "scripts", "tests")}
    assert not forbidden, "the engine knows no method and no task: `_target_` in the yaml is the only registry"
    part = part_of_engine(path)
    if part not in ("runner", "sweeping"):
        assert not {name for name in found if top(name) in HYDRA}, "only the runner and its sweeps know Hydra"
    if part in MAY_IMPORT:
        ours = {name.split(".")[1] for name in found if name.startswith("qevict_bench.")}
        extra = ours - MAY_IMPORT[part] - {part, "__version__"}
        assert not extra, f"{part} may import {sorted(MAY_IMPORT[part]) or 'nothing of ours'}"


@pytest.mark.parametrize("path", python_files(ROOT / "methods"), ids=shown)
def test_a_method_knows_the_interface_only(path: Path) -> None:
    found = imports_of(path)
    extra = {name for name in found if top(name) in OURS} - METHODS_MAY_IMPORT
    assert not extra, f"a method may import {sorted(METHODS_MAY_IMPORT)}, and no other method"
    assert not {name for name in found if top(name) in {"transformers", *HYDRA}}


@pytest.mark.parametrize("path", python_files(ROOT / "tasks"), ids=shown)
def test_a_task_knows_no_model(path: Path) -> None:
    found = imports_of(path)
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts[:2])  # a task's own file or folder
    ours = {name for name in found if top(name) in OURS} - TASKS_MAY_IMPORT
    extra = {name for name in ours if name != own and not name.startswith(f"{own}.")}
    assert not extra, f"a task may import {sorted(TASKS_MAY_IMPORT)} and files of its own folder"
    assert not {name for name in found if top(name) in {"torch", "transformers", *HYDRA}}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch.nn.functional as F", "torch.nn.functional"),
        ("from qevict_bench import store", "qevict_bench.store"),
        ("from qevict_bench.store import KVStore", "qevict_bench.store"),
        ("from . import store", "qevict_bench.store"),
        ("from .store import KVStore", "qevict_bench.store"),
        ("from ..qevict_bench.store import KVStore", "qevict_bench.store"),
        ("def f():\n    from methods.h2o import H2O", "methods.h2o"),
        ("from methods import h2o", "methods.h2o"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hydra", "hydra"),
    ],
)
def test_every_form_of_import_is_seen(line: str, found: str) -> None:
    assert found in set(imports(line, "qevict_bench.policy"))
