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

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qevict_bench.cache import cache_dir
from qevict_bench.codecs import Encoded
from qevict_bench.packing import pack, packed_bytes, unpack

BITS = (2, 3, 4)
FOLDER = "kvquant"
INDEX_BYTES = 2  # int16


@dataclass(frozen=True)
class Codebooks:
    """Calibrated tables of one model: fp32 on the CPU, named `<layer>.key.low` and `.key.high` [H, D], and
    `<layer>.key.nuq<bits>`, `<layer>.value.nuq<bits>` [2^bits], ascending. Two are equal if their digests are.
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
        """The calibration of a model; a missing or damaged one is a ValueError that names the command."""
        path = Codebooks.path(fingerprint)
        remedy = f"make it with: python scripts/calibrate_kvquant.py model={model}"
        if not path.is_file():
            raise ValueError(f"model {model} has no KVQuant calibration ({path} is missing); {remedy}")
        try:
            return Codebooks.of(load_file(path))
        except Exception as error:  # safetensors raises its own type, which it does not export everywhere
            raise ValueError(f"the KVQuant calibration {path} cannot be read ({error}); {remedy}") from error

    def save(self, fingerprint: str, notes: Mapping[str, str]) -> Path:
        """Write the tables, atomically; `notes` say how they were made."""
        path = Codebooks.path(fingerprint)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        save_file({name: table.contiguous() for name, table in self.tables.items()}, scratch, metadata=dict(notes))
        scratch.replace(path)
        return path

    def centroids(self, layer_idx: int, side: str, bits: int) -> tuple[float, ...]:
        """Codebook of `key` or `value`."""
        return tuple(self._table(f"{layer_idx}.{side}.nuq{bits}").tolist())

    def bounds(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Calibrated low and high bound of the keys, [H, D] each."""
        return self._table(f"{layer_idx}.key.low"), self._table(f"{layer_idx}.key.high")

    def _table(self, name: str) -> Tensor:
        if not self.digest:
            raise ValueError("KVQuant needs its calibration: call policy.prepare(model, fingerprint) before a session")
        return self.tables[name]


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
        size = self.tokens * head_dim
        if size > 1 << 15:
            raise ValueError(f"{self.tokens} tokens of {head_dim} channels are more than an int16 index reaches")
        return int(Fraction(str(self.outliers)) * size + Fraction(1, 2))

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
class NuqKeys:
    """Keys before RoPE. Reference = (offset, range) per channel, [H, D], from the calibration; slot = (codes,);
    group = (outlier values, outlier indices), [N, K], of a unit.
    """

    bits: int
    sparse: Sparse
    centroids: tuple[float, ...] = ()
    bounds: tuple[Tensor, ...] = field(default=(), compare=False, repr=False)  # calibrated low and high, each [H, D]

    pre_rope = True
    group = 1
    whole = False
    joined = False

    def __post_init__(self) -> None:
        _check_bits(self.bits)

    @property
    def shared(self) -> bool:
        return self.sparse.outliers > 0

    def reference(self, x_HSD: Tensor) -> tuple[Tensor, ...]:
        low_HD, high_HD = (bound.to(x_HSD.device) for bound in self.bounds)
        return tuple(param.to(x_HSD.dtype) for param in static_params(low_HD, high_HD))

    def encode(self, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        scaled_NTD = normalized(x_NTD.float(), ref[0].unsqueeze(1), ref[1].unsqueeze(1))
        codes = pack(nearest(scaled_NTD, self.centroids), self.bits)
        if not self.shared:
            return Encoded((codes,), ())
        return Encoded((codes,), self.sparse.take(x_NTD, self.sparse.chosen(scaled_NTD.abs())))

    def decode(
        self, slot: tuple[Tensor, ...], group: tuple[Tensor, ...], ref: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        out_MTD = _decoded(slot[0], self.bits, self.centroids, ref[0].unsqueeze(1), ref[1].unsqueeze(1))
        return self.sparse.put(out_MTD, group).to(dtype)

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        return packed_bytes(self.bits, head_dim)

    def group_bytes(self, head_dim: int, itemsize: int) -> int:
        return self.sparse.bytes(head_dim, itemsize)

    def reference_bytes(self, head_dim: int, itemsize: int) -> int:
        return 2 * head_dim * itemsize


@dataclass(frozen=True)
class NuqValues:
    """Values. Slot = (codes, offset, range), the last two [N, T, 1]; group as in NuqKeys."""

    bits: int
    sparse: Sparse
    centroids: tuple[float, ...] = ()

    pre_rope = False
    group = 1
    whole = False
    joined = False

    def __post_init__(self) -> None:
        _check_bits(self.bits)

    @property
    def shared(self) -> bool:
        return self.sparse.outliers > 0

    def reference(self, x_HSD: Tensor) -> tuple[Tensor, ...]:
        return ()

    def encode(self, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        exact_NTD = x_NTD.float()
        chosen_NTD, offset_NT1, range_NT1 = token_params(exact_NTD, self.sparse, x_NTD.dtype)
        codes = pack(nearest(normalized(exact_NTD, offset_NT1, range_NT1), self.centroids), self.bits)
        group = self.sparse.take(x_NTD, chosen_NTD) if self.shared else ()
        return Encoded((codes, offset_NT1, range_NT1), group)

    def decode(
        self, slot: tuple[Tensor, ...], group: tuple[Tensor, ...], ref: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        return self.sparse.put(_decoded(slot[0], self.bits, self.centroids, *slot[1:]), group).to(dtype)

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        return packed_bytes(self.bits, head_dim) + 2 * itemsize

    def group_bytes(self, head_dim: int, itemsize: int) -> int:
        return self.sparse.bytes(head_dim, itemsize)

    def reference_bytes(self, head_dim: int, itemsize: int) -> int:
        return 0


def _decoded(packed: Tensor, bits: int, centroids: tuple[float, ...], offset: Tensor, scale: Tensor) -> Tensor:
    """fp32 [M, T, D]."""
    codes_MTD = unpack(packed, bits, packed.shape[-1] * 8 // bits)
    table = torch.tensor(centroids, dtype=torch.float32, device=packed.device)
    return table[codes_MTD.int()].mul_(scale.float()).add_(offset.float())


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits={bits}: non-uniform codebooks exist for {', '.join(map(str, BITS))} bits")
