"""QEvict: three tiers - full precision, recoverable INT2, evicted - with promotion (arXiv 2608.05326).

Rule: windows of `window` tokens collect attention mass, S_t(w) = S_{t-omega}(w) + (1/H_q) sum_h sum_tau sum_{i in w}
a_tau^h(i) (Eq. 1); every `omega` decoded tokens the best K_f stay or become full precision, the next K_q are quantized,
the rest is evicted for good (Eq. 3-6: K_f = floor((1-q) B_hist / M_f), K_q = floor(q B_hist / M_q)). A window is
quantized at its first demotion only; its codes stay in the ledger. Sink and recent tokens are always full precision.
What the paper leaves open is a field each (choices, measured effects: docs/interpretation.md), as are ablations and
hybrids. M_f, M_q count the bytes really held, parameters and table included; counts are lowered until these fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from qevict_bench import routing
from qevict_bench.budget import Budget, Geometry
from qevict_bench.codecs import Tier
from qevict_bench.policy import FITTED, FULL, FULL_TIER, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import last_rows
from qevict_bench.selection import Split, clamp_protected, keep_all, settled, unless_fits

CHOICES = {
    "prefill_scores": ("all", "observation"),
    "head_scope": ("layer", "kv_head"),
    "promotion": ("dequantize", "host", "none"),
    "aged_score": ("accumulated", "zero", "mean_candidate"),
    "decode_scores": ("every_step", "last_step", "replay"),
    "routing": ("attention", "once", "random"),
    "head_budgets": ("equal", "adaptive"),
    "score": ("sum", "worst"),
}


@dataclass(frozen=True)
class QEvict(KVPolicy):
    """Defaults are the preset `best` (configs/method/qevict.yaml); qevict_paper.yaml is the most literal reading.

    omega, window, sink, recent, observation in tokens; q share of the historical budget for INT2; key_params window |
    group:N (N windows share parameters) | static (per channel over the prompt) | window8 (8-bit, relative to the
    prompt's); fill spends bytes that INT2 cannot use on full precision; routing attention | once (nothing is scored or
    promoted after the prompt, windows only move down) | random. Without `evict` all but the best is INT2, whatever q.
    Hybrids: head_budgets, alpha of AdaKV; score worst of DefensiveKV."""

    publishes_size: ClassVar[bool] = False
    columns: ClassVar[tuple[str, ...]] = ("score",)
    omega: int = 8
    window: int = 16
    sink: int = 5
    recent: int = 32
    q: float = 0.9
    key_bits: int = 2
    value_bits: int = 2
    key_params: str = "window8"
    prefill_scores: str = "observation"
    observation: int = 32
    head_scope: str = "layer"
    promotion: str = "dequantize"
    fill: bool = True
    decode_scores: str = "replay"
    aged_score: str = "accumulated"
    decay: float = 1.0
    routing: str = "attention"
    evict: bool = True
    head_budgets: str = "equal"
    alpha: float = 0.2
    score: str = "sum"
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too

    def __post_init__(self) -> None:
        self.check(CHOICES, {"omega": 1, "window": 1, "sink": 0, "recent": 0, "observation": 1})
        if not 0 <= self.q <= 1 or not 0 < self.decay <= 1:
            raise ValueError(f"method.q={self.q} must lie in [0, 1] and method.decay={self.decay} in (0, 1]")
        routing.check_heads(self.head_budgets, self.alpha, self.head_shared)
        saves = self.q > 0 or not self.evict
        routing.check_window(self.tiers[1], self.window, saves, may_share=self.evict)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return FULL_TIER, routing.low_tier(self.key_bits, self.value_bits, self.key_params)

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
        routed = self.enforced or self.routing != "once"
        replay = self.decode_scores != "every_step" and self.routing == "attention"
        return Cadence(decode_every=self.omega if routed else 0, replay=replay)

    @property
    def restore(self) -> str:
        return self.promotion

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        reserve = self.omega + self.window - 1  # room until the next event, an unfinished window
        reserve += self.key_params in ("static", "window8")  # per-prompt parameters take one slot per KV head
        enforced = replace(self, enforced=budget.enforce == "always")
        where = (budget, geometry, prompt_len, max_new)
        if not self.evict:
            return replace(enforced, recent=routing.recent_left(enforced, *where, self.recent))
        sink, recent = clamp_protected(*where, self.sink, self.recent, reserve)
        return replace(enforced, sink=sink, recent=recent)

    def knobs(self) -> dict[str, Any]:
        return {"sink": self.sink, "recent": self.recent}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        if self.routing == "random" or (self.routing == "once" and phase != "prefill"):
            return None
        if phase == "prefill" and self.prefill_scores == "observation":
            return last_rows(start, stop, prompt_len_B, self.observation)
        num = 1 if phase == "decode" and self.decode_scores == "last_step" else stop - start
        return last_rows(start, stop, torch.full_like(prompt_len_B, stop), num)

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        routing.collect(view.columns["score"], mass_BHGPU, self.score)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        [view] = views
        score, first = view.columns["score"], not bool((view.event_len_B > 0).any())
        if self.routing == "random":
            score.copy_(routing.random_scores(view))
        candidate = view.alive_BHU & (view.pos_BHU >= self.sink) & routing.aged(view, view.seq_len_B, self.recent)
        routing.enter_aged(view, score, candidate, self.recent, self.aged_score)
        score.mul_(self.decay)
        if bool(settled(view, allowance).all()) or not (first or self.cadence.decode_every):
            return [keep_all(view)]
        eligible = candidate & view.exact_BHU if self.promotion == "none" else candidate
        if self.routing == "once" and not first:
            eligible = eligible & (view.tier_BHU == FULL)
        q, fill = (self.q, self.fill) if self.evict else (1.0, True)
        split = Split(score, candidate, eligible, view.alive_BHU & ~candidate, q, fill)
        placement = unless_fits(view, allowance, routing.divided(split, allowance, self.head_budgets, self.alpha))
        return [placement] if self.evict else routing.refuse_eviction(view, placement)
