"""What a session really holds: every storage and every Python number that can be reached from it, listed or not.

The walk starts at the session, its policy and the model, and follows attributes, containers, closures, caches of
decorators, and the class attributes and module globals of our own code. Not seen: files, other processes, memory that
an extension holds (ctypes, a thread in C++), the rotary tables of `Rope`, globals of other packages, and integers
hidden in counters that the engine keeps anyway. A gate built on this stops mistakes, not an opponent.
"""

from __future__ import annotations

import gc
import mmap
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy
from qevict_bench.rope import Rope
from qevict_bench.session import KVSession
from qevict_bench.spy import Spy
from qevict_bench.trace import RowTrace

ENGINE = __name__.partition(".")[0]
LEAVES = (torch.Generator, torch.dtype, torch.device, ModuleType, int, float, complex, type(None))
RAW = (bytes, bytearray, memoryview, array, mmap.mmap)
NUMBER = 8  # bytes that a number in a Python container is taken for
SKIPPED = {KVSession: {"_probe"}, Rope: {"_tables"}, RowTrace: {"decode"}}
"""Attributes that are no memory of a row: the rows asked for in one step, tables of the model, a log of the steps."""


@dataclass
class Holdings:
    """`storages` of tensors by address; `loose` bytes of numpy arrays, of buffers and strings, and of the numbers in
    containers. Things found are kept, so that no address is used again while this lives.
    """

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    loose: int = 0
    things: list[Any] = field(default_factory=list)


def holdings(*roots: Any) -> Holdings:
    """Everything that can be reached from `roots`; the classes' packages and the engine are our own code."""
    kinds = [root if isinstance(root, type) else type(root) for root in roots]
    own = {ENGINE, *(_package(base) for kind in kinds for base in kind.__mro__)} - _FOREIGN
    found, done, arrays = Holdings(), set[int](), dict[int, int]()
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, LEAVES) or id(thing) in done:
            continue
        done.add(id(thing))
        found.things.append(thing)
        if isinstance(thing, Tensor):
            if thing.untyped_storage().nbytes():
                found.storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage()
            waiting += vars(thing).values()
        elif isinstance(thing, np.ndarray):
            if thing.base is None:
                arrays[thing.ctypes.data] = thing.nbytes
            waiting.append(thing.base)
        elif isinstance(thing, str):
            found.loose += len(thing)
        elif isinstance(thing, RAW):
            found.loose += thing.nbytes if isinstance(thing, memoryview) else len(memoryview(thing).cast("B"))
        else:
            if isinstance(thing, list | tuple | set | frozenset | deque):
                found.loose += NUMBER * sum(isinstance(x, int | float | complex) for x in thing)
            elif isinstance(thing, dict):
                found.loose += NUMBER * sum(isinstance(x, int | float | complex) for x in thing.values())
            waiting += _inside(thing, own)
    found.loose += sum(size for at, size in arrays.items() if at not in found.storages)
    return found


def _inside(thing: Any, own: set[str]) -> Iterator[Any]:
    if isinstance(thing, FunctionType):
        yield from (*(thing.__closure__ or ()), thing.__defaults__, thing.__kwdefaults__, vars(thing))
    elif isinstance(thing, CellType):
        yield from gc.get_referents(thing)
    elif isinstance(thing, type):
        if _package(thing) in own:
            yield from (*vars(thing).values(), *thing.__bases__, *vars(sys.modules[thing.__module__]).values())
    elif isinstance(thing, LoadedModel):
        yield thing.model
    elif type(thing) in SKIPPED:
        yield type(thing)
        yield from (value for name, value in vars(thing).items() if name not in SKIPPED[type(thing)])
    elif isinstance(thing, Spy):
        yield thing.policy
    else:
        yield from gc.get_referents(thing)


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


_FOREIGN = set(sys.stdlib_module_names) | {"builtins", "torch", "numpy", "transformers"}


# ---- by component, as they are billed ----


def measured(session: KVSession, policy: KVPolicy, before: Holdings) -> tuple[dict[str, int], int, int]:
    """Bytes of a session of one row by component, of storages in none of them, and by which loose ones grew.

    Nothing that was there `before` counts.
    """
    now = holdings(session, policy)
    found = {at: storage.nbytes() for at, storage in now.storages.items() if at not in before.storages}
    sizes: dict[str, int] = {}
    for name, tensors in _listed(session):
        addresses = {x.untyped_storage().data_ptr() for x in tensors}
        sizes[name] = sizes.get(name, 0) + sum(found.pop(at, 0) for at in addresses)
    return sizes, sum(found.values()), now.loose - before.loose


def billed(session: KVSession) -> dict[str, int]:
    """The same as the session's own accounts have it."""
    usage = session.usage(0)
    counted = dict(usage.counted)
    sizes = {name: counted.pop(name) for name in ("table", "params", "reference")}
    sizes["full"] = counted.pop("payload.full") + counted.pop("slack")
    sizes["codes"] = sum(counted.values())
    return sizes | {"host": usage.host, "workspace": usage.workspace, "sliding": usage.sliding}


COUNTED = ("full", "codes", "params", "table", "reference")


def _listed(session: KVSession) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Tensors of every component; what follows from the number of heads and tiers alone is `bookkeeping`."""
    for layer in session.layers.values():
        yield "full", (layer.full.k, layer.full.v)
        yield "table", layer.table.tensors()
        for side in layer.sides:
            for lane in side.lanes:
                yield "codes", lane.slot[:1]
                yield "params", lane.tensors()[1:]
            yield "reference", [x for tensors in side.reference for x in tensors]
            yield "bookkeeping", (side._lanes_by_tier,)
        yield "host", layer.host
        yield "workspace", [*layer._index.values(), *(layer.table._rect or ())]
        for slots in (layer.full, layer.working):
            if slots is not None:
                yield "bookkeeping", (slots.end, slots.first)
                yield "workspace", (slots.k, slots.v)
    yield "workspace", [x for buffered in session._replay.values() for _, x in buffered]
    yield "sliding", [x for rows in session._sliding.values() for pair in rows for x in pair]
