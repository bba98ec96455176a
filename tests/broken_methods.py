"""Methods and engines broken on purpose, one fault each, and the gate that must catch it.

A fault is what a real cache library got wrong, or what would flatter a method, put into this engine by replacing one
function; the twin is the same method on the engine as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from presets import qevict
from torch import Tensor

from methods.kivi import KIVI
from methods.mikv import MiKV
from methods.pyramidkv import PyramidKV
from methods.snapkv import SnapKV
from methods.zipcache import ZipCache
from qevict_bench import accounting, attention, codecs
from qevict_bench import session as session_module
from qevict_bench.attention import Step
from qevict_bench.budget import Geometry, Usage
from qevict_bench.models import LoadedModel
from qevict_bench.policy import EVICTED, FULL, Allowance, KVPolicy, LayerView, Placement
from qevict_bench.rope import Rope
from qevict_bench.selection import keep_all
from qevict_bench.session import KVSession
from qevict_bench.slots import Lane, Slots
from qevict_bench.store import LayerStore, Moves
from qevict_bench.units import Rect, UnitTable


@dataclass(frozen=True)
class Broken:
    """`twin` passes `gate`; after `sabotage`, `policy` fails it. They differ if the method itself is broken."""

    gate: str
    twin: KVPolicy
    sabotage: Callable[[pytest.MonkeyPatch], None]
    policy: KVPolicy
    budget: str = "0.2"


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


# ---- memory that nobody pays for ----


def kept_aside(form: Callable[[Tensor], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Evicted keys are kept aside, for a recovery that nobody pays for."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        real = LayerStore.apply

        def apply(self: LayerStore, placement: Placement, room: list[int]) -> Moves:
            if not hasattr(self, "aside"):
                self.aside = form(self.full.k.clone())  # type: ignore[attr-defined]
            return real(self, placement, room)

        patch.setattr(LayerStore, "apply", apply)

    return sabotage


def in_a_closure(keys: Tensor) -> Callable[[], Tensor]:
    return lambda: keys


def allocated_with_the_session(patch: pytest.MonkeyPatch) -> None:
    """A buffer of fixed size is there from the first token on."""
    real = LayerStore.__init__

    def init(self: LayerStore, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.buffer = torch.zeros(400 * self.num_heads, 2 * self.geometry.head_dim)  # type: ignore[attr-defined]

    patch.setattr(LayerStore, "__init__", init)


@dataclass(frozen=True)
class Hoarding(SnapKV):
    """Keeps all values in an attribute of its class."""

    kept: ClassVar[dict[int, Tensor]] = {}

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        self.kept[views[0].layer_idx] = views[0].values(0).clone()
        return super().place(views, allowance)


HOARD: dict[int, Tensor] = {}


@dataclass(frozen=True)
class Stashing(SnapKV):
    """Keeps all values in a global of its module."""

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        HOARD[views[0].layer_idx] = views[0].values(0).clone()
        return super().place(views, allowance)


def no_sabotage(patch: pytest.MonkeyPatch) -> None:
    """The method itself is broken."""
    Hoarding.kept.clear()
    HOARD.clear()


def billed_as_workspace(component: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A component moves from the counted bytes to those that are only reported."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        real = accounting.usage

        def usage(layer: LayerStore, row: int) -> Usage:
            true = real(layer, row)
            counted = {**true.counted, component: 0}
            return replace(true, counted=counted, workspace=true.workspace + true.counted[component])

        patch.setattr(session_module, "usage", usage)

    return sabotage


def params_unpaid(patch: pytest.MonkeyPatch) -> None:
    """Parameters cost nothing, so that a quarter more units are kept."""
    billed_as_workspace("params")(patch)
    real = accounting.bytes_of
    patch.setattr(accounting, "bytes_of", lambda layer, tier: (real(layer, tier) * 4) // 5)


def references_unbilled(patch: pytest.MonkeyPatch) -> None:
    real = accounting.usage

    def usage(layer: LayerStore, row: int) -> Usage:
        true = real(layer, row)
        return replace(true, counted={**true.counted, "reference": 0})

    patch.setattr(session_module, "usage", usage)


def a_byte_of_every_entry_unbilled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UnitTable, "unit_bytes", property(lambda self: 4 + 1 + 4 * len(self.columns)))


@dataclass(frozen=True)
class GivingUp(SnapKV):
    """Evicts nothing any more once 50 tokens have followed the prompt."""

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        if bool((views[0].seq_len_B > views[0].prompt_len_B + 50).any()):
            return [keep_all(views[0])]
        return super().place(views, allowance)


# ---- low-bit tiers that give back something else ----


def keys_one_position_off(patch: pytest.MonkeyPatch) -> None:
    real = Rope.rotate

    def rotate(self: Rope, x: Tensor, at: Tensor, layer_idx: int, length: int) -> Tensor:
        return real(self, x, at + 1, layer_idx, length + 2)

    patch.setattr(Rope, "rotate", rotate)


def scales_too_large(patch: pytest.MonkeyPatch) -> None:
    real = codecs._dequantize
    patch.setattr(codecs, "_dequantize", lambda codes, scale, zero, dtype: real(codes, scale * 1.2, zero, dtype))


def zero_point_dropped(patch: pytest.MonkeyPatch) -> None:
    real = codecs.PerToken.decode

    def decode(self: codecs.PerToken, slot: tuple[Tensor, ...], *rest: Any) -> Tensor:
        return real(self, (*slot[:2], torch.zeros_like(slot[2])), *rest)

    patch.setattr(codecs.PerToken, "decode", decode)


def wrong_unit(change: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """`change` gets decoded values, their entries and their segments."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        real = Lane.decode

        def decode(self: Lane, entries: Tensor, segment: Tensor, *rest: Any) -> Tensor:
            out = real(self, entries, segment, *rest)
            change(out, entries, segment)
            return out

        patch.setattr(Lane, "decode", decode)

    return sabotage


