"""Methods and engines broken on purpose, one fault each, and the gate that must catch it.

A fault is what a real cache library got wrong, put into this engine by replacing one function; the twin is the same
method on the engine as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from methods.qevict import QEvict
from methods.snapkv import SnapKV
from qevict_bench import attention
from qevict_bench import session as session_module
from qevict_bench.budget import Geometry
from qevict_bench.models import LoadedModel
from qevict_bench.policy import EVICTED, FULL, Allowance, KVPolicy, LayerView, Placement
from qevict_bench.session import KVSession
from qevict_bench.store import LayerStore, Moves
from qevict_bench.units import Rect, UnitTable


@dataclass(frozen=True)
class Broken:
    """`twin` passes every gate; after `sabotage`, `policy` fails `gate`. They differ if the method itself is broken."""

    gate: str
    twin: KVPolicy
    sabotage: Callable[[pytest.MonkeyPatch], None]
    policy: KVPolicy


def position_from_stored_count(patch: pytest.MonkeyPatch) -> None:
    """New tokens are rotated at the number of slots stored, not of tokens seen."""
    real = KVSession._forward

    def forward(self: KVSession, phase: str, ids_BQ: Tensor, new: list[int], keep: Sequence[int] = (0,)) -> Tensor:
        behind = torch.tensor(self._compact_shift())[:, None]
        model = self.loaded.model

        def turn(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"position_ids": kwargs["position_ids"] - behind}

        handle = model.register_forward_pre_hook(turn, with_kwargs=True)
        try:
            return real(self, phase, ids_BQ, new, keep)
        finally:
            handle.remove()

    patch.setattr(KVSession, "_forward", forward)


def evicting_before_attention(patch: pytest.MonkeyPatch) -> None:
    """The middle of a prompt is evicted after every chunk, before the next one attends to it."""
    real = KVSession._forward

    def forward(self: KVSession, phase: str, ids_BQ: Tensor, new: list[int], keep: Sequence[int] = (0,)) -> Tensor:
        logits = real(self, phase, ids_BQ, new, keep)
        left = [max(0, whole - seen) for whole, seen in zip(self.prompt_len, self.seq_len, strict=True)]
        if phase == "prefill" and self.policy.columns and not self.budget.everything and any(left):
            for layer in self.layers.values():
                view = layer.view()
                middle = (view.pos_BHU > 4) & (view.pos_BHU < view.seq_len_B[:, None, None] - 32)
                layer.apply(Placement(torch.where(middle, EVICTED, view.tier_BHU)), left)
        return logits

    patch.setattr(KVSession, "_forward", forward)


def another_layers_mask(patch: pytest.MonkeyPatch) -> None:
    """A layer keeps the slots that the layer before it chose; its table says it kept its own."""
    real, chosen = LayerStore._rebuild_full, dict[int, Tensor]()

    def rebuild(self: LayerStore, rect: Rect, new: Tensor, *rest: Any) -> Any:
        chosen[self.layer_idx] = new
        before = chosen.get(self.layer_idx - 1, new)
        same_sizes = before.shape == new.shape and torch.equal((before == FULL).sum(-1), (new == FULL).sum(-1))
        return real(self, rect, before if same_sizes else new, *rest)

    patch.setattr(LayerStore, "_rebuild_full", rebuild)


def misaligned_ledger(patch: pytest.MonkeyPatch) -> None:
    """Scores do not follow their units when others are evicted."""
    real = UnitTable.update

    def update(self: UnitTable, tier: Tensor, coded: Tensor) -> None:
        real(self, tier, coded)
        self.columns = self.columns.roll(1, dims=-1)

    patch.setattr(UnitTable, "update", update)


def wrong_gqa_heads(patch: pytest.MonkeyPatch) -> None:
    """Query head h attends to KV head h mod H instead of h // G."""
    real = attention._sdpa

    def sdpa(q_RHQD: Tensor, k_RHSD: Tensor, v_RHSD: Tensor, scale: float) -> Tensor:
        order = torch.arange(q_RHQD.shape[1]).view(-1, k_RHSD.shape[1]).T.flatten()
        return real(q_RHQD[:, order], k_RHSD, v_RHSD, scale)[:, order.argsort()]

    patch.setattr(attention, "_sdpa", sdpa)


