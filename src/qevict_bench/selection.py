"""Pure functions from scores and bytes to tier maps, and the method that moves nothing.

Shapes: B rows, H table heads (1 if all KV heads share the units), U units. Lists of tensors have one entry per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry, Infeasible
from qevict_bench.policy import EVICTED, FULL, Allowance, Cadence, KVPolicy, LayerView, Placement


def rank(score_BHU: Tensor, candidate_BHU: Tensor) -> Tensor:
    """Rank of every candidate within its head, 0 = highest score, ties by position; U for all others."""
    units = score_BHU.shape[-1]
    order = torch.argsort(score_BHU.masked_fill(~candidate_BHU, -torch.inf), dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(-1, order, torch.arange(units, device=order.device).expand_as(order))
    return ranks.masked_fill(~candidate_BHU, units)


def rank_preferred(score_BHU: Tensor, candidate_BHU: Tensor, preferred_BHU: Tensor) -> Tensor:
    """As `rank`, with the preferred candidates, best first, before all others."""
    first_BHU = candidate_BHU & preferred_BHU
    others = rank(score_BHU, candidate_BHU & ~preferred_BHU) + first_BHU.sum(-1, keepdim=True)
    ranks = torch.where(first_BHU, rank(score_BHU, first_BHU), others)
    return ranks.masked_fill(~candidate_BHU, score_BHU.shape[-1])


def best_across(
    scores: Sequence[Tensor], candidates: Sequence[Tensor], preferred: Sequence[Tensor], num_B: Tensor
) -> list[Tensor]:
    """The `num_B` best candidates of a row over all heads and layers, the preferred ones before all others.

    Ties go to the earlier layer, head, position.
    """
    joined = [torch.cat([x.flatten(1) for x in parts], dim=1)[:, None] for parts in (scores, candidates, preferred)]
    kept = rank_preferred(*joined)[:, 0] < num_B[:, None]
    parts = kept.split([x[0].numel() for x in scores], dim=1)
    return [part.view_as(x) & candidate for part, x, candidate in zip(parts, scores, candidates, strict=True)]


def share_of(num: Tensor, share: float) -> Tensor:
    """floor(num * share), with the share taken as the decimal it was written as."""
    part, whole = Fraction(str(share)).as_integer_ratio()
    return num * part // whole


def blended_counts(score_BHU: Tensor, candidate_BHU: Tensor, num_B: Tensor, alpha: float) -> Tensor:
    """AdaKV's head budgets [B, H]: round((1 - alpha) c + floor(alpha num_B / H)), halves to even.

    c counts a head's units among the row's best H * floor(num_B / H); the sum may miss that number by rounding.
    """
    heads = score_BHU.shape[1]
    base_B = num_B // heads
    [best] = best_across([score_BHU], [candidate_BHU], [torch.zeros_like(candidate_BHU)], base_B * heads)
    part, whole = Fraction(str(alpha)).as_integer_ratio()
    exact_BH = best.sum(-1) * (whole - part) + share_of(base_B, alpha)[:, None] * whole
    quotient, rest = exact_BH // whole, exact_BH % whole
    return quotient + ((2 * rest > whole) | ((2 * rest == whole) & (quotient % 2 == 1)))


def safe_counts(num_B: Tensor, heads: int, alpha: float, window_B: Tensor) -> Tensor:
    """Units [B, H] of each head that kvpress' AdaKV keeps in any case, beside the window.

    The best floor(alpha n) of its n = num_B / H + window; the window is the first of them.
    """
    safe_B = share_of(num_B // heads + window_B, alpha) - window_B
    return safe_B.clamp(min=0)[:, None].expand(-1, heads)


def pyramid(base: int, num_layers: int, seq_len: int, window: int, beta: int) -> list[int]:
    """PyramidKV's prefix tokens per layer: max - layer * step with whole steps, beside a window.

    min = base // beta, max = 2 base - min; a max beyond the prefix is cut, and min rises instead. `base` everywhere if
    the sequence is shorter than 2 base, or in a single layer. Whole steps make the sum exceed base * num_layers.
    """
    if seq_len < 2 * base or num_layers == 1:
        return [base] * num_layers
    least = base // beta
    most = 2 * base - least
    if most >= seq_len - window:
        most, least = seq_len - window, 2 * base - seq_len + window
    step = (most - least) // (num_layers - 1)
    return [most - layer * step for layer in range(num_layers)]


def pyramid_inside(tokens: int, num_layers: int, seq_len: int, window: int, beta: int) -> list[int]:
    """kvpress' tokens per layer, the window inside: real steps, rounded; `tokens` everywhere if min < window."""
    least = Fraction(tokens, beta)
    most = 2 * tokens - least
    if most >= seq_len - window:
        most, least = Fraction(seq_len - window), Fraction(2 * tokens - seq_len + window)
    if not seq_len >= most >= least >= window:
        return [tokens] * num_layers
    return [round(most - layer * (most - least) / max(num_layers - 1, 1)) for layer in range(num_layers)]


