"""Packing of low-bit codes into bytes, without gaps. Shapes: D head dim."""

from __future__ import annotations

import torch
from torch import Tensor

PACK_UNIT = {2: 4, 3: 8, 4: 2, 8: 1}  # bits -> channels that share one packed word (of 1 byte; 3 bytes at 3 bits)


def packed_bytes(bits: int, head_dim: int) -> int:
    """Bytes of the packed codes of one slot. ValueError if the head dim is no multiple of the pack unit."""
    if head_dim % PACK_UNIT[bits]:
        raise ValueError(
            f"head dim {head_dim} is not a multiple of {PACK_UNIT[bits]}, the channels packed together at {bits} bits: "
            "use other bits or keep this tensor at 16 bit"
        )
    return head_dim * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [..., D], each below 2^bits, into uint8 [..., D * bits / 8] without gaps.

    With n = `PACK_UNIT[bits]`, word w of D/n words holds channel w + k * D/n at bits [bits * k, bits * (k + 1)), k < n,
    and byte p of word w lies at index w + p * D/n. So at 2 bits, byte w holds channels w, w + D/4, w + D/2, w + 3D/4 at
    bits 0, 2, 4, 6: each shift yields a contiguous quarter of the head, and RoPE partners i, i + D/2 share a byte.
    """
    num_bytes, n = packed_bytes(bits, codes.shape[-1]), PACK_UNIT[bits]
    if n == 1:
        return codes.contiguous()
    words = codes.shape[-1] // n
    lanes = _lanes(codes, words)
    fields = split_last(lanes, n)
    packed = lanes.new_zeros((*lanes.shape[:-1], num_bytes // words * fields.shape[-1]))
    planes = split_last(packed, num_bytes // words)
    for k in range(n):
        plane, offset = divmod(bits * k, 8)
        room = 8 - offset
        if room >= bits:
            planes[..., plane, :] |= fields[..., k, :] << offset
        else:  # the code straddles two bytes
            planes[..., plane, :] |= (fields[..., k, :] & _every_byte((1 << room) - 1, lanes.dtype)) << offset
            planes[..., plane + 1, :] |= (fields[..., k, :] >> room) & _every_byte((1 << bits - room) - 1, lanes.dtype)
    return packed.view(torch.uint8)


def unpack(packed: Tensor, bits: int, head_dim: int) -> Tensor:
    """Inverse of `pack`: uint8 [..., D * bits / 8] -> codes, uint8 [..., D]."""
    num_bytes, n = packed_bytes(bits, head_dim), PACK_UNIT[bits]
    if packed.shape[-1] != num_bytes:
        raise ValueError(f"{packed.shape[-1]} packed bytes, but {head_dim} channels of {bits} bits take {num_bytes}")
    if n == 1:
        return packed
    words = head_dim // n
    lanes = _lanes(packed, words)
    planes = split_last(lanes, num_bytes // words)
    codes = lanes.new_empty((*lanes.shape[:-1], n, planes.shape[-1]))
    for k in range(n):
        plane, offset = divmod(bits * k, 8)
        room = 8 - offset
        torch.bitwise_right_shift(planes[..., plane, :], offset, out=codes[..., k, :])
        if room < bits:
            codes[..., k, :] &= _every_byte((1 << room) - 1, lanes.dtype)
            codes[..., k, :] |= (planes[..., plane + 1, :] & _every_byte((1 << bits - room) - 1, lanes.dtype)) << room
    return codes.bitwise_and_(_every_byte((1 << bits) - 1, lanes.dtype)).flatten(-2).view(torch.uint8)


def _lanes(x: Tensor, words: int) -> Tensor:
    """View bytes [..., words * k] as the widest integers that divide a run of `words`: up to 8 bytes per operation."""
    x = x.contiguous()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if words % dtype.itemsize == 0 and x.storage_offset() % dtype.itemsize == 0:
            return x.view(dtype)
    return x


def _every_byte(byte: int, dtype: torch.dtype) -> int:
    return int.from_bytes(bytes([byte]) * dtype.itemsize, "little")


def split_last(x: Tensor, parts: int) -> Tensor:
    """View [..., parts * c] as [..., parts, c]; x must be contiguous."""
    return x.view(*x.shape[:-1], parts, x.shape[-1] // parts)