def last_is_first(out: Tensor, entries: Tensor, segment: Tensor) -> None:
    out[-1] = out[0]


def last_is_zero(out: Tensor, entries: Tensor, segment: Tensor) -> None:
    out[-1] = 0


def first_is_zero(out: Tensor, entries: Tensor, segment: Tensor) -> None:
    out[segment != segment.roll(1)] = 0


def tenth_is_seven(out: Tensor, entries: Tensor, segment: Tensor) -> None:
    out[entries % 10 == 3] = 7.0


def late_recompression(patch: pytest.MonkeyPatch) -> None:
    """What is coded again while decoding comes from other tokens."""
    real = LayerStore._source

    def source(self: LayerStore, *rest: Any) -> Tensor:
        made = real(self, *rest)
        return made.roll(1, dims=0) if self.seq_len[0] > self.prompt_len[0] + 50 else made

    patch.setattr(LayerStore, "_source", source)


def promoted_to_their_mean(patch: pytest.MonkeyPatch) -> None:
    real = LayerStore._rebuild_full

    def rebuild(self: LayerStore, rect: Rect, new: Tensor, lens: Tensor, *rest: Any) -> Slots:
        full = real(self, rect, new, lens, *rest)
        promoted = self.per_head((rect.tier > FULL) & (new == FULL))
        if bool(promoted.any()):
            at = self._unit_slots(self._first_slots(new == FULL, lens, full)[promoted]).flatten()
            full.v[at] = full.v[at].mean()
        return full

    patch.setattr(LayerStore, "_rebuild_full", rebuild)


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


@dataclass(frozen=True)
class Remembering(PyramidKV):
    """Works out its layers' counts once, for the first prompt it meets."""

    counts: ClassVar[list[list[int]]] = []

    def _counts(self, total: int, seen: int, available: Sequence[int]) -> list[int]:
        if not self.counts:
            self.counts.append(super()._counts(total, seen, available))
        return [min(wanted, there) for wanted, there in zip(self.counts[0], available, strict=True)]


def counts_of_another_prompt(patch: pytest.MonkeyPatch) -> None:
    """The method itself is broken."""
    Remembering.counts.clear()


@dataclass(frozen=True)
class Noisy(SnapKV):
    """Adds to its votes what no seed explains, too little to move a unit."""

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        for column in views[0].columns.values():
            column += 1e-3 * torch.rand(column.shape)
        return super().place(views, allowance)


# ---- forks, frozen rows, queries that are not shown ----


def shallow_fork(patch: pytest.MonkeyPatch) -> None:
    """A fork shares the layers of its parent."""
    patch.setattr(KVSession, "fork", lambda self: copy.copy(self))


def frozen_rows_evicted(patch: pytest.MonkeyPatch) -> None:
    """Placements reach frozen rows. It shows with methods that move units without need: a frozen row always fits."""

    def carry_out(self: KVSession, layer: LayerStore, placement: Placement, room: list[int]) -> None:
        moves = layer.apply(placement, room)
        for row in self.active:
            self.trace[row].evictions += int(moves.evictions[row])
            layer.event_len[row] = layer.seq_len[row]

    patch.setattr(KVSession, "_carry_out", carry_out)


