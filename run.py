"""Evaluate one method on one task with one model: python run.py method=qevict task=ruler budget=0.2

Every field of configs/run.yaml can be set that way; --help lists the choices. Exit codes: 0 done, 1 no result, 2 a
mistake in the input (one line on stderr), 130 interrupted, 143 terminated, 140 stopped by SIGUSR2 (as Slurm warns of a
time limit). QEVICT_BENCH_TRACEBACK=1 shows tracebacks.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from qevict_bench.closing import render
from qevict_bench.kept import Kept
from qevict_bench.results import RunFailed
from qevict_bench.runner import make_plan, run
from qevict_bench.settings import set_anyway
from qevict_bench.sweeping import attempt
from qevict_bench.terminal import allow_any_sign
from qevict_bench.tracking import leave

_CONFIGS = Path(__file__).parent / "configs"
_SHOW_TRACEBACK = "QEVICT_BENCH_TRACEBACK" in os.environ
os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and leaving with code 1


@hydra.main(version_base="1.3", config_path=str(_CONFIGS), config_name="run")
def main(cfg: DictConfig) -> None:
    if HydraConfig.get().mode is RunMode.MULTIRUN:  # a job of a launcher; other sweeps are hydra_plugins/'s
        kept = Kept()
        print(render(attempt(make_plan(cfg, kept), kept)), flush=True)
        return
    try:
        print(render(run(cfg)), flush=True)
    except (ValueError, RunFailed) as error:
        if _SHOW_TRACEBACK:
            raise
        sys.exit(report(error))


class Terminated(KeyboardInterrupt):
    """A signal that ends the process: what is open is closed first. args[0] is the signal."""


def command_line(arguments: list[str], job: Callable[[], None] = main) -> int:
    """Run `job`, a Hydra main over configs/run.yaml, with these arguments; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    allow_any_sign()
    for text in arguments:
        if label := re.match(
            r"\+*((?:method|reference|model|protocol|profile|task|tracker|launcher)\.(?:name|_target_))=", text
        ):
            return report(ValueError(f"{label[1]} is a label, not a setting; choose another yaml, e.g. method=snapkv"))
        if problem := _syntax(text):
            return report(ValueError(problem))
    sys.argv[1:] = map(set_anyway, arguments)
    if job is main:
        sys.argv.append("hydra/sweeper=cells")
    handled = [each for each in (signal.SIGTERM, signal.SIGUSR2) if signal.getsignal(each) is signal.SIG_DFL]
    for each in handled:
        signal.signal(each, _end)
    try:
        job()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 1
    except (ValueError, RunFailed, HydraException, OmegaConfBaseException, KeyboardInterrupt) as error:
        if _SHOW_TRACEBACK:
            raise
        return report(error)
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number))


def _syntax(text: str) -> str:
    """What is wrong with FIELD=VALUE as Hydra reads it, and how to write it; "" if nothing is."""
    field, equals, value = text.partition("=")
    if not equals or field.startswith("-"):
        return ""
    if not re.fullmatch(r"[+~]*[\w./:@-]+", field):
        return f"{text} names no field; write FIELD=VALUE, such as budget=0.2"
    try:
        OverridesParser.create().parse_override(text)
    except HydraException as error:
        escaped = re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + ('\\"' if found[2] else ""), value)
        quoted = shlex.quote(f'{field}="{escaped}"')
        brackets = re.match(r"""["'\[{]|\w+\(""", value)
        remedy = "close its brackets and quotes; to give it as text, write" if brackets else "quote it:"
        return f"{text} cannot be read ({error}); {remedy} {quoted}"
    return ""


def report(error: BaseException) -> int:
    """Say in one line what went wrong, and return the exit code."""
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if isinstance(error, Terminated) else signal.SIGINT
        name = f" by {number.name}" if isinstance(error, Terminated) else ""
        message, code = f"interrupted{name}; re-issue the command to continue", 128 + number
    else:
        message, code = _one_line(error), 1 if isinstance(error, RunFailed) else 2
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def _one_line(error: BaseException) -> str:
    """The message without Hydra's search paths and grammar advice; with the known fields if one is unknown."""
    text = re.split(r"Config search path|\n?See https|To append to your config", str(error))[0]
    if unknown := re.match(r"Could not override '([^']+)'", text):
        names = re.findall(r"^(?:  - )?(\w+):", (_CONFIGS / "run.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE)
        text = f"{unknown[1]} is no field; fields: {', '.join(n for n in names if n not in ('defaults', 'hydra'))}"
    return " ".join(text.split())


if __name__ == "__main__":
    leave(command_line(sys.argv[1:]))
