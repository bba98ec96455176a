"""From plain configuration values to checked objects. Every mistake is a ValueError with the value and the remedy."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qevict_bench.budget import Budget

MAX_SEED = 2**31 - 1


@dataclass(frozen=True)
class Shard:
    """Which of `count` parts of a run this process begins with; it goes on with what is left of the others'."""

    count: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count={self.count} is not positive; give the number of processes that share a run")
        if not 0 <= self.index < self.count:
            raise ValueError(f"index={self.index} is out of range; give 0 to {self.count - 1}, or a larger shard.count")


@dataclass(frozen=True)
class Settings:
    """The fields of a run that belong to no method, task or model. `limit` examples per subset."""

    budget: str
    basis: str
    enforce: str
    small_budget: str
    first_token: Literal["compressed", "full"]
    split: Literal["test", "dev"]
    seed: int
    limit: int
    batch_size: int
    results_dir: Path
    resume: Literal["continue", "restart"]
    shard: Shard = Shard()

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} is out of range; give an integer from 0 to {MAX_SEED}")
        for name in ("limit", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not positive; give an integer of at least 1")
        if not str(self.results_dir).strip(" .") and str(self.results_dir) != ".":
            raise ValueError("results_dir is empty; name a folder")
        if self.shard.count > 1 and self.resume == "restart":
            raise ValueError("resume=restart with shard.count > 1: one process would set aside what another one does")
        self.parsed_budget()

    def parsed_budget(self) -> Budget:
        return Budget(self.budget, self.basis, self.enforce, self.small_budget)


Stream = Literal["gold", "full_kv"]
STREAMS: tuple[Stream, ...] = ("gold", "full_kv")
"""The texts along which next-token distributions are compared (fidelity.py)."""


@dataclass(frozen=True)
class Metrics:
    """What is measured beside the task's own metrics. `fidelity`: next-token distributions beside FullKV's, along the
    gold text and FullKV's own answer (or one of them: `fidelity_streams`), `fidelity_tokens` of each at most.
    """

    fidelity: bool = False
    fidelity_tokens: int = 48
    fidelity_streams: tuple[Stream, ...] = STREAMS

    def __post_init__(self) -> None:
        if self.fidelity_tokens < 1:
            raise ValueError(f"fidelity_tokens={self.fidelity_tokens} is not positive; give an integer of at least 1")
        if not self.fidelity_streams:
            raise ValueError(f"fidelity_streams=[] is empty; give [{', '.join(STREAMS)}] or one of them")


def set_anyway(override: str) -> str:
    """FIELD=VALUE for Hydra, with ++ where a yaml may leave the field to its dataclass's default."""
    return re.sub(r"^(method|reference|task|model|tracker)\.", r"++\g<0>", override)


def build(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """Make the dataclass `cls` from `values`; `where` ("task.") goes before field names in messages.

    Lists become tuples and integers floats where the field's type says so; nothing else is converted, except that a
    text field takes a number's text. Raises ValueError for unknown, missing and wrongly typed fields.
    """
    known = {field.name: field for field in fields(cls) if field.init}
    hints = get_type_hints(cls)
    for name, value in values.items():
        if name in known and known[name].metadata.get("fitted"):
            raise ValueError(f"{where}{name}={value} is chosen by the method from budget and enforce; leave it out")
        if name not in known:
            raise ValueError(
                f"{where}{name}={value} is no field of {cls.__name__}; fields: {', '.join(known) or 'none'}"
            )
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where}{name} has no value; set {where}{name}=...")
    checked = {name: _checked(value, hints[name], where + name) for name, value in values.items()}
    with naming(cls, where):
        return cls(**checked)


@contextmanager
def naming(cls: type[Any], where: str) -> Iterator[None]:
    """Puts `where` before the message of a ValueError that begins with FIELD=, a field of the dataclass `cls`."""
    try:
        yield
    except ValueError as error:
        first = re.match(r"(\w+)=", str(error))
        if first and first[1] in (field.name for field in fields(cls)):
            raise ValueError(f"{where}{error}") from error
        raise


def _checked(value: Any, hint: Any, name: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or (isinstance(hint, type) and not origin and hint is not float and type(value) is hint):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (str, Path) and type(value) in (str, int, float):
        return hint(str(value))
    if origin is Literal:
        if value in arguments:
            return value
        raise ValueError(f"{name}={value} is unknown; choose one of {', '.join(map(str, arguments))}")
    if origin is tuple and isinstance(value, list | tuple):
        element = arguments[0] if arguments[-1:] == (...,) else None
        hints = [element] * len(value) if element is not None else list(arguments)
        if len(hints) == len(value):
            return tuple(_checked(item, hint, name) for item, hint in zip(value, hints, strict=True))
    if origin in (Union, types.UnionType):
        for option in arguments:
            if option is type(None) and value is None:
                return None
            try:
                return _checked(value, option, name)
            except ValueError:
                continue
    raise ValueError(f"{name}={value} has the wrong type; give {_words(hint)}")


def _words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return "a list such as [a,b]"
    simple = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    return simple.get(hint, str(hint).replace("typing.", ""))
