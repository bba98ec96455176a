"""How keys and values of one tier are stored: 16 bit, per channel and per token.

Quantization is asymmetric min-max: `scale = (max - min) / (2^bits - 1)`, `code = round_half_even((x - zero) / scale)`,
decoded `code * scale + zero`, with `zero` the minimum itself. Arithmetic is fp32; scale and zero are rounded to the
storage dtype before codes are computed, so encoder and decoder agree. The scheme is KIVI's (arXiv 2402.02750); QEvict
(arXiv 2608.05326) quantizes keys before RoPE per channel and values per token.

Limits of this scheme, by construction:
- A zero-range group has code 0 and decodes to its value exactly where its parameters come from it alone (all but
  `static` and `relative8`).
- A rounded-down scale leaves the top of a group up to `(2^bits - 1) * ulp(scale) / 2` above the highest decoded value:
  harmless at 2 bits, but a whole step at 8 bits with a bf16 scale, where the error otherwise stays within half a step.
- Encoding decoded values again gives the same codes up to 4 bits (fp16 subnormals aside), and at 8 bits except in bf16,
  where steps are finer than the values' own rounding. `relative8` rounds outward each time: codes and values drift.
- A non-finite value (or a range beyond fp32) makes all values of its own parameter group NaN; other groups keep theirs.
  With `static` and `relative8` a non-finite prompt makes its channel NaN for the row; a later non-finite value decodes
  to some finite one, in `relative8` together with its group.

Shapes: N or M parameter groups, T slots of a group, D head dim, H KV heads, S prompt tokens, C parameter groups of a
token, c channels of one of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from qevict_bench.packing import PACK_UNIT, pack, packed_bytes, split_last, unpack

KeyParams = Literal["window", "group", "segment", "static", "relative8"]
RELATIVE_STEPS = 254.5
"""Steps of `relative8` in the prompt's range: its maximum falls between two, so that rounding noise does not move r."""


class Encoded(NamedTuple):
    """Stored form of N groups of T slots."""

    slot: tuple[Tensor, ...]  # each [N, T, ...]: packed codes first, then parameters of single tokens
    group: tuple[Tensor, ...]  # each [N, ...]: parameters the T slots of a group share


