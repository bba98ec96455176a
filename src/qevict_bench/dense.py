"""A dense run beside a session: every key the model ever made is kept, and what the session evicted is masked.

The oracle of the gates. It shares no code with the store: plain fp32 softmax over all positions of one sequence, with a
mask per layer and KV head. From a session it takes only what that claims to hold: which positions, and what its
low-bit tiers give back for them, which `Restored` compares with what was put in.

Shapes: H KV heads, G query heads per KV head, Q new tokens, S tokens seen, T tokens in all, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qevict_bench.codecs import Codec
from qevict_bench.models import LoadedModel
from qevict_bench.policy import FULL
from qevict_bench.restored import SLACK, Restored, bounds, unrotated, worst
from qevict_bench.session import KVSession
from qevict_bench.store import LayerStore
from qevict_bench.units import NOT_CODED


class Held(NamedTuple):
    """The slots of one KV head in reading order: positions, tiers, tiers of their codes [S], keys and values [S, D]."""

    at: Tensor
    tier: Tensor
    coded: Tensor
    given: tuple[Tensor, Tensor]


class DenseRun:
    """One sequence of at most `num_tokens` tokens; `step` runs the model, `follow` takes over a session's placement."""

    def __init__(self, loaded: LoadedModel, num_tokens: int) -> None:
        self.loaded, self.num_tokens = loaded, num_tokens
        self.seen = 0
        self.restored = Restored()
        self._next = 0  # position of the next token: `seen`, or tokens kept with compact positions
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values [H, S, D] as the model made them
        self._used: dict[int, tuple[Tensor, Tensor]] = {}  # as attended to
        self._alive: dict[int, Tensor] = {}  # [H, S]
        self._gave: dict[int, tuple[Tensor, Tensor]] = {}  # what codes gave at the last event [H, T, D]
        self._codes: dict[int, Tensor] = {}  # tier that holds codes of a position, at the last event [H, S]
        self._place: dict[int, Tensor] = {}  # positions the keys are rotated at [H, S]
        self._prob: dict[int, Tensor] = {}  # attention of full-attention layers [H * G, T, T]

    @torch.inference_mode()
    def step(self, ids: Sequence[int]) -> Tensor:
        """Add tokens; logits [V] of the last one."""
        model = self.loaded.model
        at = torch.arange(self._next, self._next + len(ids), device=model.device)
        out = model(
            torch.tensor([list(ids)], device=model.device),
            position_ids=at[None],
            use_cache=False,
            kv=self,
            logits_to_keep=1,
        )
        self.seen += len(ids)
        self._next += len(ids)
        logits: Tensor = out.logits[0, -1]
        return logits.float()

    def attend(
        self, module: nn.Module, q_BHQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Called by the attention function."""
        index, new, device = int(module.layer_idx), q_BHQD.shape[2], q_BHQD.device  # type: ignore[arg-type]
        fresh = (k_BHQD[0], v_BHQD[0])
        heads, group = len(fresh[0]), q_BHQD.shape[1] // len(fresh[0])
        for held in (self._own, self._used):
            held[index] = _joined(held[index], fresh) if index in held else fresh
        alive = torch.ones((heads, new), dtype=torch.bool, device=device)
        place = torch.arange(self._next, self._next + new, device=device).expand(heads, -1)
        self._alive[index] = torch.cat((self._alive.get(index, alive[:, :0]), alive), dim=1)
        self._place[index] = torch.cat((self._place.get(index, place[:, :0]), place), dim=1)
        row, column = (
            torch.arange(self.seen, self.seen + new, device=device),
            torch.arange(self.seen + new, device=device),
        )
        visible = column <= row[:, None]
        full = index in self.loaded.compressible_layers
        if not full:
            visible &= column > row[:, None] - int(window or self.loaded.model.config.sliding_window)
        keys, values = (x.float().repeat_interleave(group, dim=0) for x in self._used[index])
        score = q_BHQD[0].float() @ keys.transpose(1, 2) * scale
        hidden = ~(visible & self._alive[index].repeat_interleave(group, dim=0)[:, None])
        prob = score.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
        if full:
            if index not in self._prob:
                self._prob[index] = prob.new_zeros((len(prob), self.num_tokens, self.num_tokens))
            self._prob[index][:, self.seen : self.seen + new, : self.seen + new] = prob
        return (prob @ values).to(q_BHQD.dtype)[None]

    def mass(self, index: int, rows_P: Tensor, pos_HU: Tensor, end_HU: Tensor) -> Tensor:
        """Attention of absolute rows to the positions pos .. end - 1 of every unit: [H, G, P, U]; 0 for dead units."""
        heads = len(self._alive[index])
        if len(pos_HU) not in (1, heads):
            raise ValueError(f"layer {index} has units for {len(pos_HU)} heads, the model makes {heads}")
        prob = self._prob[index][:, rows_P].unflatten(0, (heads, -1))
        total = torch.nn.functional.pad(prob.double().cumsum(-1), (1, 0)).float()
        shape = (heads, *total.shape[1:3], pos_HU.shape[-1])
        first, stop = (
            x.clamp(0, self.num_tokens).expand(heads, -1)[:, None, None].expand(shape)
            for x in (pos_HU, torch.maximum(pos_HU, end_HU))
        )
        return (total.gather(-1, stop) - total.gather(-1, first)) * (pos_HU >= 0).expand(heads, -1)[:, None, None]

    # ---- taking over a placement ----

    def follow(self, session: KVSession) -> None:
        """Mask what row 0 of the session no longer holds, and attend to what its low-bit tiers give back."""
        for index, layer in session.layers.items():
            self._take(index, layer)
        if session.policy.rope == "compact":
            self._compact(session)

    def _take(self, index: int, layer: LayerStore) -> None:
        rect, slots, seen = layer.table.rect(), layer.read(keep_working_copy=False), self.seen
        maps = zip(*(x[0].tolist() for x in (rect.pos, rect.end, rect.tier, rect.coded)), strict=True)
        units = [[unit for unit in zip(*head, strict=True) if unit[0] >= 0] for head in maps]
        if layer.num_heads != len(self._own[index][0]):
            raise ValueError(
                f"layer {index} stores {layer.num_heads} heads, the model makes {len(self._own[index][0])}"
            )
        held: list[Held] = []
        for head in range(layer.num_heads):
            slot: list[tuple[int, int, int]] = []  # position, tier, tier of the codes, in reading order
            for pos, end, tier, coded in sorted(units[head % len(units)], key=lambda u: (u[2] == FULL, u[2], u[0])):
                slot += [(at, tier, coded) for at in range(pos, min(end, seen))]
            count, start = slots.count[head], slots.start[head]
            if len(slot) != count:
                raise ValueError(f"layer {index}, head {head} holds {count} slots for {len(slot)} positions")
            at, tiers, coded_S = torch.tensor(slot, dtype=torch.int64, device=layer.device).view(-1, 3).unbind(1)
            given = (slots.k[start : start + count], slots.v[start : start + count])
            held.append(Held(at, tiers, coded_S, given))
        if index not in self._gave:
            keys, values = (x.new_zeros((len(x), self.num_tokens, x.shape[-1])) for x in self._own[index])
            self._gave[index] = (keys, values)
        for number, name in enumerate(("key", "value")):
            self._compare(index, layer, name, held, number)
        used = tuple(x.clone() for x in self._used[index])
        self._alive[index][:] = False
        codes = torch.full_like(self._alive[index], NOT_CODED, dtype=torch.int64)
        for head, (at, tiers, coded_S, given) in enumerate(held):
            self._alive[index][head, at] = True
            codes[head, at] = coded_S
            back = (tiers != FULL) | (coded_S != NOT_CODED)
            for mixed, gave, own, flat in zip(used, self._gave[index], self._own[index], given, strict=True):
                gave[head, at[tiers != FULL]] = flat[tiers != FULL]
                again = own[head, at] if layer.policy.restore == "host" else flat
                mixed[head, at[back]] = torch.where((tiers == FULL)[:, None], again, flat)[back]
        self._used[index], self._codes[index] = (used[0], used[1]), codes

    def _compare(self, index: int, layer: LayerStore, name: str, held: list[Held], number: int) -> None:
        """What every unit with codes gives back, beside what was attended to until now."""
        own, used = self._own[index][number], self._used[index][number]
        codecs: list[Codec] = [getattr(tier, name) for tier in layer.tiers]
        first = [-1, -1, *(1 + codecs[1:].index(codec) for codec in codecs[1:])]  # equal codecs keep codes in common
        lane_of = torch.tensor(first, device=used.device)
        before = torch.full(used.shape[:2], NOT_CODED, device=used.device)
        if index in self._codes:
            before[:, : self._codes[index].shape[1]] = self._codes[index]
        fresh: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        for head, (at, tiers, coded_S, given) in enumerate(held):
            if not len(at):
                continue
            now, then = lane_of[coded_S + 1], lane_of[before[head, at] + 1]
            new = (now >= 0) & ((now != then) | (layer.policy.recompresses & (tiers != FULL)))
            for lane in now[new].unique().tolist():
                mine = torch.nonzero(new & (now == lane))[:, 0]
                mine = mine[at[mine].argsort()]
                fresh.setdefault(lane, []).append((head, at[mine], given[number][mine]))
            back, gave = (tiers == FULL) & (coded_S != NOT_CODED), self._gave[index][number][head, at]
            exact = own[head, at]
            source = torch.where(back[:, None], exact, gave) if layer.policy.restore == "host" else gave
            moved = (given[number].float() - source.float()).abs() / exact.float().abs().amax().clamp(min=1e-12)
            self.restored.promoted = worst(self.restored.promoted, moved[back])
            self.restored.stayed = worst(self.restored.stayed, moved[(now >= 0) & ~new & ~back])
        for lane, parts in fresh.items():
            self._bound(index, layer, codecs[lane], number, parts)

    def _bound(
        self, index: int, layer: LayerStore, codec: Codec, number: int, parts: list[tuple[int, Tensor, Tensor]]
    ) -> None:
        """`parts`: head, positions [T] and what they give back [T, D], of units that were coded just now."""
        turned = codec.pre_rope and number == 0

        def flat(x_TD: Tensor, at_T: Tensor) -> Tensor:
            return unrotated(self.loaded, index, x_TD, at_T) if turned else x_TD.float()

        own, used = self._own[index][number], self._used[index][number]
        early = torch.arange(layer.prompt_len[0], device=own.device)
        prompt = torch.stack([flat(own[head, early], early) for head in range(len(own))])
        heads = [head for head, _, _ in parts]
        sources = [flat(used[head, at], at) for head, at, _ in parts]
        if heads != list(range(len(own))):  # a head without any: bounds go by head
            every = dict(zip(heads, sources, strict=True))
            sources = [every.get(head, prompt[head, :0]) for head in range(len(own))]
        limits = bounds(codec, sources, prompt, layer.policy.unit)
        for head, at, given in parts:
            slack = SLACK[self.loaded.dtype] * sources[head].abs().amax()
            error = (flat(given, at) - sources[head]).abs() / (limits[head] + slack).clamp(min=1e-12)
            self.restored.coded = worst(self.restored.coded, error)

    def _compact(self, session: KVSession) -> None:
        """Re-index kept positions 0 .. n - 1 and turn their keys; sliding layers keep their distances to the next."""
        rope = next(iter(session.layers.values())).rope
        left = int(self._alive[self.loaded.compressible_layers[0]][0].sum())
        for index, place in self._place.items():
            if index in self.loaded.compressible_layers:
                alive = self._alive[index]
                new = torch.where(alive, alive.cumsum(-1) - 1, place)
            else:
                new = place - (self._next - left)
            keys, values = self._used[index]
            turned = rope.shift(keys, place - new, index, self.num_tokens).to(keys.dtype)
            self._used[index], self._place[index] = (turned, values), new
        self._next = left


def _joined(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.cat((old[0], new[0]), dim=1), torch.cat((old[1], new[1]), dim=1)
