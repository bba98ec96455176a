"""A KVQuant calibration of the tiny model, made by the script itself in a folder of the test's own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from qevict_bench.models import LoadedModel
from qevict_bench.nuq import Codebooks

ROOT = Path(__file__).parents[1]


def calibration_script() -> ModuleType:
    """scripts/calibrate_kvquant.py as a module."""
    name = "calibrate_kvquant"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        path = list(sys.path)
        spec.loader.exec_module(module)
        sys.path[:] = path
    return sys.modules[name]


def calibrate(loaded: LoadedModel, samples: int = 4, length: int = 256) -> Codebooks:
    """Codebooks from the script's default text."""
    from omegaconf import OmegaConf

    script = calibration_script()
    cfg = OmegaConf.create({"text": "prose", "samples": samples, "length": length, "seed": 0})
    made: Codebooks = script.calibrate(loaded, script.texts_of(cfg, loaded))
    return made
