"""FullKV as the side that a method is compared with: it keeps everything and tells what its attention falls on.

Shapes: B rows, H KV heads, G query heads per KV head, T table heads (1 if all KV heads share theirs), Q new tokens,
P of them scored together, U units, E coded units of W slots, D head dim, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qevict_bench.attention import observe
from qevict_bench.budget import Budget
from qevict_bench.codecs import Codec
from qevict_bench.models import LoadedModel
from qevict_bench.policy import FULL, Allowance, KVPolicy, LayerView, Placement
from qevict_bench.scoring import last_rows
from qevict_bench.selection import keep_all
from qevict_bench.session import KVSession
from qevict_bench.slots import Lane, Slots
from qevict_bench.store import LayerStore

OBSERVED = 32  # prompt rows that are scored where the method scores none

Probe = Callable[[int, int, Tensor, str, Callable[[int], torch.Generator]], Tensor | None]


@dataclass(frozen=True)
class Everything(KVPolicy):
    """FullKV in units of `unit` tokens behind the first `offset`; `rows` says what is scored, `see` gets the mass."""

    unit: int = 1
    offset: int = 0
    rows: Probe = lambda start, stop, prompt_len_B, phase, rng: None
    see: Callable[[LayerView, Tensor, Tensor], None] = lambda view, mass_BHGPU, rows_BP: None

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return self.rows(start, stop, prompt_len_B, phase, rng)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        self.see(view, mass_BHGPU, rows_BP)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        return [keep_all(view) for view in views]


@dataclass(frozen=True)
class Seen:
    """Attention mass of one layer on all units [H, P, U], the mean over query heads, by tokens at `position_P`.

    With `coded`, what it would be if the keys of quantized units were coded.
    """

    layer_idx: int
    mass_HPU: Tensor
    position_P: Tensor
    coded: bool


@torch.inference_mode()
def full_kv_continuation(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], num_tokens: int, prefill_chunk: int = 1024
) -> list[tuple[int, ...]]:
    """FullKV's greedy `num_tokens` tokens after each prompt (ids), as one batch; an end of text does not end them."""
    session = KVSession(loaded, Everything(), Budget("1.0"), len(prompts), max_new=num_tokens)
    made = [session.prefill(prompts, prefill_chunk).argmax(-1).tolist()]
    while len(made) < num_tokens:
        made.append(session.decode(made[-1]).argmax(-1).tolist())
    return list(zip(*made, strict=True))