class Codec(Protocol):
    """Storage form of keys or of values. Tensors may be of any float dtype and on any device.

    Groups are independent: encoding more of them never changes the codes of others.
    """

    @property
    def bits(self) -> int: ...

    @property
    def pre_rope(self) -> bool:
        """Whether keys are handed over before rotary embedding."""

    @property
    def group(self) -> int:
        """Units per parameter group, 0 for all units of a row and KV head; without meaning unless `shared`.

        With 0 all of them are encoded together at every event, so the method must declare `recompresses`.
        """

    @property
    def whole(self) -> bool:
        """Whether groups of `group` units are only ever stored complete, so that units need no pointer to theirs."""

    @property
    def joined(self) -> bool:
        """Whether units of all KV heads are stored side by side, as one of H * D channels; needs group=0."""

    @property
    def shared(self) -> bool:
        """Whether the slots of a group share parameters, i.e. whether `Encoded.group` is not empty."""

    def reference(self, x_HSD: Tensor) -> tuple[Tensor, ...]:
        """What later groups refer to, from the prompt of one row: each [H, ...], () if the codec needs none."""

    def encode(self, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        """Encode N groups; `ref` is the reference of each group's row and head. Parameters are stored in x's dtype."""

    def decode(
        self, slot: tuple[Tensor, ...], group: tuple[Tensor, ...], ref: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        """Decode slots [M, T, ...] with parameters and references gathered per M into [M, T, D] of `dtype`."""

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes one slot adds: codes and parameters of single tokens. `itemsize` is that of the storage dtype."""

    def group_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes one group adds."""

    def reference_bytes(self, head_dim: int, itemsize: int) -> int:
        """Bytes the reference takes per row and KV head."""


@dataclass(frozen=True)
class Tier:
    """One precision level: how its keys and its values are stored."""

    name: str
    key: Codec
    value: Codec


@dataclass(frozen=True)
class Exact:
    """The model's own values (16 bit, or 32 in an fp32 model). `encode` returns its input, not a copy."""

    bits = 16
    pre_rope = False
    group = 1
    whole = False
    joined = False
    shared = False

    def reference(self, x_HSD: Tensor) -> tuple[Tensor, ...]:
        return ()

    def encode(self, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        return Encoded((x_NTD,), ())

    def decode(
        self, slot: tuple[Tensor, ...], group: tuple[Tensor, ...], ref: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        return slot[0].to(dtype)

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        return head_dim * itemsize

    def group_bytes(self, head_dim: int, itemsize: int) -> int:
        return 0

    def reference_bytes(self, head_dim: int, itemsize: int) -> int:
        return 0


@dataclass(frozen=True)
class PerChannel:
    """Min-max per channel over the T slots of a group. `params` says where scale and zero come from:

    - `window`: per unit, in the storage dtype.
    - `group`: the same, shared by `group` units.
    - `segment`: the same, shared by all units of a row and KV head; group must be 0.
    - `static`: from the whole prompt, nothing per group. Values outside the prompt's range are clamped.
    - `relative8`: per group as two bytes r, m relative to the prompt: zero = low + step * m and scale =
      step * r / (2^bits - 1), with `low` the prompt's minimum and `step` its range / 254.5, rounded up. m is rounded
      down and r up: the decoded interval covers a group inside the prompt's range; beyond it m and r are clamped.

    Layouts: slot = (codes [N, T, packed],); group = (scale, zero) or (r, m), each [N, D]; reference = (scale, zero)
    for `static`, (step, low) for `relative8`, each [H, D].
    """

    bits: int = 2
    params: KeyParams = "window"
    group: int = 1
    pre_rope: bool = True
    whole: bool = False

    joined = False

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        if self.params not in get_args(KeyParams):
            raise ValueError(f"unknown params {self.params!r}: use one of {', '.join(get_args(KeyParams))}")
        if self.params == "segment":
            if self.group != 0:
                raise ValueError(f"group={self.group} with params='segment', which has one group: use group=0")
        elif self.group < 1 or (self.group > 1 and self.params in ("window", "static")):
            raise ValueError(
                f"group={self.group} with params={self.params!r}: units share parameters only with params 'group' or "
                "'relative8' (group >= 1); use group=1 or one of those"
            )

    @property
    def shared(self) -> bool:
        return self.params != "static"

    def reference(self, x_HSD: Tensor) -> tuple[Tensor, ...]:
        if self.params not in ("static", "relative8"):
            return ()
        low_HD, high_HD = x_HSD.amin(1).float(), x_HSD.amax(1).float()
        if self.params == "static":
            return _affine(low_HD, high_HD, self.bits, x_HSD.dtype)
        exact_HD = (high_HD - low_HD) / RELATIVE_STEPS
        step_HD = exact_HD.to(x_HSD.dtype)
        as_int = step_HD.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[step_HD.itemsize])
        step_HD = (as_int + (step_HD.float() < exact_HD)).view(x_HSD.dtype)  # next larger number where rounded down
        return step_HD, low_HD.to(x_HSD.dtype)

    def encode(self, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        work_NTD = x_NTD.to(torch.float32, copy=True)
        group: tuple[Tensor, ...] = ()
        if self.params == "static":
            scale_ND, zero_ND = ref
        elif self.params == "relative8":
            group = _relative_bytes(work_NTD.amin(1), work_NTD.amax(1), ref, self.bits)
            scale_ND, zero_ND = _relative(group, ref, self.bits)
        else:
            group = scale_ND, zero_ND = _affine(work_NTD.amin(1), work_NTD.amax(1), self.bits, x_NTD.dtype)
        codes_NTD = _quantize_(work_NTD, scale_ND.unsqueeze(1), zero_ND.unsqueeze(1), self.bits)
        return Encoded((pack(codes_NTD, self.bits),), group)

    def decode(
        self, slot: tuple[Tensor, ...], group: tuple[Tensor, ...], ref: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        if self.params == "relative8":
            scale_MD, zero_MD = _relative(group, ref, self.bits)
        else:
            scale_MD, zero_MD = ref if self.params == "static" else group
        codes_MTD = unpack(slot[0], self.bits, scale_MD.shape[-1])
        return _dequantize(codes_MTD, scale_MD.unsqueeze(1), zero_MD.unsqueeze(1), dtype)

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        return packed_bytes(self.bits, head_dim)

    def group_bytes(self, head_dim: int, itemsize: int) -> int:
        return {"static": 0, "relative8": 2 * head_dim}.get(self.params, 2 * head_dim * itemsize)

    def reference_bytes(self, head_dim: int, itemsize: int) -> int:
        return 2 * head_dim * itemsize if self.params in ("static", "relative8") else 0


@dataclass(frozen=True)
class PerToken:
    """Min-max per token over `channels` consecutive channels (0: the whole head dim), parameters in the storage dtype.

    With `balanced` (ZipCache's channel-separable quantization, arXiv 2405.14256) channels are first divided by
    c = sqrt(max over all units of |x|), so that large channels do not set the scale, and tokens of all KV heads are
    coded side by side under one scale and zero; D is then the channels of all heads.

    Layout: slot = (codes [N, T, packed], scale [N, T, C], zero [N, T, C]) with C = D / channels; group = () or (c,),
    [N, D].
    """

    bits: int = 2
    channels: int = 0
    pre_rope: bool = False
    balanced: bool = False

    whole = False

    def __post_init__(self) -> None:
        _check_bits(self.bits)
        if self.channels < 0:
            raise ValueError(f"channels={self.channels}: use 0 for the whole head dim or a divisor of it")

    @property
    def group(self) -> int:
        return 0 if self.balanced else 1

    @property
    def joined(self) -> bool:
        return self.balanced

    @property
    def shared(self) -> bool:
        return self.balanced

    def reference(self, x_HSD: Tensor) -> tuple[Tensor, ...]:
        return ()

    def encode(self, x_NTD: Tensor, ref: tuple[Tensor, ...]) -> Encoded:
        work_NTD = x_NTD.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        group: tuple[Tensor, ...] = ()
        if self.balanced:
            group = (work_NTD.abs().amax(1).sqrt_().to(x_NTD.dtype),)
            work_NTD.div_(_divisor(group[0]).unsqueeze(1))
        work_NTCd = split_last(work_NTD, self._groups(x_NTD.shape[-1]))
        scale_NTC, zero_NTC = _affine(work_NTCd.amin(-1), work_NTCd.amax(-1), self.bits, x_NTD.dtype)
        codes_NTCd = _quantize_(work_NTCd, scale_NTC.unsqueeze(-1), zero_NTC.unsqueeze(-1), self.bits)
        return Encoded((pack(codes_NTCd.flatten(-2), self.bits), scale_NTC, zero_NTC), group)

    def decode(
        self, slot: tuple[Tensor, ...], group: tuple[Tensor, ...], ref: tuple[Tensor, ...], dtype: torch.dtype
    ) -> Tensor:
        packed, scale_MTC, zero_MTC = slot
        head_dim = packed.shape[-1] * 8 // self.bits
        codes_MTCd = split_last(unpack(packed, self.bits, head_dim), scale_MTC.shape[-1])
        scale, zero = scale_MTC.unsqueeze(-1), zero_MTC.unsqueeze(-1)
        if not self.balanced:
            return _dequantize(codes_MTCd, scale, zero, dtype).flatten(-2)
        out_MTD = _dequantize(codes_MTCd, scale, zero, torch.float32).flatten(-2)
        return out_MTD.mul_(_divisor(group[0]).unsqueeze(1)).to(dtype)

    def slot_bytes(self, head_dim: int, itemsize: int) -> int:
        return packed_bytes(self.bits, head_dim) + 2 * itemsize * self._groups(head_dim)

    def group_bytes(self, head_dim: int, itemsize: int) -> int:
        return head_dim * itemsize if self.balanced else 0

    def reference_bytes(self, head_dim: int, itemsize: int) -> int:
        return 0

    def _groups(self, head_dim: int) -> int:
        channels = self.channels or head_dim
        if head_dim % channels:
            raise ValueError(f"channels={channels} does not divide the head dim {head_dim}: use a divisor of it, or 0")
        return head_dim // channels


def _affine(low: Tensor, high: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero of fp32 ranges, rounded to the storage dtype."""
    return ((high - low) / ((1 << bits) - 1)).to(dtype), low.to(dtype)


def _divisor(c_ND: Tensor) -> Tensor:
    """What balanced channels are divided by, fp32; channels that are zero everywhere stay as they are."""
    return torch.where(c_ND == 0, 1.0, c_ND.float())


def _relative_bytes(low: Tensor, high: Tensor, ref: tuple[Tensor, ...], bits: int) -> tuple[Tensor, Tensor]:
    """Bytes (r, m) of fp32 group ranges [N, D], rounded outward as far as bytes reach."""
    step, origin = ref[0].float(), ref[1].float()
    divisor = torch.where(step == 0, torch.inf, step)
    m = ((low - origin) / divisor).round_().clamp_(0, 255)
    zero = origin + step * m
    m = (m - (zero > low).float()).clamp_(min=0)  # outward: one less where rounding went inward
    zero = origin + step * m
    r = ((high - zero) / divisor).round_().clamp_(0, 255)
    levels = (1 << bits) - 1
    r = (r + (zero + levels * (step * r / levels) < high).float()).clamp_(max=255)
    return _to_byte(r), _to_byte(m)


def _relative(group: tuple[Tensor, ...], ref: tuple[Tensor, ...], bits: int) -> tuple[Tensor, Tensor]:
    """Scale and zero in fp32 from bytes (r, m) and reference (step, low), all [M, D]."""
    step = ref[0].float()
    return step * group[0].float() / ((1 << bits) - 1), ref[1].float() + step * group[1].float()


def _quantize_(work: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes (uint8) of fp32 `work`, which is overwritten; scale and zero broadcast to it."""
    levels = (1 << bits) - 1
    scale = scale.float()
    work.sub_(zero.float()).div_(torch.where(scale == 0, torch.inf, scale)).round_().clamp_(0, levels)
    return _to_byte(work).bitwise_and_(levels)  # NaN becomes any byte: the mask keeps it inside its own field


def _to_byte(x: Tensor) -> Tensor:
    """uint8 of whole numbers 0 .. 255, by way of int16: the direct conversion is slow on CPUs."""
    return x.to(torch.int16).to(torch.uint8)


def _dequantize(codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
    """`codes * scale + zero` in fp32, then `dtype`; fp16 saturates, as a rounded-up scale may pass its maximum."""
    out = codes.float()
    if scale.dtype.itemsize == 2 and scale.shape[-1] > 1:
        torch.addcmul(zero.float(), out, scale.float(), out=out)  # may fuse: no matter, the product is exact in fp32
    else:  # addcmul is slow on CPUs if operands repeat along the last axis
        out.mul_(scale.float()).add_(zero.float())
    if dtype == torch.float16:
        out.clamp_(-65504, 65504)
    return out.to(dtype)


def _check_bits(bits: int) -> None:
    if bits not in PACK_UNIT:
        raise ValueError(f"bits={bits}: use one of {', '.join(map(str, PACK_UNIT))}, or the codec Exact for 16 bit")
