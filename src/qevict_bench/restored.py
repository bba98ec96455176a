"""What a low-bit tier must give back for what was put into it: bounds that share no code with the codecs or the rope.

A rounded value lies within half a step of its source, and the step follows from the source alone: from the range of its
group, the prompt, or the codebook. So every value is bounded by itself, whichever codes were chosen, and a wrong unit,
position, scale or zero point shows wherever it moves a value by more than rounding.

Shapes: H KV heads, T coded tokens of a head in order of position (whole units), P prompt tokens, D head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qevict_bench.codecs import Codec, Exact, PerChannel, PerToken
from qevict_bench.models import LoadedModel
from qevict_bench.nuq import NuqKeys, NuqValues, Sparse

SLACK = {"float32": 2e-4, "float16": 0.01, "bfloat16": 0.1}
"""Rounding of values, scales and rotations that is accepted beside half a step, over the largest source value."""


@dataclass
class Restored:
    """The worst of a run so far. `coded` is the error of freshly coded values over what `bounds` and SLACK accept: at
    most 1 if all is well. `stayed` is how far units whose codes stayed have moved since, `promoted` the same of units
    that came back to full precision (from the exact copy, if that is what comes back), both over the largest value.
    """

    coded: float = 0.0
    stayed: float = 0.0
    promoted: float = 0.0


def worst(so_far: float, found: Tensor) -> float:
    """The larger of `so_far` and all of `found`; NaN is infinitely bad."""
    return max(so_far, float(found.nan_to_num(torch.inf, torch.inf).max())) if found.numel() else so_far


def unrotated(loaded: LoadedModel, layer_idx: int, x_SD: Tensor, at_S: Tensor) -> Tensor:
    """Keys at positions [S] before rotary embedding, fp32; pairs are (i, i + half of the rotated dims)."""
    rotary: Any = loaded.model.model.rotary_emb
    kind = [loaded.model.config.layer_types[layer_idx]] if "layer_type" in _parameters(rotary.forward) else []
    cos_SR, sin_SR = (table[0].float() for table in rotary(x_SD.float(), at_S[None], *kind))
    half = cos_SR.shape[-1] // 2
    cos, sin = cos_SR[:, :half], sin_SR[:, :half]
    first, second, rest = x_SD.float().split([half, half, x_SD.shape[-1] - 2 * half], dim=-1)
    square = cos**2 + sin**2  # of the attention scaling, which is part of the tables
    return torch.cat(((first * cos + second * sin) / square, (second * cos - first * sin) / square, rest), dim=-1)


def _parameters(function: Callable[..., Any]) -> Sequence[str]:
    return list(inspect.signature(function).parameters)


def bounds(codec: Codec, heads: Sequence[Tensor], prompt_HPD: Tensor, unit: int) -> list[Tensor]:
    """Largest error [T, D] per head of sources that one event coded together, without rounding of the parameters.

    Sources and the prompt are fp32, keys un-rotated where the codec wants them so. ValueError for an unknown codec.
    """
    if isinstance(codec, Exact):
        return [torch.zeros_like(x) for x in heads]
    if isinstance(codec, PerChannel):
        return [_per_channel(codec, x, prompt, unit) for x, prompt in zip(heads, prompt_HPD, strict=True)]
    if isinstance(codec, PerToken):
        if codec.balanced:
            return _balanced(codec, heads)
        return [_half_step(x.unflatten(-1, (-1, codec.channels or x.shape[-1])), -1, codec.bits) for x in heads]
    if isinstance(codec, NuqKeys):
        return [_nuq_keys(codec, x, unit, *pair) for x, *pair in zip(heads, *codec.bounds, strict=True)]
    if isinstance(codec, NuqValues):
        return [_nuq_values(codec, x, unit) for x in heads]
    raise ValueError(f"no bound is known for what {type(codec).__name__} gives back: add one to restored.bounds")


def _half_step(x: Tensor, dim: int, bits: int) -> Tensor:
    """Half a step of a group along `dim`, for each of its members; groups of channels are flattened again."""
    half = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / (2 * ((1 << bits) - 1))
    return half.expand_as(x).flatten(1) if dim == -1 else half.expand_as(x)


def _per_channel(codec: PerChannel, x_TD: Tensor, prompt_PD: Tensor, unit: int) -> Tensor:
    if not len(x_TD):
        return x_TD
    low_D, high_D = prompt_PD.amin(0), prompt_PD.amax(0)
    outside_TD = (low_D - x_TD).clamp(min=0) + (x_TD - high_D).clamp(min=0)  # clamped to the edge
    if codec.params == "static":
        return torch.maximum((high_D - low_D) / (2 * ((1 << codec.bits) - 1)), outside_TD)
    size = codec.group * unit or max(1, len(x_TD))
    half_TD = torch.cat([_half_step(part, 0, codec.bits) for part in x_TD.split(size)])
    if codec.params != "relative8":
        return half_TD
    outward_D = (high_D - low_D) / 255 / ((1 << codec.bits) - 1)  # a byte more at either end
    return half_TD + outward_D + outside_TD


def _balanced(codec: PerToken, heads: Sequence[Tensor]) -> list[Tensor]:
    """The j-th tokens of all heads share a scale, after each channel was divided by the root of its largest value."""
    wide = torch.cat(list(heads), dim=-1)
    root = wide.abs().amax(0).sqrt()
    root = torch.where(root == 0, 1.0, root)
    half = _half_step(wide / root, -1, codec.bits) * root
    return list(half.split([x.shape[-1] for x in heads], dim=-1))


def _nuq_keys(codec: NuqKeys, x_TD: Tensor, unit: int, low_D: Tensor, high_D: Tensor) -> Tensor:
    low_D, high_D = low_D.to(x_TD.device), high_D.to(x_TD.device)
    middle_D, reach_D = (high_D + low_D) / 2, (high_D - low_D) / 2
    distance_TD = (x_TD - middle_D).abs() / torch.where(reach_D == 0, torch.inf, reach_D)
    _, sure_TD = _outliers(codec.sparse, distance_TD, unit)
    return _to_centroid(codec.centroids, x_TD, middle_D, reach_D).masked_fill(sure_TD, 0.0)


def _nuq_values(codec: NuqValues, x_TD: Tensor, unit: int) -> Tensor:
    away_TD = (x_TD - x_TD.mean(-1, keepdim=True)).abs()
    usual_T1 = away_TD.mean(-1, keepdim=True)
    exact_TD, sure_TD = _outliers(codec.sparse, away_TD / torch.where(usual_T1 == 0, torch.inf, usual_T1), unit)
    low_T1 = x_TD.masked_fill(exact_TD, torch.inf).amin(-1, keepdim=True)
    high_T1 = x_TD.masked_fill(exact_TD, -torch.inf).amax(-1, keepdim=True)
    none_T1 = low_T1 > high_T1
    low_T1, high_T1 = low_T1.masked_fill(none_T1, 0.0), high_T1.masked_fill(none_T1, 0.0)
    error_TD = _to_centroid(codec.centroids, x_TD, (high_T1 + low_T1) / 2, (high_T1 - low_T1) / 2)
    return error_TD.masked_fill(sure_TD, 0.0)


def _to_centroid(centroids: Sequence[float], x_TD: Tensor, middle: Tensor, reach: Tensor) -> Tensor:
    table = torch.tensor(centroids, device=x_TD.device)
    return (x_TD[..., None] - (table * reach[..., None] + middle[..., None])).abs().amin(-1)


def _outliers(sparse: Sparse, distance_TD: Tensor, unit: int) -> tuple[Tensor, Tensor]:
    """The furthest of every unit, and those of them that no rounding of the distance puts among the others."""
    flat = distance_TD.unflatten(0, (-1, unit)).flatten(1)
    count = int(sparse.outliers * flat.shape[1] + 0.5)
    if not count:
        none = torch.zeros_like(distance_TD, dtype=torch.bool)
        return none, none
    order = flat.sort(dim=1, descending=True)
    exact = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, order.indices[:, :count], True)
    sure = flat > order.values[:, count : count + 1] * 1.001
    return exact.view_as(distance_TD), (exact & sure).view_as(distance_TD)
