"""What is gathered of one stream while a method and FullKV read it (lockstep.py), and the record that comes of it.

Shapes: L compressible layers, H KV heads, G query heads per KV head, T table heads (1 if all KV heads share theirs), P
tokens scored together, U units of the stream, K events, S steps (tokens after the prefill), N predictions, Q tokens,
V vocabulary, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qevict_bench.budget import Geometry
from qevict_bench.diagnostics import NOT_YET, SHARES, History, Layout, hindsight_missed, kinds, shares
from qevict_bench.policy import FULL, KVPolicy
from qevict_bench.reference import Seen

Outputs = Sequence[Tensor]  # pieces [H * G, Q, D] of consecutive tokens


class Sizes(NamedTuple):
    """Bytes after an event: held in all, of these codes of promoted units, and of these full-precision units that do
    not compete; allowed (what is held, if unbounded).
    """

    total: int
    ledger: int
    protected: int
    allowed: int


@dataclass(frozen=True)
class Record:
    """One stream under one method. Tensors lie on the CPU.

    history is what the functions of diagnostics.py take. prefill_LHU FullKV's mass on each unit, summed over the prompt
    rows that the method itself scores (its last 32 if it scores none), mean over query heads. Per step, with the tiers
    that stood before it: shares_S5 (diagnostics.SHARES), oracle_missed_S what would be missed if the same number of
    units were evicted by that very step's attention, kl_S = KL(p_full || p_method) in nats over the whole vocabulary
    for what follows, same_S whether both predict the same token (both nan within an appended part, where the method
    gives no logits), output_error_SL = ||o_method - o_full|| / ||o_full|| of the layer's attention output, all heads
    together; decoded_S tells decoded steps from appended ones. score_KLTU increments of the method's own `score` column
    in each interval that an event ends, nan where it has none; None without such a column. score_first_LTU and
    score_last_LTU the column after the first and after the last event (nan, None likewise). coded_KLHU the mass that
    FullKV's own queries put on each quantized unit in each interval if its keys had been coded, nan elsewhere; None
    unless asked for. sizes after each event. fraction: mean over decode steps of bytes held / FullKV bytes (after
    the prefill if none is decoded), as the budget counts them.
    """

    name: str
    policy: KVPolicy
    history: History
    prefill_LHU: Tensor
    shares_S5: Tensor
    oracle_missed_S: Tensor
    kl_S: Tensor
    same_S: Tensor
    output_error_SL: Tensor
    decoded_S: Tensor
    score_KLTU: Tensor | None
    score_first_LTU: Tensor | None
    score_last_LTU: Tensor | None
    coded_KLHU: Tensor | None
    sizes: tuple[Sizes, ...]
    fraction: float

    @property
    def missed_S(self) -> Tensor:
        """Share of FullKV's attention on what was evicted before the step."""
        return self.shares_S5[:, SHARES.index("evicted")]

    @property
    def knobs(self) -> dict[str, Any]:
        return self.policy.knobs()


