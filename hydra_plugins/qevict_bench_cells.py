"""Hydra's part in a sweep: fields with several values become cells, and launchers other than here get them as jobs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

_ROOT = Path(__file__).parents[1]
log = logging.getLogger(__name__)


class CellSweeper(BasicSweeper):
    """Plans every cell before the first one runs, leaves out those that are finished, and ends with a table."""

    def sweep(self, arguments: list[str]) -> Any:
        from qevict_bench.sweeping import Sweeping  # seconds of imports; Hydra loads this file for every command

        assert self.config is not None
        given = [text for text in sys.argv[1:] if text != "hydra/sweeper=cells"]
        options: Any = OmegaConf.to_container(self.config)
        sweeping = Sweeping(given, options["sweep"], options["launcher"])
        for overrides in self._cells(arguments):
            sweeping.plan(overrides, self._composed(overrides))
        return sweeping.run(self._launch)

    def _cells(self, arguments: list[str]) -> list[list[str]]:
        """The fields of each cell."""
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        [cells] = self.split_arguments(overrides, None)
        return cells

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of a cell; Hydra's own part of it counts until the next one."""
        assert self.config is not None
        assert self.hydra_context is not None
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        HydraConfig.instance().set_config(config)
        cfg = deepcopy(config)
        with read_write(cfg), open_dict(cfg):
            del cfg["hydra"]
        return cfg

    def _launch(self, cells: Sequence[Sequence[str]]) -> None:
        """Give the cells to Hydra's launcher. What becomes of them is told by their folders, not by what it returns."""
        assert self.launcher is not None
        assert self.config is not None
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        given = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), str(_ROOT / "src"), *given])  # jobs import all of ours
        size = self.max_batch_size or max(len(cells), 1)
        for start in range(0, len(cells), size):
            try:
                self.launcher.launch(cells[start : start + size], initial_job_idx=start)
            except Exception as error:  # a job that was cancelled or killed
                log.error("%s: %s", type(self.launcher).__name__, error)
