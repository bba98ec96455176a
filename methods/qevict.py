"""QEvict: three tiers - full precision, recoverable INT2, evicted - with promotion (arXiv 2608.05326).

Rule: windows of `window` tokens collect attention mass, S_t(w) = S_{t-omega}(w) + (1/H_q) sum_h sum_tau sum_{i in w}
a_tau^h(i) (Eq. 1); every `omega` decoded tokens the best K_f stay or become full precision, the next K_q are quantized,
the rest is evicted for good (Eq. 3-6: K_f = floor((1-q) B_hist / M_f), K_q = floor(q B_hist / M_q)). A window is
quantized at its first demotion only; its codes stay in the ledger. Sink and recent tokens are always full precision.
What the paper leaves open is a field each; docs/interpretation.md gives the choices and their measured effect. M_f, M_q
count the bytes really held, parameters and table included, and counts are lowered until the exact bytes fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.codecs import KeyParams, PerChannel, PerToken, Tier
from qevict_bench.policy import EVICTED, FULL, FULL_TIER, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import enter, last_rows
from qevict_bench.selection import Split, clamp_protected, fit_split, keep_all, settled, unless_fits

CHOICES = {
    "prefill_scores": ("all", "observation"),
    "head_scope": ("layer", "kv_head"),
    "promotion": ("dequantize", "host", "none"),
    "aged_score": ("accumulated", "zero", "mean_candidate"),
    "decode_scores": ("every_step", "last_step", "replay"),
}
KEY_PARAMS: dict[str, KeyParams] = {"window": "window", "group": "group", "static": "static", "window8": "relative8"}
LOW = 1


@dataclass(frozen=True)
class QEvict(KVPolicy):
    """Defaults are the preset `best` (configs/method/qevict.yaml); qevict_paper.yaml is the most literal reading.

    omega, window, sink, recent, observation in tokens; q share of the historical budget for INT2; key_params window |
    group:N (N windows share parameters) | static (per channel over the prompt) | window8 (8-bit parameters relative to
    the prompt's); fill spends bytes that the quantized tier cannot use on full precision.
    """

    omega: int = 8
    window: int = 8
    sink: int = 5
    recent: int = 32
    q: float = 0.7
    key_bits: int = 2
    value_bits: int = 2
    key_params: str = "window"
    prefill_scores: str = "observation"
    observation: int = 32
    head_scope: str = "layer"
    promotion: str = "dequantize"
    fill: bool = True
    decode_scores: str = "replay"
    aged_score: str = "accumulated"
    decay: float = 1.0

    def __post_init__(self) -> None:
        self.check(CHOICES, {"omega": 1, "window": 1, "sink": 0, "recent": 0, "observation": 1})
        if not 0 <= self.q <= 1 or not 0 < self.decay <= 1:
            raise ValueError(f"method.q={self.q} must lie in [0, 1] and method.decay={self.decay} in (0, 1]")
        low = self.tiers[LOW]  # bad bits or key_params are said here, not in the middle of a run
        size = self.window * (low.key.slot_bytes(128, 2) + low.value.slot_bytes(128, 2))
        if self.q > 0 and size + low.key.group_bytes(128, 2) / low.key.group >= self.window * 512:
            raise ValueError(f"method.window={self.window} saves no bytes: use a larger window or key_params=static")

    @property
    def tiers(self) -> tuple[Tier, ...]:
        kind, _, size = self.key_params.partition(":")
        if kind not in KEY_PARAMS or (kind == "group") != size.isdigit() or len(size) > 4:
            raise ValueError(f"method.key_params={self.key_params!r}: choose window, group:N, static or window8")
        key = PerChannel(bits=self.key_bits, params=KEY_PARAMS[kind], group=int(size or 1), pre_rope=True)
        name = f"int{self.key_bits}" if self.key_bits == self.value_bits else f"k{self.key_bits}v{self.value_bits}"
        return FULL_TIER, Tier(name, key, PerToken(bits=self.value_bits))

    @property
    def columns(self) -> tuple[str, ...]:
        return ("score",)

    @property
    def unit(self) -> int:
        return self.window

    @property
    def offset(self) -> int:
        return self.sink

    @property
    def head_shared(self) -> bool:
        return self.head_scope == "layer"

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.omega, replay=self.decode_scores != "every_step")

    @property
    def restore(self) -> str:
        return self.promotion

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        if budget.native:
            raise ValueError("budget=native: qevict publishes no footprint of its own; give a fraction such as 0.2")
        reserve = self.omega + self.window - 1  # room until the next event, an unfinished window
        reserve += self.key_params in ("static", "window8")  # per-prompt parameters take one slot per KV head
        sink, recent = clamp_protected(budget, geometry, prompt_len, max_new, self.sink, self.recent, reserve)
        return replace(self, sink=sink, recent=recent)

    def knobs(self) -> dict[str, Any]:
        return {"sink": self.sink, "recent": self.recent}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        if phase == "prefill" and self.prefill_scores == "observation":
            return last_rows(start, stop, prompt_len_B, self.observation)
        rows = torch.arange(start, stop, device=prompt_len_B.device).expand(len(prompt_len_B), -1)
        if phase == "decode" and self.decode_scores == "last_step":
            return rows == stop - 1
        return torch.ones_like(rows, dtype=torch.bool)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        heads = (1, 2) if self.head_shared else (2,)
        added = mass_BHGPU.sum(dim=3).mean(dim=heads, keepdim=self.head_shared)
        view.columns["score"] += added.flatten(1, 2) if self.head_shared else added

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        score = view.columns["score"]
        candidate = view.alive_BHU & (view.pos_BHU >= self.sink) & self._aged(view, view.seq_len_B)
        if self.aged_score != "accumulated" and bool((view.event_len_B > 0).any()):
            known = candidate & self._aged(view, view.event_len_B)
            enter(score, known, candidate & ~known, self.aged_score)
        if self.decay != 1.0:
            score.mul_(self.decay)
        if bool(settled(view, allowance).all()):
            return [keep_all(view)]
        protected = view.alive_BHU & ~candidate
        eligible = candidate & view.exact_BHU if self.promotion == "none" else candidate
        split = Split(score, candidate, eligible, protected, self.q, self.fill)
        return [unless_fits(view, allowance, fit_split(split, allowance, FULL, LOW, EVICTED))]

    def _aged(self, view: LayerView, seq_len_B: Tensor) -> Tensor:
        """Windows whose last position has left the `recent` newest tokens."""
        return view.end_BHU <= (seq_len_B - self.recent)[:, None, None]
