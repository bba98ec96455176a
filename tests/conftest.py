"""Fixtures shared by all tests: seeds, the tiny model, and the embedded models (skipped if their package is absent)."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, and for the processes that tests start

import pytest
import torch
import yaml
from script_modules import calibrate
from tiny_models import engine

from qevict_bench.models import LoadedModel, ModelSpec

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden/*.json with what the code does now"
    )


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What methods with calibrated tables find prepared for model=tiny."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QEVICT_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        calibrate(engine()).save(engine().fingerprint, {})
        yield


def spec_of(config: str) -> ModelSpec:
    """The ModelSpec of configs/model/CONFIG.yaml."""
    fields = yaml.safe_load((ROOT / "configs" / "model" / f"{config}.yaml").read_text())
    assert fields.pop("_target_") == "qevict_bench.models.ModelSpec"
    return ModelSpec(**fields)


def load_embedded(config: str) -> LoadedModel:
    spec = spec_of(config)
    try:
        importlib.metadata.distribution(spec.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"the package {spec.package} is not installed: {spec.install}")
    return ModelSpec(spec.name, spec.source, spec.package, spec.install, dtype="float32", device="cpu").load()


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """The random 4-layer Llama with the byte tokenizer, float32 on the CPU."""
    return ModelSpec("tiny", "tiny", device="cpu").load()


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct, float32 on the CPU."""
    return load_embedded("smollm2_135m")


@pytest.fixture(scope="session")
def gemma3() -> LoadedModel:
    """Gemma 3 270M base, float32 on the CPU."""
    return load_embedded("gemma3_270m")