class Gathering:
    """What is gathered of one stream: lists grow by one per event, tensors over steps are filled as FullKV reads on."""

    def __init__(
        self, layout: Layout, geometry: Geometry, layers: Sequence[int], prompt_len: int, steps: int, coded: bool
    ) -> None:
        self.layout, self.prompt_len, self.with_coded = layout, prompt_len, coded
        self.num_units = layout.num_units(prompt_len + steps)
        self.layers = {index: i for i, index in enumerate(layers)}
        self.slot_bytes = geometry.slot_bytes
        self.shape = (geometry.num_layers, geometry.num_kv_heads, self.num_units)
        self.seq_len, self.sizes = list[int](), list[Sizes]()
        self.tier, self.mass, self.coded = list[Tensor](), list[Tensor](), list[Tensor]()
        self.gained, self.score_LTU, self.score_first_LTU = list[Tensor](), torch.zeros(0), torch.zeros(0)
        self.prefill_LHU = torch.zeros(self.shape)
        self.interval_S = torch.zeros(steps, dtype=torch.int64)
        self.decoded_S = torch.zeros(steps, dtype=torch.bool)
        self.shares_S5 = torch.zeros((steps, len(SHARES)))
        self.oracle_S, self.kl_S, self.same_S = torch.zeros(steps), *torch.full((2, steps), nan)
        self.error_SL = torch.zeros((steps, geometry.num_layers))
        self.read = 0

    def mark(self, seq_len: int, tier_LTU: Tensor, before_LTU: Tensor, score_LTU: Tensor, sizes: Sizes) -> None:
        """An event, or the end of an interval of a method that has none while decoding.

        `before` and `score` are the method's scores before and after it, `sizes` without what is protected.
        """
        if self.tier:
            self.gained.append(before_LTU - self.score_LTU)
        else:
            self.score_first_LTU = score_LTU
        self.score_LTU = score_LTU
        self.seq_len.append(seq_len)
        self.tier.append(tier_LTU)
        self.mass.append(torch.zeros(self.shape))
        if self.with_coded:
            self.coded.append(torch.zeros(self.shape))
        self.sizes.append(sizes._replace(protected=self._protected_slots() * self.slot_bytes))

    def _protected_slots(self) -> int:
        layout, seen, num = self.layout, self.seq_len[-1], self.num_units
        len_U = (layout.end_U(num).clamp(max=seen) - layout.first_U(num)).clamp(min=0)
        exact_LTU = (self.tier[-1] == FULL) | (self.tier[-1] == NOT_YET)
        slots = int((len_U * ~self._candidate_U(-1) * exact_LTU).sum())
        return slots * self.shape[1] // exact_LTU.shape[1]

    def _candidate_U(self, event: int) -> Tensor:
        return self.layout.candidate_KU(torch.tensor([self.seq_len[event]]), self.num_units)[0]

    def expect(self, num: int, decoded: bool) -> None:
        """The next `num` tokens are read with the tiers of the last event."""
        new = slice(self.read, self.read + num)
        self.interval_S[new], self.decoded_S[new] = len(self.tier) - 1, decoded
        self.read += num

    def take(self, seen: Seen) -> None:
        """Fold FullKV's attention in one layer."""
        layer, step_P = self.layers[seen.layer_idx], seen.position_P.cpu() - self.prompt_len
        if step_P[0] < 0:
            self.prefill_LHU[layer] += seen.mass_HPU.sum(1).cpu()
            return
        interval_P = self.interval_S[step_P]
        for k in interval_P.unique().tolist():
            mass_HPU, step = seen.mass_HPU[:, interval_P == k], step_P[interval_P == k]
            (self.coded if seen.coded else self.mass)[k][layer] += mass_HPU.sum(1).cpu()
            if seen.coded:
                continue
            device, sink_U = mass_HPU.device, self.layout.sink_U(self.num_units)
            tier_TU, candidate_U = self.tier[k][layer].to(device), self._candidate_U(k).to(device)
            share_P5 = shares(mass_HPU, kinds(tier_TU, candidate_U, sink_U.to(device)))
            missed_PH = hindsight_missed(mass_HPU.transpose(0, 1), tier_TU[None], candidate_U, self.layout)
            self.shares_S5[step] += share_P5.cpu() / len(self.layers)
            self.oracle_S[step] += missed_PH.mean(1).cpu() / len(self.layers)

    def compare(
        self, method_NV: Tensor, full_NV: Tensor, outputs: Mapping[int, Outputs], full: Mapping[int, Outputs]
    ) -> None:
        """Both sides' logits after the last N of the tokens read, and per layer attention outputs of the last ones."""
        last = slice(self.read - len(full_NV), self.read)
        self.kl_S[last] = _kl(full_NV, method_NV).float().cpu()
        self.same_S[last] = (full_NV.argmax(-1) == method_NV.argmax(-1)).float().cpu()
        for index, pieces in outputs.items():
            out, exact = (torch.cat(list(each), dim=1).float() for each in (pieces, full[index]))
            off = (out - exact).norm(dim=(0, 2)) / exact.norm(dim=(0, 2))
            self.error_SL[self.read - len(off) : self.read, self.layers[index]] = off.cpu()

    def record(self, name: str, policy: KVPolicy, fraction: float) -> Record:
        """What was gathered; `policy` is the fitted method, `fraction` its mean bytes."""
        tier_KLTU, seq_len_K = torch.stack(self.tier), torch.tensor(self.seq_len)
        steps_K = torch.bincount(self.interval_S, minlength=len(self.tier))
        score = torch.stack([*self.gained, torch.full_like(self.score_LTU, nan)])
        has_scores = "score" in policy.columns
        return Record(
            name=name,
            policy=policy,
            history=History(self.layout, seq_len_K, steps_K, tier_KLTU, torch.stack(self.mass)),
            prefill_LHU=self.prefill_LHU,
            shares_S5=self.shares_S5,
            oracle_missed_S=self.oracle_S,
            kl_S=self.kl_S,
            same_S=self.same_S,
            output_error_SL=self.error_SL,
            decoded_S=self.decoded_S,
            score_KLTU=score if has_scores else None,
            score_first_LTU=self.score_first_LTU if has_scores else None,
            score_last_LTU=self.score_LTU if has_scores else None,
            coded_KLHU=torch.stack(self.coded).masked_fill(tier_KLTU <= FULL, nan) if self.coded else None,
            sizes=tuple(self.sizes),
            fraction=fraction,
        )


def _kl(full_NV: Tensor, method_NV: Tensor) -> Tensor:
    """KL(p_full || p_method) [N], fp64, in nats."""
    p_NV, q_NV = (logits.double().log_softmax(dim=-1) for logits in (full_NV, method_NV))
    return torch.where(p_NV > -torch.inf, p_NV.exp() * (p_NV - q_NV), 0.0).sum(-1).clamp(min=0)