def unseen(phase: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Queries of a phase are never handed to `observe`."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        real = attention.observe

        def observe(layer: LayerStore, q_BHQD: Tensor, slots: Slots, step: Step, *rest: Any) -> None:
            if step.phase != phase:
                real(layer, q_BHQD, slots, step, *rest)

        patch.setattr(session_module, "observe", observe)

    return sabotage


def never_asked(patch: pytest.MonkeyPatch) -> None:
    """The policy is not even asked about decoded queries."""
    real = KVSession._ask_probe
    patch.setattr(KVSession, "_ask_probe", lambda self, step: None if step.phase == "decode" else real(self, step))


SNAPKV, QEVICT, MEMORY, LOW = SnapKV(window=16), qevict(), "allocated = accounted", "low-bit values"
STATIC, GROUPED, RANDOM = qevict(key_params="static"), qevict(key_params="group:4"), qevict(routing="random")
KIVI2, KIVI4, MIKV, ZIP = KIVI(), KIVI(bits=4), MiKV(), ZipCache()
BROKEN: dict[str, Broken] = {
    "position from stored count": Broken("masked dense", SNAPKV, position_from_stored_count, SNAPKV),
    "evicting before attention": Broken("prefill logits", SNAPKV, evicting_before_attention, SNAPKV),
    "another layer's mask": Broken("masked dense", SNAPKV, another_layers_mask, SNAPKV),
    "misaligned ledger": Broken("scores aligned", QEVICT, misaligned_ledger, QEVICT),
    "wrong GQA heads": Broken("masked dense", SNAPKV, wrong_gqa_heads, SNAPKV),
    "a copy per query head": Broken("stored heads", SNAPKV, a_copy_per_query_head, SNAPKV),
    "keys aside": Broken(MEMORY, SNAPKV, kept_aside(lambda keys: {"keys": keys}), SNAPKV),
    "keys aside in numpy": Broken(MEMORY, SNAPKV, kept_aside(lambda keys: keys.numpy().copy()), SNAPKV),
    "keys aside as bytes": Broken(MEMORY, SNAPKV, kept_aside(lambda keys: keys.numpy().tobytes()), SNAPKV),
    "keys aside as a list": Broken(MEMORY, SNAPKV, kept_aside(lambda keys: keys.tolist()), SNAPKV),
    "keys aside in a closure": Broken(MEMORY, SNAPKV, kept_aside(in_a_closure), SNAPKV),
    "values in the class": Broken(MEMORY, SNAPKV, no_sabotage, Hoarding(window=16)),
    "values in the module": Broken(MEMORY, SNAPKV, no_sabotage, Stashing(window=16)),
    "allocated with the session": Broken(MEMORY, SNAPKV, allocated_with_the_session, SNAPKV),
    "table as workspace": Broken(MEMORY, SNAPKV, billed_as_workspace("table"), SNAPKV),
    "params as workspace": Broken(MEMORY, QEVICT, billed_as_workspace("params"), QEVICT),
    "params unpaid": Broken("budget", QEVICT, params_unpaid, QEVICT),
    "references unbilled": Broken(MEMORY, STATIC, references_unbilled, STATIC),
    "a byte of every entry unbilled": Broken(MEMORY, SNAPKV, a_byte_of_every_entry_unbilled, SNAPKV),
    "giving up": Broken("budget", SNAPKV, no_sabotage, GivingUp(window=16)),
    "counts of another prompt": Broken(
        "state isolation", PyramidKV(), counts_of_another_prompt, Remembering(), budget="0.4"
    ),
    "noise": Broken("determinism", SNAPKV, no_sabotage, Noisy(window=16)),
    "keys one position off": Broken(LOW, QEVICT, keys_one_position_off, QEVICT),
    "scales too large": Broken(LOW, QEVICT, scales_too_large, QEVICT),
    "scales too large, 4 bits": Broken(LOW, KIVI4, scales_too_large, KIVI4),
    "zero point dropped": Broken(LOW, QEVICT, zero_point_dropped, QEVICT),
    "last unit zero": Broken(LOW, QEVICT, wrong_unit(last_is_zero), QEVICT),
    "last unit another's": Broken(LOW, KIVI2, wrong_unit(last_is_first), KIVI2),
    "last unit another's, grouped": Broken(LOW, GROUPED, wrong_unit(last_is_first), GROUPED),
    "first unit zero": Broken(LOW, MIKV, wrong_unit(first_is_zero), MIKV),
    "every tenth unit": Broken(LOW, KIVI4, wrong_unit(tenth_is_seven), KIVI4),
    "late recompression": Broken(LOW, ZIP, late_recompression, ZIP, budget="native"),
    "promoted to their mean": Broken("promotion", QEVICT, promoted_to_their_mean, QEVICT),
    "shallow fork": Broken("fork", SNAPKV, shallow_fork, SNAPKV),
    "frozen rows evicted": Broken("frozen rows", RANDOM, frozen_rows_evicted, RANDOM),
    "decoded queries unseen": Broken("rows observed", SNAPKV, unseen("decode"), SNAPKV),
    "decoded queries unseen, replayed": Broken("rows observed", QEVICT, unseen("decode"), QEVICT),
    "question unseen": Broken("rows observed", SNAPKV, unseen("append"), SNAPKV),
    "decoded queries never asked about": Broken("rows observed", QEVICT, never_asked, QEVICT),
    "requantizing old codes": Broken("old codes", QEVICT, requantizing_old_codes, QEVICT),
    "leaking state": Broken("state isolation", SNAPKV, leaking_state, Leaking(window=16)),
}
