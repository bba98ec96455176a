"""The one attention function given to transformers, and attention mass for the rows a policy probes.

The output comes from one call of scaled_dot_product_attention whether or not rows are probed; scores are a separate
fp32 computation. Every row, and every head where heads hold different counts, is attended to without pads.

Shapes: B rows, H KV heads, G query heads per KV head, Q new tokens, P probed rows, S stored slots, U units, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from qevict_bench.slots import Block, Slots
from qevict_bench.store import LayerStore

ATTENTION = "qevict_bench"
SCORE_BYTES = 64 << 20  # probed rows are scored in blocks of about this many bytes


@dataclass(frozen=True)
class Step:
    """One forward pass: `new[row]` tokens from absolute position `start[row]` in the rows `rows`; phase as in probe."""

    phase: str
    rows: tuple[int, ...]
    new: tuple[int, ...]
    start: tuple[int, ...]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    kv: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over a session's store; `kv` is the KVSession passed as a keyword to the model.

    query [B, H * G, Q, D], key and value [B, H, Q, D], post-RoPE; returns [B, Q, H * G, D].
    """
    if kv is None:
        raise ValueError(f"attn_implementation={ATTENTION!r} needs kv=<KVSession> in the model call")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("logit softcapping and attention sinks of the model are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kv.attend(module, query, key, value, scale, sliding_window).transpose(1, 2), None


def register() -> str:
    """Make the function known to transformers; returns its name for `attn_implementation`."""
    AttentionInterface.register(ATTENTION, packed_attention)
    return ATTENTION


def attend(q_BHQD: Tensor, slots: Slots, step: Step, scale: float) -> Tensor:
    """Output [B, H * G, Q, D] over everything in `slots`; the step's own tokens are its last ones."""
    group = q_BHQD.shape[1] // slots.num_heads
    blocks = list(_blocks(slots, step))
    if len(blocks) == 1 and len(step.rows) == len(step.new) and step.new[0] == q_BHQD.shape[2]:
        return _sdpa(q_BHQD, blocks[0].keys, blocks[0].values, scale)
    out = torch.zeros_like(q_BHQD)
    for block in blocks:
        heads, new = slice(block.heads.start * group, block.heads.stop * group), step.new[block.rows.start]
        out[block.rows, heads, :new] = _sdpa(q_BHQD[block.rows, heads, :new], block.keys, block.values, scale)
    return out


def _blocks(slots: Slots, step: Step) -> Iterator[Block]:
    if len({step.new[row] for row in step.rows}) == 1:
        yield from slots.blocks(list(step.rows))
    else:
        for row in step.rows:
            yield from slots.blocks([row])


def _sdpa(q_RHQD: Tensor, k_RHSD: Tensor, v_RHSD: Tensor, scale: float) -> Tensor:
    rows, heads, new, dim = q_RHQD.shape
    if new == 1:  # the query heads of a KV head become the query rows of one call: keys are not repeated
        q = q_RHQD.reshape(rows, k_RHSD.shape[1], heads // k_RHSD.shape[1], dim)
        return F.scaled_dot_product_attention(q, k_RHSD, v_RHSD, scale=scale).reshape(rows, heads, 1, dim)
    before = k_RHSD.shape[2] - new
    mask = None
    if before:
        mask = torch.ones((new, before + new), dtype=torch.bool, device=q_RHQD.device).tril(before)
    return F.scaled_dot_product_attention(
        q_RHQD, k_RHSD, v_RHSD, attn_mask=mask, is_causal=not before, scale=scale, enable_gqa=heads != k_RHSD.shape[1]
    )


def attend_sliding(q_HQD: Tensor, k_HSD: Tensor, v_HSD: Tensor, window: int, scale: float) -> Tensor:
    """One row of a sliding-window layer: each query sees the `window` newest positions up to its own."""
    new, held = q_HQD.shape[1], k_HSD.shape[1]
    if new == 1 or (new == held and held <= window):
        return _sdpa(q_HQD[None], k_HSD[None, :, -window:], v_HSD[None, :, -window:], scale)[0]
    ones = torch.ones((new, held), dtype=torch.bool, device=q_HQD.device)
    mask = ones.tril(held - new) & ones.triu(held - new - window + 1)
    gqa = q_HQD.shape[0] != k_HSD.shape[0]
    return F.scaled_dot_product_attention(
        q_HQD[None], k_HSD[None], v_HSD[None], attn_mask=mask, scale=scale, enable_gqa=gqa
    )[0]


def observe(layer: LayerStore, q_BHQD: Tensor, slots: Slots, step: Step, probed_BQ: Tensor, scale: float) -> None:
    """Hand the policy the attention mass per unit of every probed row (a softmax over everything stored)."""
    view = layer.view()
    shared = len({step.new[row] for row in step.rows}) == 1 and bool((probed_BQ == probed_BQ[:1]).all())
    whole = shared and layer.dense and len(step.rows) == layer.num_rows
    together = whole and len(list(slots.blocks(list(step.rows)))) == 1  # rows of unequal lengths are scored one by one
    for rows in [list(step.rows)] if together else [[row] for row in step.rows]:
        blocks = list(slots.blocks(rows))
        probed = torch.nonzero(probed_BQ[rows[0], : step.new[rows[0]]])[:, 0]
        if not len(probed):
            continue
        keys = [block.keys.float() for block in blocks]
        held = max(block.keys.shape[2] for block in blocks)
        at_once = max(1, SCORE_BYTES // (4 * len(rows) * q_BHQD.shape[1] * held))
        for part in probed.split(at_once):
            mass = _mass(layer, q_BHQD, blocks, keys, step, part, scale)
            rows_BP = torch.tensor([step.start[row] for row in rows], device=part.device)[:, None] + part
            layer.policy.observe(view.rows(rows[0], rows[-1] + 1), mass, rows_BP)


def _mass(
    layer: LayerStore,
    q_BHQD: Tensor,
    blocks: list[Block],
    keys: list[Tensor],
    step: Step,
    probed_P: Tensor,
    scale: float,
) -> Tensor:
    """[R, H, G, P, U] fp32."""
    group = q_BHQD.shape[1] // layer.num_heads
    parts = []
    for block, k_RHSD in zip(blocks, keys, strict=True):
        heads = slice(block.heads.start * group, block.heads.stop * group)
        held, new = k_RHSD.shape[2], step.new[block.rows.start]
        seen = held - new + int(probed_P[-1]) + 1  # no probed row of this part sees further
        q = q_BHQD[block.rows, heads, probed_P].float() * scale
        rows, _, num, dim = q.shape
        q = q.reshape(rows, k_RHSD.shape[1], group * num, dim)
        score = (q @ k_RHSD[:, :, :seen].transpose(-1, -2)).unflatten(2, (group, num))
        if num > 1 or new > 1:
            last_P = held - new + probed_P
            hidden = torch.arange(seen, device=q.device) > last_P[:, None]
            score.masked_fill_(hidden, -torch.inf)
        parts.append(_per_unit(layer, block, score.softmax(dim=-1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _per_unit(layer: LayerStore, block: Block, p_RHGPS: Tensor) -> Tensor:
    """Sum probabilities over the slots of each unit."""
    units, held = layer.table.rect().pos.shape[-1], p_RHGPS.shape[-1]
    unit, offset = layer.policy.unit, layer.policy.offset
    if layer.dense:
        body = p_RHGPS[..., offset:] if offset else p_RHGPS
        if unit > 1:
            body = F.pad(body, (0, -body.shape[-1] % unit)).unflatten(-1, (-1, unit)).sum(-1)
        if offset:
            body = torch.cat((p_RHGPS[..., :offset].sum(-1, keepdim=True), body), dim=-1)
        return F.pad(body, (0, units - body.shape[-1]))
    index = layer.unit_index(block.rows.start)[:, :held]
    if len(index) > 1:
        index = index[block.heads]
    mass = p_RHGPS.new_zeros((*p_RHGPS.shape[:-1], units))
    return mass.scatter_add_(-1, index[None, :, None, None].expand(p_RHGPS.shape), p_RHGPS)
