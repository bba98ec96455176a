"""A dense run beside a session: every key the model ever made is kept, and what the session evicted is masked.

The oracle of the gates. It shares no code with the store: plain fp32 softmax over all positions of one sequence, with a
mask per layer and KV head. From a session it takes only what that claims to hold: which positions, and what its
low-bit tiers give back for them.

Shapes: H KV heads, G query heads per KV head, Q new tokens, S tokens seen, T tokens in all, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qevict_bench.models import LoadedModel
from qevict_bench.policy import FULL
from qevict_bench.session import KVSession
from qevict_bench.store import LayerStore
from qevict_bench.units import NOT_CODED


class DenseRun:
    """One sequence of at most `num_tokens` tokens; `step` runs the model, `follow` takes over a session's placement."""

    def __init__(self, loaded: LoadedModel, num_tokens: int) -> None:
        self.loaded, self.num_tokens = loaded, num_tokens
        self.seen = 0
        self.restored_error = 0.0
        """Distance of what low-bit tiers gave back from its own values, over that from the values of other positions:
        the largest of all layers, KV heads, keys and values. About 1 if positions are mixed up."""
        self._next = 0  # position of the next token: `seen`, or tokens kept with compact positions
        self._own: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values [H, S, D] as the model made them
        self._used: dict[int, tuple[Tensor, Tensor]] = {}  # as attended to
        self._alive: dict[int, Tensor] = {}  # [H, S]
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
            self._mask(index, layer)
        if session.policy.rope == "compact":
            self._compact(session)

    def _mask(self, index: int, layer: LayerStore) -> None:
        rect, slots = layer.table.rect(), layer.read(keep_working_copy=False)
        maps = zip(*(x[0].tolist() for x in (rect.pos, rect.end, rect.tier, rect.coded)), strict=True)
        units = [[unit for unit in zip(*head, strict=True) if unit[0] >= 0] for head in maps]
        own, used = self._own[index], tuple(x.clone() for x in self._used[index])
        if layer.num_heads != len(own[0]):
            raise ValueError(f"layer {index} stores {layer.num_heads} heads, the model makes {len(own[0])}")
        for head in range(layer.num_heads):
            stored: list[int] = []  # position of every slot in reading order: low-bit tiers, then full precision
            rebuilt: list[bool] = []
            for pos, end, tier, coded in sorted(units[head % len(units)], key=lambda u: (u[2] == FULL, u[2], u[0])):
                held = range(pos, min(end, self.seen))
                stored += held
                promoted = coded != NOT_CODED and layer.policy.restore != "host"
                rebuilt += [tier != FULL or promoted] * len(held)
            if len(stored) != slots.count[head]:
                raise ValueError(
                    f"layer {index}, head {head} holds {slots.count[head]} slots for {len(stored)} positions"
                )
            at = torch.tensor(stored, dtype=torch.int64, device=own[0].device)
            self._alive[index][head] = False
            self._alive[index][head, at] = True
            again = torch.tensor(rebuilt, dtype=torch.bool, device=at.device)
            if not bool(again.any()):
                continue
            for mine, mixed, flat in zip(own, used, (slots.k, slots.v), strict=True):
                given = flat[slots.start[head] : slots.start[head] + len(stored)][again]
                exact = mine[head, at[again]].float()
                others = exact.roll(len(exact) // 2, dims=0)
                error = (given.float() - exact).norm() / (given.float() - others).norm().clamp(min=1e-12)
                self.restored_error = max(self.restored_error, float(error) if len(exact) > 1 else 0.0)
                mixed[head, at[again]] = given
        self._used[index] = (used[0], used[1])

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
