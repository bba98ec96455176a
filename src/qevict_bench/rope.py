"""Rotary position embedding of any supported model: rotate keys, and undo it.

Shapes: S slots, D head dim, R rotated dims (R <= D; Phi-3 rotates a part). Half-split pairing (i, i + R/2), as in every
supported family. Tables come from the model's own `rotary_emb`, so frequency scaling (Llama 3.1, YaRN) is the model's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

_POSITION_DEPENDENT = ("dynamic", "longrope")


def _turn(x_SD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    rotated_dims = cos_SR.shape[-1]
    x, rest = x_SD.float().split([rotated_dims, x_SD.shape[-1] - rotated_dims], dim=-1)
    first, second = x.chunk(2, dim=-1)
    turned = torch.addcmul(x * cos_SR, torch.cat((-second, first), dim=-1), sin_SR)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class Rope:
    """Tables of one model.

    `rotary_emb` is called as `(x, position_ids)` or, per layer type, `(x, position_ids, type)`.
    """

    def __init__(self, rotary_emb: Any, layer_types: list[str], rope_types: list[str]) -> None:
        self._rotary_emb = rotary_emb
        self._layer_types = layer_types
        self._rope_types = rope_types
        self._typed = "layer_type" in inspect.signature(rotary_emb.forward).parameters
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}

    def _table(self, layer_idx: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        kind = self._layer_types[layer_idx] if self._typed else ""
        table = self._tables.get(kind)
        if table is None or len(table[0]) < length:
            if any(rope_type in _POSITION_DEPENDENT for rope_type in self._rope_types):
                raise ValueError(
                    f"rope type {self._rope_types} changes with the sequence length, so keys cannot be un-rotated; "
                    "use a method without a pre-RoPE tier (snapkv, streaming_llm method.position=absolute, full_kv)"
                )
            positions = torch.arange(max(1024, 1 << (length - 1).bit_length()), device=device)[None]
            probe = torch.empty(1, dtype=torch.float32, device=device)
            cos, sin = self._rotary_emb(probe, positions, kind) if self._typed else self._rotary_emb(probe, positions)
            table = self._tables[kind] = (cos[0].float(), sin[0].float())
        return table

    def rotate(self, x_SD: Tensor, pos_S: Tensor, layer_idx: int, length: int) -> Tensor:
        """Rotate keys (..., D) at positions (...) < `length`; returns fp32."""
        cos, sin = self._table(layer_idx, length, x_SD.device)
        return _turn(x_SD, cos[pos_S], sin[pos_S])

    def unrotate(self, x_SD: Tensor, pos_S: Tensor, layer_idx: int, length: int) -> Tensor:
        """Inverse of `rotate`, also of its attention scaling; returns fp32."""
        return self._turn_back(x_SD, pos_S, layer_idx, length, keep_scale=False)

    def shift(self, x_SD: Tensor, back_S: Tensor, layer_idx: int, length: int) -> Tensor:
        """Move rotated keys `back` >= 0 positions towards 0 (compact positions of StreamingLLM); returns fp32."""
        return self._turn_back(x_SD, back_S, layer_idx, length, keep_scale=True)

    def _turn_back(self, x_SD: Tensor, pos_S: Tensor, layer_idx: int, length: int, keep_scale: bool) -> Tensor:
        cos, sin = self._table(layer_idx, length, x_SD.device)
        cos, sin = cos[pos_S], sin[pos_S]
        square = cos[..., :1] ** 2 + sin[..., :1] ** 2  # attention_scaling squared; 1 for most models
        turned = _turn(x_SD, cos, -sin)
        turned[..., : cos.shape[-1]] /= square.sqrt() if keep_scale else square
        return turned