def level(counts: Sequence[int], available: Sequence[int], total: int) -> list[int]:
    """Counts with the sum min(total, what is available): none above its `available`, the rest lowered or raised evenly.

    Where the difference does not divide, the earlier layers change by one more.
    """
    found = [min(max(count, 0), most) for count, most in zip(counts, available, strict=True)]
    while missing := min(total, sum(available)) - sum(found):
        open_layers = [i for i, n in enumerate(found) if (n < available[i] if missing > 0 else n > 0)]
        each = abs(missing) // len(open_layers)
        for i in open_layers if each else open_layers[: abs(missing)]:
            by = max(each, 1)
            found[i] = min(found[i] + by, available[i]) if missing > 0 else max(found[i] - by, 0)
    return found


def keep_all(view: LayerView) -> Placement:
    """Nothing moves."""
    return Placement(view.tier_BHU)


@dataclass(frozen=True)
class KeepEverything(KVPolicy):
    """FullKV, as what others are compared with."""

    @property
    def cadence(self) -> Cadence:
        return Cadence()

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        return [keep_all(view) for view in views]


def unless_fits(view: LayerView, allowance: Allowance, tier_BHU: Tensor) -> Placement:
    """`tier_BHU`, except in rows that are settled."""
    return Placement(torch.where(settled(view, allowance)[:, None, None], view.tier_BHU, tier_BHU))


def settled(view: LayerView, allowance: Allowance) -> Tensor:
    """Rows [B] in which everything alive is full precision and fits: nothing has to move."""
    return allowance.fits_B & (view.tier_BHU <= FULL).all(-1).all(-1)


def spare_units(allowance: Allowance, protected: Sequence[Tensor]) -> Tensor:
    """Full-precision units [B] that the bytes pay for beside the protected ones, over all heads and given layers."""
    base = allowance.bytes_of([Placement(torch.where(mask_BHU, FULL, EVICTED)) for mask_BHU in protected])
    return (allowance.bytes_B - base).clamp(min=0) // int(allowance.unit_bytes[FULL])


def units_beside(
    views: Sequence[LayerView], allowance: Allowance, protected: Sequence[Tensor], native_tokens: int
) -> Tensor:
    """Units [B] beside the protected ones, over all heads and given layers: what the bytes pay for.

    With budget=native (`native_tokens` above 0) as many as make that number of seen tokens per head, on average.
    """
    if not native_tokens:
        return spare_units(allowance, protected)
    num_B = torch.zeros_like(views[0].seq_len_B)
    for view, mask_BHU in zip(views, protected, strict=True):
        seen_BHU = view.alive_BHU & (view.pos_BHU < view.seq_len_B[:, None, None])
        num_B = num_B + native_tokens * mask_BHU.shape[1] - (mask_BHU & seen_BHU).sum((1, 2))
    return num_B.clamp(min=0)


def keep_best(
    view: LayerView, allowance: Allowance, score_BHU: Tensor, protected_BHU: Tensor, native_tokens: int = 0
) -> Placement:
    """Full precision for the protected units and, per head, as many of the best others as `units_beside` gives."""
    if not native_tokens and bool(settled(view, allowance).all()):
        return keep_all(view)
    heads = view.tier_BHU.shape[1]
    num_B = units_beside([view], allowance, [protected_BHU], native_tokens) // heads
    return keep_ranked(view, allowance, score_BHU, protected_BHU, num_B[:, None].expand(-1, heads), native_tokens)


def keep_ranked(
    view: LayerView,
    allowance: Allowance,
    score_BHU: Tensor,
    protected_BHU: Tensor,
    num_BH: Tensor,
    native_tokens: int = 0,
) -> Placement:
    """Full precision for the protected units and the `num_BH` best others of each head."""
    ranks = rank(score_BHU, view.alive_BHU & ~protected_BHU)
    return keep(view, allowance, protected_BHU | (ranks < num_BH[..., None]), native_tokens)


def keep(view: LayerView, allowance: Allowance, kept_BHU: Tensor, native_tokens: int = 0) -> Placement:
    """Full precision for the kept units, the rest evicted; rows in which all bytes fit stay as they are."""
    tier_BHU = torch.where(kept_BHU & view.alive_BHU, FULL, EVICTED)
    return Placement(tier_BHU) if native_tokens else unless_fits(view, allowance, tier_BHU)


