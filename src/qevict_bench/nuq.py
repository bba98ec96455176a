"""Non-uniform codes with exact outliers, as in KVQuant (Hooper et al., arXiv 2401.18079), and the calibrated tables.

A value is normalized to [-1, 1] by an offset and a range, x' = (x - offset) / range, coded as the nearest of 2^bits
centroids (ties to the lower), and decoded `centroid * range + offset`. Keys are taken before RoPE; their offset and
range are static per channel, so a key's code depends on no other token. Values have them per token and KV head.
The `outliers` share of a unit's values that lie furthest out is kept exactly beside the codes: as many in every unit,
chosen by rank (ties by position), value and int16 index, so storage is rectangular. One codebook serves the keys of a
layer, another its values. Scale parameters are rounded to the storage dtype before codes are computed.

Shapes: N or M units, T tokens of a unit, D head dim, H KV heads, K outliers of a unit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qevict_bench.cache import cache_dir
from qevict_bench.codecs import Encoded
from qevict_bench.packing import pack, packed_bytes, unpack

BITS = (2, 3, 4)
FOLDER = "kvquant"
TABLES = ("key.low", "key.high", *(f"{side}.nuq{bits}" for side in ("key", "value") for bits in BITS))
INDEX_BYTES = 2  # int16
INDEXED = 1 << 15  # numbers that an index tells apart


@dataclass(frozen=True)
class Codebooks:
    """Calibrated tables of one model: fp32 on the CPU, named `<layer>.key.low` and `.key.high` [H, D], and
    `<layer>.key.nuq<bits>`, `<layer>.value.nuq<bits>` [2^bits], ascending. Two are equal if their digests are. A file
    of them says in its metadata of which model they are (`fingerprint`) and what they were when written (`digest`).
    """

    digest: str = ""
    tables: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(tables: Mapping[str, Tensor]) -> Codebooks:
        """Codebooks with the digest of these tables."""
        content = hashlib.sha256()
        for name in sorted(tables):
            content.update(name.encode())
            content.update(tables[name].contiguous().numpy().tobytes())
        return Codebooks(content.hexdigest()[:16], dict(tables))

    @staticmethod
    def path(fingerprint: str) -> Path:
        """Where the calibration of the model with this fingerprint lies."""
        return cache_dir() / FOLDER / f"{fingerprint}.safetensors"

    @staticmethod
    def load(model: str, fingerprint: str) -> Codebooks:
        """The calibration of a model. A missing, damaged or foreign one is a ValueError that names the command."""
        path = Codebooks.path(fingerprint)
        remedy = f"make it with: python scripts/calibrate_kvquant.py model={model}"
        if not path.is_file():
            raise ValueError(f"model {model} has no KVQuant calibration ({path} is missing); {remedy}")
        try:
            with safe_open(path, "pt") as file:
                notes, tables = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if notes.get("fingerprint") != fingerprint:
                raise ValueError("its metadata names another model, or none")
            _check(tables)
            made = Codebooks.of(tables)
            if notes.get("digest") != made.digest:
                raise ValueError("its tables were changed after they were written")
        except Exception as error:  # safetensors raises its own type, which it does not export everywhere
            raise ValueError(f"the KVQuant calibration {path} cannot be read ({error}); {remedy}") from error
        return made

    def save(self, fingerprint: str, notes: Mapping[str, str]) -> Path:
        """Write the tables, atomically; `notes` say how they were made.

        Raises ValueError, and leaves what is there, if the tables are unusable or the file cannot be written.
        """
        try:
            _check(self.tables)
        except ValueError as error:
            raise ValueError(f"the calibration failed: {error}; try model.dtype=float32, or another text") from error
        path = Codebooks.path(fingerprint)
        scratch = path.with_suffix(f".{os.getpid()}")
        notes = {**notes, "fingerprint": fingerprint, "digest": self.digest}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: table.contiguous() for name, table in self.tables.items()}, scratch, metadata=notes)
            scratch.replace(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be written ({error}); set QEVICT_BENCH_CACHE to another folder") from error
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink()
        return path

    @property
    def head_dim(self) -> int:
        """Channels of a key, D."""
        return next(table.shape[-1] for name, table in self.tables.items() if name.endswith(".key.low"))

    def centroids(self, layer_idx: int, side: str, bits: int) -> tuple[float, ...]:
        """Codebook of `key` or `value`."""
        return tuple(self._table(f"{layer_idx}.{side}.nuq{bits}").tolist())

    def bounds(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Calibrated low and high bound of the keys, [H, D] each."""
        return self._table(f"{layer_idx}.key.low"), self._table(f"{layer_idx}.key.high")

    def _table(self, name: str) -> Tensor:
        if not self.digest:
            raise ValueError("KVQuant needs its calibration: call policy.prepare(model, fingerprint) before a session")
        if name not in self.tables:
            raise ValueError(f"the KVQuant calibration lacks {name}; make it with: python scripts/calibrate_kvquant.py")
        return self.tables[name]


