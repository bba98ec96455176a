"""The files of scripts/ as modules, and a KVQuant calibration of a model made by its script."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from qevict_bench.models import LoadedModel
from qevict_bench.nuq import Codebooks

ROOT = Path(__file__).parents[1]


@cache
def script(name: str) -> ModuleType:
    """scripts/NAME.py; what it adds to the import path is taken back."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def calibrate(loaded: LoadedModel, samples: int = 4, length: int = 256) -> Codebooks:
    """Codebooks from the script's default text."""
    from omegaconf import OmegaConf

    calibration = script("calibrate_kvquant")
    cfg = OmegaConf.create({"text": "prose", "samples": samples, "length": length, "seed": 0})
    made: Codebooks = calibration.calibrate(loaded, calibration.texts_of(cfg, loaded))
    return made