def layer_tokens(budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> int:
    """Full-precision tokens per KV head that one layer's share of the budget pays for right after the prompt."""
    allowed = budget.allowed_bytes(geometry, prompt_len, prompt_len, max_new)
    if allowed is None:
        return prompt_len + max_new
    return allowed // (geometry.num_layers * geometry.num_kv_heads * geometry.slot_bytes)


def clamp_protected(
    budget: Budget,
    geometry: Geometry,
    prompt_len: int,
    max_new: int,
    sink: int,
    recent: int,
    reserve: int,
    metadata: int = 0,
) -> tuple[int, int]:
    """Sink and recent tokens after `small_budget`: together at most half of what one layer may hold.

    `reserve` counts further tokens that no setting avoids (room until the next event, an unfinished window), `metadata`
    the bytes a token of one KV head takes beside key and value (`KVPolicy.entry_bytes` with units of one token). Raises
    Infeasible, naming the nearest fraction, if nothing fits or if `small_budget=refuse` and they would have to shrink.
    """
    token_bytes = geometry.slot_bytes + metadata
    tokens = layer_tokens(budget, geometry, prompt_len, max_new) * geometry.slot_bytes // token_bytes
    half = tokens // 2
    if budget.native or budget.everything or (sink + recent <= half and sink + recent + reserve < tokens):
        return sink, recent
    fewest = 2 * max(reserve + 1, 2)
    if budget.small_budget == "refuse" or tokens < fewest:
        need = max(fewest, 2 * (sink + recent)) if budget.small_budget == "refuse" else fewest
        nearest = min(1.0, (need + 1) * token_bytes / (geometry.slot_bytes * prompt_len))
        hint = f"the nearest feasible fraction is {nearest:.3f}"
        raise Infeasible(
            f"budget={budget.spec} pays for {tokens} of {prompt_len} tokens per KV head; {need} are needed ({hint})"
        )
    sink = min(sink, half // 2)
    return sink, half - sink


class Split(NamedTuple):
    """What a two-tier division needs: scores, who competes, who may be full precision, who always is; q and fill."""

    score_BHU: Tensor
    candidate_BHU: Tensor
    eligible_BHU: Tensor
    protected_BHU: Tensor
    q: float
    fill: bool


def capacities(hist_BH: Tensor, q: float, full_bytes: float, low_bytes: float) -> tuple[Tensor, Tensor]:
    """K_full and K_low of QEvict's Eq. 3 for historical bytes `hist_BH` (whole, float64).

    q is taken as the decimal it was written as: numerator and denominator stay whole, so a quotient that is whole is
    not rounded down.
    """
    share, whole = Fraction(str(q)).as_integer_ratio()
    num_full = torch.floor(hist_BH * (whole - share) / (whole * full_bytes)).long()
    return num_full, torch.floor(hist_BH * share / (whole * low_bytes)).long()


def fit_split(split: Split, allowance: Allowance, full: int, low: int, evicted: int) -> Tensor:
    """Tier map with the best candidates at full precision, the next in the low tier, the rest evicted (QEvict Eq. 3-5).

    K_full = floor((1-q) B_hist / M_full), K_low = floor(q B_hist / M_low) per table head, with B_hist what the
    protected units leave. With `fill`, bytes that one tier cannot use go to the other. Counts are then lowered, lowest
    score first, until the exact bytes fit (ledger, partial groups).
    """
    heads = split.score_BHU.shape[1]
    base = allowance.bytes_of([Placement(torch.where(split.protected_BHU, full, evicted))])
    hist = ((allowance.bytes_B - base).clamp(min=0) // heads).double()[:, None].expand(-1, heads)
    full_bytes, low_bytes = allowance.unit_bytes[full], allowance.unit_bytes[low]
    num, most_full = split.candidate_BHU.sum(-1), split.eligible_BHU.sum(-1)
    num_full, num_low = capacities(hist, split.q, full_bytes, low_bytes)
    num_full = num_full.minimum(most_full)
    least_full = num_full
    if split.fill and split.q > 0:  # q = 0 is the two-tier method: nothing is ever quantized
        spare_full = torch.floor((hist - num * low_bytes) / (full_bytes - low_bytes)).long()
        num_full = torch.where(num <= num_full + num_low, spare_full.clamp(min=0), num_full).minimum(most_full)
        num_low = torch.floor((hist - num_full * full_bytes) / low_bytes).long().clamp(min=0)
        least_full = num_full.minimum(least_full)
    ranks_full = rank(split.score_BHU, split.eligible_BHU)
    while True:
        is_full = split.eligible_BHU & (ranks_full < num_full[..., None])
        rest = split.candidate_BHU & ~is_full
        is_low = rest & (rank(split.score_BHU, rest) < num_low[..., None])
        tier = torch.where(split.protected_BHU | is_full, full, torch.where(is_low, low, evicted))
        excess = allowance.bytes_of([Placement(tier)]) - allowance.bytes_B
        over = (excess > 0) & ((num_full + num_low).sum(-1) > 0)
        if not bool(over.any()):
            return tier
        per_head = (excess.clamp(min=0).double() / heads)[:, None]
        num_low = torch.minimum(num_low, is_low.sum(-1))
        from_full = over[:, None] & (num_full > least_full)  # extra full windows go back to the low tier first
        less_full = torch.ceil(per_head / full_bytes).long().minimum(num_full - least_full)
        from_low = over[:, None] & ~from_full & (num_low > 0)
        less_low = torch.ceil(per_head / low_bytes).long().minimum(num_low)
        last = over[:, None] & ~from_full & ~from_low & (num_full > 0)  # no low units left: one more full unit goes low
        lowered = torch.where(from_full, less_full, last.long())
        num_full = num_full - lowered
        num_low = num_low + torch.where(from_low, -less_low, lowered if split.q > 0 else 0)
        if split.fill and split.q > 0:  # a full unit that kept its codes frees more than a low one takes
            room = torch.floor((hist - num_full * full_bytes) / low_bytes).long()
            num_low = torch.where(lowered > 0, torch.maximum(num_low, room), num_low)