def _check(tables: Mapping[str, Tensor]) -> None:
    """Raise ValueError, saying what is wrong, unless the tables are those of whole layers and usable."""
    layers = {name.partition(".")[0] for name in tables}
    names = {f"{layer}.{table}" for layer in layers if layer.isdecimal() for table in TABLES}
    if strange := sorted(tables.keys() - names):
        raise ValueError(f"it has {strange[0]}, which is no table of a layer")
    if absent := sorted(names - tables.keys()):
        raise ValueError(f"it lacks {absent[0]}")
    if not tables:
        raise ValueError("it has no tables")
    shape = tables[f"{min(layers)}.key.low"].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"its bounds have the shape {list(shape)}, not heads x channels")
    for name, table in tables.items():
        bits = name.partition(".nuq")[2]
        expected = torch.Size([1 << int(bits)]) if bits else shape
        if table.shape != expected or table.dtype != torch.float32:
            raise ValueError(f"{name} is {table.dtype} {list(table.shape)}, not torch.float32 {list(expected)}")
        if not bool(table.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite")
        if bits and bool((table.diff() < 0).any()):
            raise ValueError(f"{name} does not ascend")
    for layer in sorted(layers):
        if bool((tables[f"{layer}.key.low"] > tables[f"{layer}.key.high"]).any()):
            raise ValueError(f"{layer}.key.low exceeds {layer}.key.high")


def longest_unit(head_dim: int) -> int:
    """Tokens of the longest unit whose outliers an int16 index reaches."""
    return INDEXED // head_dim


@dataclass(frozen=True)
class Sparse:
    """How many outliers a unit of `tokens` tokens keeps exactly, and how."""

    outliers: float = 0.01
    tokens: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.outliers < 0.5 or self.tokens < 1:
            raise ValueError(f"outliers={self.outliers} must lie in [0, 0.5), and tokens={self.tokens} be at least 1")

    def count(self, head_dim: int) -> int:
        """Outliers per unit: the share, halves rounded up."""
        if self.tokens > longest_unit(head_dim):
            raise ValueError(
                f"{self.tokens} tokens of {head_dim} channels are more than an int16 index reaches; take at most "
                f"{longest_unit(head_dim)}"
            )
        return int(Fraction(str(self.outliers)) * self.tokens * head_dim + Fraction(1, 2))

    def bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes per unit."""
        return self.count(head_dim) * (itemsize + INDEX_BYTES)

    def chosen(self, distance_NTD: Tensor) -> Tensor:
        """Where the largest distances of each unit are, exactly `count` of them: bool [N, T, D]."""
        flat_NS, count = distance_NTD.flatten(1).nan_to_num(torch.inf, torch.inf), self.count(distance_NTD.shape[-1])
        if count == 0:
            return torch.zeros_like(distance_NTD, dtype=torch.bool)
        last_N1 = flat_NS.topk(count, dim=1).values[:, -1:]
        above_NS, tie_NS = flat_NS > last_N1, flat_NS == last_N1
        wanted_N1 = count - above_NS.sum(1, keepdim=True)
        rows = torch.nonzero((tie_NS.sum(1, keepdim=True) > wanted_N1)[:, 0])[:, 0]  # with more ties than places
        tie_NS[rows] &= tie_NS[rows].cumsum(1, dtype=torch.int32) <= wanted_N1[rows]
        return (above_NS | tie_NS).view_as(distance_NTD)

    def take(self, x_NTD: Tensor, chosen_NTD: Tensor) -> tuple[Tensor, Tensor]:
        """Values and indices within their unit, [N, K] each, in order of position."""
        mask_NS = chosen_NTD.flatten(1)
        at_NK = torch.nonzero(mask_NS)[:, 1].view(len(mask_NS), -1)
        return x_NTD.flatten(1).gather(1, at_NK), at_NK.to(torch.int16)

    def put(self, x_MTD: Tensor, group: tuple[Tensor, ...]) -> Tensor:
        """Write a unit's exact values over its decoded ones, in place."""
        if group:
            x_MTD.view(len(x_MTD), -1).scatter_(1, group[1].long(), group[0].to(x_MTD.dtype))
        return x_MTD


def nearest(x: Tensor, centroids: tuple[float, ...]) -> Tensor:
    """Index, uint8, of the centroid nearest to each value; ties to the lower one, NaN to the first."""
    table = torch.tensor(centroids, dtype=torch.float64)
    middle = ((table[1:] + table[:-1]) / 2).float().tolist()
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for border in middle:  # a handful: faster than a search
        codes += x > border
    return codes


def _divisor(scale: Tensor) -> Tensor:
    """What values are divided by: infinity for a zero range, whose values all decode to the offset."""
    return torch.where(scale == 0, torch.inf, scale)


def static_params(low_HD: Tensor, high_HD: Tensor) -> tuple[Tensor, Tensor]:
    """Offset and range of keys, fp32, from calibrated bounds."""
    return (high_HD + low_HD) / 2, (high_HD - low_HD) / 2


def token_params(x_NTD: Tensor, sparse: Sparse, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Where the outliers of fp32 values are [N, T, D], and offset and range of the rest [N, T, 1] in `dtype`.

    Outliers are furthest from their token's mean, in units of the token's mean distance from it; the others' minimum
    and maximum give offset and range, 0 if there are no others.
    """
    distance_NTD = (x_NTD - x_NTD.mean(dim=-1, keepdim=True)).abs()
    chosen_NTD = sparse.chosen(distance_NTD / _divisor(distance_NTD.mean(-1, keepdim=True)))
    low_NT1 = x_NTD.masked_fill(chosen_NTD, torch.inf).amin(-1, keepdim=True)
    high_NT1 = x_NTD.masked_fill(chosen_NTD, -torch.inf).amax(-1, keepdim=True)
    empty_NT1 = low_NT1 > high_NT1
    offset_NT1, range_NT1 = static_params(low_NT1.masked_fill(empty_NT1, 0.0), high_NT1.masked_fill(empty_NT1, 0.0))
    return chosen_NTD, offset_NT1.to(dtype), range_NT1.to(dtype)


def normalized(x: Tensor, offset: Tensor, scale: Tensor) -> Tensor:
    """fp32 values as multiples of their range."""
    return (x - offset.float()) / _divisor(scale.float())


@dataclass(frozen=True)
class _Nuq:
    """What both sides share: bits, outliers, and one codebook of 2^bits centroids."""

    bits: int
    sparse: Sparse
    centroids: tuple[float, ...] = ()

    group = 1
    whole = False
    joined = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits}: non-uniform codebooks exist for {', '.join(map(str, BITS))} bits")

    @property
    def shared(self) -> bool:
        return self.sparse.outliers > 0

    def group_bytes(self, head_dim: int, itemsize: int) -> int:
        return self.sparse.bytes(head_dim, itemsize)

    def _packed(self, scaled_NTD: Tensor) -> Tensor:
        return pack(nearest(scaled_NTD, self.centroids), self.bits)

    def _outliers(self, x_NTD: Tensor, chosen_NTD: Tensor) -> tuple[Tensor, ...]:
        return self.sparse.take(x_NTD, chosen_NTD) if self.shared else ()

    def _decoded(self, packed: Tensor, offset: Tensor, scale: Tensor, group: tuple[Tensor, ...]) -> Tensor:
        """fp32 [M, T, D]."""
        codes_MTD = unpack(packed, self.bits, packed.shape[-1] * 8 // self.bits)
        table = torch.tensor(self.centroids, dtype=torch.float32, device=packed.device)
        return self.sparse.put(table[codes_MTD.int()].mul_(scale.float()).add_(offset.float()), group)


@dataclass(frozen=True)
class NuqKeys(_Nuq):
    """Keys before RoPE. Reference = (offset, range) per channel, [H, D], from the calibration; slot = (codes,);
    group = (outlier values, outlier indices), [N, K], of a unit.
    """

    bounds: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)  # calibrated low and high, each [H, D]

    pre_rope = True

    def reference(self, x_HSD: Tensor) -> tuple[Tensor, ...]:
        low_HD, high_HD = (bound.to(x_HSD.device) for bound in self.bounds)
        if low_HD.shape != (x_HSD.shape[0], x_HSD.shape[-1]):
            raise ValueError(
                f"the KVQuant calibration has bounds for {list(low_HD.shape)} heads x channels, the model has "
                f"{[x_HSD.shape[0], x_HSD.shape[-1]]}; make it with: python scripts/calibrate_kvquant.py"
            )
        return tuple(param.to(x_HSD.dtype) for param in static_params(low_HD, high_HD))

    def encode(self, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        scaled_NTD = normalized(x_NTD.float(), ref[0].unsqueeze(1), ref[1].unsqueeze(1))
        return Encoded((self._packed(scaled_NTD),), self._outliers(x_NTD, self.sparse.chosen(scaled_NTD.abs())))

    def decode(
        self, slot: tuple[Tensor, ...], group: tuple[Tensor, ...], ref: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        return self._decoded(slot[0], ref[0].unsqueeze(1), ref[1].unsqueeze(1), group).to(dtype)

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        return packed_bytes(self.bits, head_dim)

    def reference_bytes(self, head_dim: int, itemsize: int) -> int:
        return 2 * head_dim * itemsize


@dataclass(frozen=True)
class NuqValues(_Nuq):
    """Values. Slot = (codes, offset, range), the last two [N, T, 1]; group as in NuqKeys."""

    pre_rope = False

    def reference(self, x_HSD: Tensor) -> tuple[Tensor, ...]:
        return ()

    def encode(self, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        chosen_NTD, offset_NT1, range_NT1 = token_params(x_NTD.float(), self.sparse, x_NTD.dtype)
        codes = self._packed(normalized(x_NTD.float(), offset_NT1, range_NT1))
        return Encoded((codes, offset_NT1, range_NT1), self._outliers(x_NTD, chosen_NTD))

    def decode(
        self, slot: tuple[Tensor, ...], group: tuple[Tensor, ...], ref: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        return self._decoded(slot[0], slot[1], slot[2], group).to(dtype)

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        return packed_bytes(self.bits, head_dim) + 2 * itemsize

    def reference_bytes(self, head_dim: int, itemsize: int) -> int:
        return 0