class Reference(KVSession):
    """FullKV reading one stream in the company of `method` (fitted): in its units, and with its own prompt rows scored.

    It reads at most `chunk` tokens at a time. What is scored goes to `receive`; `outputs` has each layer's attention
    outputs [H * G, Q, D] of the last feed, one per pass.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        method: KVPolicy,
        num_tokens: int,
        name: str,
        receive: Callable[[Seen], None],
        chunk: int,
    ) -> None:
        policy = Everything(method.unit, method.offset, self._rows, self._see)
        super().__init__(loaded, policy, Budget("1.0"), 1, seeds=[name])
        self.method, self.receive, self.chunk = method, receive, chunk
        self.outputs: dict[int, list[Tensor]] = {index: [] for index in self.layers}
        self._tiers: dict[int, Tensor] = {}  # by layer [T, U], where coded keys are to be scored
        self._references: dict[tuple[int, Codec], tuple[Tensor, ...]] = {}
        self._coded, self._observed = False, True
        self._reserve([num_tokens], 0)

    @torch.inference_mode()
    def start(self, prompt: Sequence[int]) -> None:
        """Read the prompt; the rows that the method scores are scored, or the last 32 if it scores none."""
        length = torch.tensor([len(prompt)])
        mask = self.method.probe(0, len(prompt), length, "prefill", self._rngs.__getitem__)
        self._observed = mask is not None and bool(mask.any())
        self.prefill([prompt], self.chunk)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int], num_logits: int, tiers: dict[int, Tensor]) -> Tensor:
        """Read tokens, all of them scored; logits [N, V] of the last `num_logits`.

        Where `tiers` has a layer's tiers [T, U], its coded keys are scored too.
        """
        self._tiers = tiers
        for pieces in self.outputs.values():
            pieces.clear()
        logits: list[Tensor] = []
        for begin in range(0, len(tokens), self.chunk):
            piece = list(tokens[begin : begin + self.chunk])
            keep = range(max(0, len(tokens) - num_logits - begin), len(piece))
            ids = torch.tensor([piece], device=self.loaded.model.device)
            found = self._forward("append", ids, [len(piece)], keep or (len(piece) - 1,))
            logits += [found[0]] if keep else []
        return torch.cat(logits)

    def attend(
        self, module: nn.Module, q_BHQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        out = super().attend(module, q_BHQD, k_BHQD, v_BHQD, scale, window)
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if index in self.layers and self._step.phase == "append":
            self.outputs[index].append(out[0])
            if index in self._tiers:
                self._score_coded(self.layers[index], q_BHQD, scale)
        return out

    def _rows(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        if phase != "prefill":
            return torch.ones((1, stop - start), dtype=torch.bool)
        if self._observed:
            return self.method.probe(start, stop, prompt_len_B, phase, rng)
        return last_rows(start, stop, prompt_len_B, OBSERVED)

    def _see(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        self.receive(Seen(view.layer_idx, mass_BHGPU[0].mean(1), rows_BP[0], self._coded))

    # ---- coded keys ----

    def _score_coded(self, layer: LayerStore, q_BHQD: Tensor, scale: float) -> None:
        probed = torch.ones((1, q_BHQD.shape[2]), dtype=torch.bool, device=q_BHQD.device)
        self._coded = True
        observe(layer, q_BHQD, self._with_codes(layer, self._tiers[layer.layer_idx]), self._step, probed, scale)
        self._coded = False

    def _with_codes(self, layer: LayerStore, tier_TU: Tensor) -> Slots:
        """The layer's slots with the keys of quantized units as the method's codecs give them back.

        Units that share parameters do so in order of position, as if all had been demoted together.
        """
        coded = copy.copy(layer.full)
        coded.k = layer.full.k.clone()
        tier_HU = tier_TU.to(layer.device).expand(layer.num_heads, -1)
        codecs = [tier.key for tier in self.method.layer_tiers(layer.layer_idx)]
        for codec in dict.fromkeys(codecs[FULL + 1 :]):
            mine = [i for i, each in enumerate(codecs) if each == codec and i > FULL]
            head_E, unit_E = torch.isin(tier_HU, torch.tensor(mine, device=layer.device)).nonzero().unbind(1)
            if not len(head_E):
                continue
            first_E = layer.policy.offset + (unit_E - int(layer.policy.offset > 0)) * layer.policy.unit
            position_EW = first_E[:, None] + torch.arange(layer.policy.unit, device=layer.device)
            at_EW = layer.full.first[0, head_E][:, None] + position_EW  # nothing was moved: slots are positions
            key_EWD, reference = layer.full.k[at_EW], self._reference(layer, codec)
            if codec.pre_rope:
                key_EWD = self._unrotated(layer, key_EWD, position_EW)
            made = Lane(codec, 1, layer.num_heads).encode(key_EWD, head_E, reference)
            entries = torch.arange(len(head_E), device=layer.device)
            found = made.decode(entries, head_E, reference, torch.float32 if codec.pre_rope else layer.dtype)
            if codec.pre_rope:
                found = layer.rope.rotate(found, position_EW, layer.layer_idx, max(layer.table.covered))
            coded.k[at_EW.flatten()] = found.to(layer.dtype).flatten(0, 1)
        return coded

    def _reference(self, layer: LayerStore, codec: Codec) -> tuple[Tensor, ...]:
        """The codec's parameters of the prompt, if it has some."""
        place = (layer.layer_idx, codec)
        if place not in self._references:
            position_HS = torch.arange(self.prompt_len[0], device=layer.device).expand(layer.num_heads, -1)
            key_HSD = layer.full.k[layer.full.first[0][:, None] + position_HS]
            needed = codec.reference_bytes(self.geometry.head_dim, self.geometry.itemsize)
            if needed and codec.pre_rope:
                key_HSD = self._unrotated(layer, key_HSD, position_HS)
            self._references[place] = codec.reference(key_HSD) if needed else ()
        return self._references[place]

    def _unrotated(self, layer: LayerStore, key: Tensor, position: Tensor) -> Tensor:
        return layer.rope.unrotate(key, position, layer.layer_idx, max(layer.table.covered)).to(layer.dtype)