def a_copy_per_query_head(patch: pytest.MonkeyPatch) -> None:
    """Keys and values are repeated to the query heads, as the authors of several methods do, and so is FullKV."""
    real_geometry, real_attend = session_module.geometry_of, KVSession.attend

    def geometry_of(loaded: LoadedModel) -> Geometry:
        true = real_geometry(loaded)
        heads = true.num_kv_heads * true.group_size
        return Geometry(true.num_layers, heads, 1, true.head_dim, true.itemsize)

    def attend(self: KVSession, module: Any, q_BHQD: Tensor, *kv_scale_window: Any) -> Tensor:
        keys, values = (x.repeat_interleave(q_BHQD.shape[1] // x.shape[1], dim=1) for x in kv_scale_window[:2])
        return real_attend(self, module, q_BHQD, keys, values, *kv_scale_window[2:])

    patch.setattr(session_module, "geometry_of", geometry_of)
    patch.setattr(KVSession, "attend", attend)


def uncounted_bytes(patch: pytest.MonkeyPatch) -> None:
    """Evicted keys are kept aside, for a recovery that nobody pays for."""
    real = LayerStore.apply

    def apply(self: LayerStore, placement: Placement, room: list[int]) -> Moves:
        if not hasattr(self, "aside"):
            self.aside = {"keys": self.full.k.clone()}  # type: ignore[attr-defined]
        return real(self, placement, room)

    patch.setattr(LayerStore, "apply", apply)


def requantizing_old_codes(patch: pytest.MonkeyPatch) -> None:
    """Every event decodes what is coded and codes it again."""
    real = LayerStore._change

    def change(self: LayerStore, *rest: Any) -> Any:
        honest = self.policy
        self.policy = _Recompressing(honest)  # type: ignore[assignment]
        try:
            return real(self, *rest)
        finally:
            self.policy = honest

    patch.setattr(LayerStore, "_change", change)


class _Recompressing:
    recompresses = True

    def __init__(self, policy: KVPolicy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@dataclass(frozen=True)
class Leaking(SnapKV):
    """Adds the votes of the prompt before to those of this one."""

    left: ClassVar[dict[int, Tensor]] = {}

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        if bool((view.event_len_B == 0).all()):
            votes = view.columns["vote"]
            mine = votes[0].clone()
            if view.layer_idx in self.left:
                width = min(mine.shape[-1], self.left[view.layer_idx].shape[-1])
                votes[..., :width] += self.left[view.layer_idx][..., :width]
            self.left[view.layer_idx] = mine
        return super().place(views, allowance)


def leaking_state(patch: pytest.MonkeyPatch) -> None:
    """The method itself is broken."""
    patch.setattr(Leaking, "left", {})


SNAPKV, QEVICT = SnapKV(window=16), QEvict()
BROKEN: dict[str, Broken] = {
    "position from stored count": Broken("masked dense", SNAPKV, position_from_stored_count, SNAPKV),
    "evicting before attention": Broken("prefill logits", SNAPKV, evicting_before_attention, SNAPKV),
    "another layer's mask": Broken("masked dense", SNAPKV, another_layers_mask, SNAPKV),
    "misaligned ledger": Broken("scores aligned", QEVICT, misaligned_ledger, QEVICT),
    "wrong GQA heads": Broken("masked dense", SNAPKV, wrong_gqa_heads, SNAPKV),
    "a copy per query head": Broken("stored heads", SNAPKV, a_copy_per_query_head, SNAPKV),
    "uncounted bytes": Broken("allocated = accounted", SNAPKV, uncounted_bytes, SNAPKV),
    "requantizing old codes": Broken("old codes", QEVICT, requantizing_old_codes, QEVICT),
    "leaking state": Broken("state isolation", SNAPKV, leaking_state, Leaking(window=16)),
}
