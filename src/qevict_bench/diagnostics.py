"""What eviction loses and what routing does, from tiers over events and FullKV's attention: pure functions.

A unit is the run of positions that a method moves as one. Event 0 follows the prefill; the steps after event k, up to
and including the one that event k + 1 follows, are interval k, and attend to the tiers that event k left. Everything is
of one stream; means are over layers and KV heads, whose query heads were averaged before. QEvict (arXiv 2608.05326)
names these figures without defining them; the definitions here are ours.

Shapes: K events, L layers, H KV heads, T table heads (H, or 1 if all KV heads share their tiers), U units of the whole
stream, P steps, S steps of the whole stream, N numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor

from qevict_bench.policy import EVICTED, FULL

NOT_YET = -2  # tier of a unit that is not complete yet, or not begun
SHARES = ("sink", "full", "quantized", "recent", "evicted")


class Mean(NamedTuple):
    """A mean (nan of nothing), of how many values, and how many more were undefined and left out."""

    value: float
    num: int
    undefined: int


class Layout(NamedTuple):
    """Units of `unit` positions, counted from `offset`: unit 0 holds the first `offset` positions where that is not 0.

    The first `sink` positions and the `recent` newest (of those seen at an event) do not compete.
    """

    unit: int
    offset: int
    sink: int
    recent: int

    @property
    def regular(self) -> int:
        """The first unit that holds `unit` positions."""
        return int(self.offset > 0)

    def num_units(self, num_tokens: int) -> int:
        """Units of so many tokens, the last one perhaps unfinished."""
        return int(self.unit_of(torch.tensor(num_tokens - 1))) + 1

    def unit_of(self, position_N: Tensor) -> Tensor:
        """The unit of each absolute position."""
        unit_N = (position_N - self.offset).div(self.unit, rounding_mode="floor") + self.regular
        return torch.where(position_N < self.offset, 0, unit_N)

    def first_U(self, num_units: int) -> Tensor:
        """First position of each unit."""
        return (self.offset + (torch.arange(num_units) - self.regular) * self.unit).clamp(min=0)

    def end_U(self, num_units: int) -> Tensor:
        """One past the last position of each unit, once it is complete."""
        first_U = self.first_U(num_units)
        return torch.where(first_U < self.offset, self.offset, first_U + self.unit)

    def sink_U(self, num_units: int) -> Tensor:
        """Units that begin among the first `sink` positions."""
        return self.first_U(num_units) < self.sink

    def candidate_KU(self, seq_len_K: Tensor, num_units: int) -> Tensor:
        """Which units compete at events after so many tokens: all equally long, so that counts are bytes."""
        aged_KU = self.end_U(num_units) <= seq_len_K[:, None] - self.recent
        whole_U = torch.arange(num_units) >= self.regular
        return aged_KU & whole_U & ~self.sink_U(num_units)


@dataclass(frozen=True)
class History:
    """One stream. seq_len_K tokens seen at each event; steps_K steps of each interval (the last may have none).

    tier_KLTU (int8) the tier of every unit after each event: FULL, a low-bit tier from 1, EVICTED, or NOT_YET.
    mass_KLHU (fp32) FullKV's attention probability on each unit, the mean over the query heads of a KV head, summed
    over the unit's positions and the steps of interval k.
    """

    layout: Layout
    seq_len_K: Tensor
    steps_K: Tensor
    tier_KLTU: Tensor
    mass_KLHU: Tensor

    @property
    def num_units(self) -> int:
        return self.tier_KLTU.shape[-1]

    @property
    def candidate_KU(self) -> Tensor:
        return self.layout.candidate_KU(self.seq_len_K, self.num_units)

    @property
    def competing_KLTU(self) -> Tensor:
        return self.candidate_KU[:, None, None].expand(self.tier_KLTU.shape)

    @property
    def full_KLTU(self) -> Tensor:
        """Candidates at full precision."""
        return self.competing_KLTU & (self.tier_KLTU == FULL)

    @property
    def quantized_KLTU(self) -> Tensor:
        """Candidates in any low-bit tier."""
        return self.competing_KLTU & (self.tier_KLTU > FULL)

    @property
    def k_full_KLT(self) -> Tensor:
        """K_f: candidates that are held at full precision."""
        return self.full_KLTU.sum(-1)

    @property
    def k_quantized_KLT(self) -> Tensor:
        """K_q: candidates that are held in low-bit tiers."""
        return self.quantized_KLTU.sum(-1)

    @property
    def scoped_mass_KLTU(self) -> Tensor:
        """Mass as the table sees it: the mean over KV heads where they share their tiers (Eq. 1)."""
        shared = self.tier_KLTU.shape[2] == 1
        return self.mass_KLHU.mean(2, keepdim=True) if shared else self.mass_KLHU


class Moves(NamedTuple):
    """Units moved at each event [K], summed over layers and table heads; before event 0 everything was full."""

    promotions_K: Tensor
    demotions_K: Tensor
    evictions_K: Tensor


def moves(history: History) -> Moves:
    """Promotions, demotions and evictions per event; moves between low-bit tiers are none of these."""
    held = history.tier_KLTU.clamp(min=EVICTED)
    now = torch.where(history.tier_KLTU == NOT_YET, FULL, held)
    before = torch.cat((torch.full_like(now[:1], FULL), now[:-1]))
    found = (
        (before > FULL) & (now == FULL),
        (before == FULL) & (now > FULL),
        (before != EVICTED) & (now == EVICTED),
    )
    return Moves(*(move.flatten(1).sum(1) for move in found))


# ---- what eviction costs later ----


def fmm(history: History, quantized_lost: bool = False) -> Tensor:
    """Future missed mass [K], fp64: per step after event k, FullKV's mass on what is evicted at event k.

    The definition is FMM(t) = mean over steps s > t of F[s, t], F[s, t] = mean over layers and query heads of
    sum_{i in E_t} m_s(i). E_t changes only at events, as whole units, so at event k the sums over s and over i in E_t
    swap: FMM = (sum over evicted units of the mass of intervals k, k + 1, ...) / (number of their steps). With
    `quantized_lost` E_t + Q_t is counted: the dashed curve. nan where no step follows.
    """
    tier_KLTU = history.tier_KLTU
    lost_KLTU = (tier_KLTU == EVICTED) | (tier_KLTU > FULL) if quantized_lost else tier_KLTU == EVICTED
    found_K = torch.full((len(tier_KLTU),), nan, dtype=torch.float64)
    for k, steps, future_LHU in _future(history):
        found_K[k] = (future_LHU * lost_KLTU[k]).sum(-1).mean() / steps
    return found_K


def hindsight_fmm(history: History) -> Tensor:
    """FMM [K] of hindsight eviction at equal bytes.

    Per layer and KV head as many units are evicted as the run has evicted: of those that compete or are evicted, the
    ones with the least future mass. They are chosen anew at each event, though what is evicted cannot come back: a
    lower bound of what any evictor with these counts can reach.
    """
    found_K = torch.full((len(history.tier_KLTU),), nan, dtype=torch.float64)
    candidate_KU = history.candidate_KU
    for k, steps, future_LHU in _future(history):
        found_K[k] = hindsight_missed(future_LHU, history.tier_KLTU[k], candidate_KU[k], history.layout).mean() / steps
    return found_K


def regret(history: History) -> Tensor:
    """FMM minus that of hindsight eviction [K], never below 0.

    Hindsight's is a lower bound, so the regret is an upper bound of that against the best sequence of evictions.
    """
    return fmm(history) - hindsight_fmm(history)


def hindsight_missed(mass_LHU: Tensor, tier_LTU: Tensor, candidate_U: Tensor, layout: Layout) -> Tensor:
    """Mass missed [L, H] if each KV head had evicted the units of least mass instead, as many as it has.

    With the mass of a single step this is an oracle that sees that step's attention before it evicts.
    """
    evicted_LTU = tier_LTU == EVICTED
    whole_U = torch.arange(candidate_U.shape[-1], device=candidate_U.device) >= layout.regular
    pool_LTU = (candidate_U | evicted_LTU) & whole_U
    num_LT = (evicted_LTU & whole_U).sum(-1)
    ranked_LHU = mass_LHU.masked_fill(~pool_LTU, torch.inf).sort(dim=-1).values
    gone_LHU = torch.arange(ranked_LHU.shape[-1], device=mass_LHU.device) < num_LT[..., None]
    fixed_LH = (mass_LHU * (evicted_LTU & ~whole_U)).sum(-1)
    return fixed_LH + ranked_LHU.masked_fill(~gone_LHU, 0.0).sum(-1)


def _future(history: History) -> Iterator[tuple[int, int, Tensor]]:
    """(event, steps after it, FullKV's mass on every unit in them [L, H, U]), last event first, where steps follow."""
    future_LHU = torch.zeros(history.mass_KLHU.shape[1:], dtype=torch.float64)
    steps = 0
    for k in reversed(range(len(history.steps_K))):
        future_LHU += history.mass_KLHU[k]
        steps += int(history.steps_K[k])
        if steps:
            yield k, steps, future_LHU


# ---- where attention goes ----


def kinds(tier_TU: Tensor, candidate_U: Tensor, sink_U: Tensor) -> Tensor:
    """Index into SHARES of every unit [..., T, U]: evicted and quantized by tier, what is full by its place.

    `recent` is full precision that does not compete: newer than `recent` tokens before the event, or come after it.
    """
    place_U = torch.where(sink_U, SHARES.index("sink"), torch.where(candidate_U, 1, SHARES.index("recent")))
    low_TU = torch.where(tier_TU > FULL, SHARES.index("quantized"), place_U)
    return torch.where(tier_TU == EVICTED, SHARES.index("evicted"), low_TU)


def shares(mass_HPU: Tensor, kind_TU: Tensor) -> Tensor:
    """Share of attention per kind [P, 5] of each step, mean over KV heads; they add up to what the mass adds up to."""
    each = torch.nn.functional.one_hot(kind_TU.long(), len(SHARES)).to(mass_HPU.dtype)
    return (mass_HPU @ each).mean(0)


def without_sinks(share_S5: Tensor) -> Tensor:
    """Full, quantized, recent, evicted [..., 4] as shares of what is not on sinks. Take the mean over steps first."""
    rest = share_S5[..., 1:]
    return rest / rest.sum(-1, keepdim=True)


def needle_fate(history: History, positions: Tensor, event: int) -> dict[str, float]:
    """Shares of the given positions that are full, quantized and evicted after an event, over layers and KV heads.

    Raises ValueError for no positions.
    """
    if not positions.numel():
        raise ValueError("needle fate needs at least one position")
    tier_LTN = history.tier_KLTU[event][..., history.layout.unit_of(positions)]
    found = {"quantized": tier_LTN > FULL, "evicted": tier_LTN == EVICTED}
    part = {name: float(mask.double().mean()) for name, mask in found.items()}
    return {"full": 1 - sum(part.values()), **part}


# ---- how steady the routing is ----


def churn(history: History, with_quantized: bool = True) -> Mean:
    """Selection Churn 1 - |A and B| / |A or B| of what consecutive events hold: Full + Quantized, or Full alone.

    Over the units that competed at both events (all as long, so units or positions make no difference); mean over
    events, layers and KV heads. Undefined where both hold nothing.
    """
    held_KLTU = history.full_KLTU | history.quantized_KLTU if with_quantized else history.full_KLTU
    both_KU = history.candidate_KU[1:] & history.candidate_KU[:-1]
    before, after = held_KLTU[:-1] & both_KU[:, None, None], held_KLTU[1:] & both_KU[:, None, None]
    union = (before | after).sum(-1)
    defined = union > 0
    found = 1 - (before & after).sum(-1)[defined].double() / union[defined]
    return mean_of(found, int((~defined).sum()))


class Spells(NamedTuple):
    """Spells outside Full: how many there were, and how many ended with entry to Full."""

    entered: int
    total: int

    @property
    def share(self) -> float:
        """LIR; nan if there was no spell."""
        return self.entered / self.total if self.total else nan


def lir(full_KLTU: Tensor, candidate_KU: Tensor, span: int = 4, strict: bool = False) -> Spells:
    """Global LIR: of the spells of at least `span` consecutive events outside Full, those that end with entry to Full.

    Spells are of units that compete, from their first such event on; quantized and evicted both count as outside, and
    what is evicted stays there, so its spell is in the total. Spells that the stream's end cuts off are, too. `strict`
    counts only units that were in Full before, while they competed. Raises ValueError for a span below 1.
    """
    if span < 1:
        raise ValueError(f"span={span} must be at least 1 event")
    outside = torch.zeros(full_KLTU.shape[1:], dtype=torch.int32)
    known = torch.zeros_like(outside, dtype=torch.bool)
    entered = total = 0
    for full_LTU, candidate_U in zip(full_KLTU, candidate_KU, strict=True):
        full = full_LTU & candidate_U
        spell = (outside >= span) & (known if strict else True)
        ended = int((spell & full).sum())
        entered, total = entered + ended, total + ended
        known = known | full
        outside = torch.where(candidate_U & ~full, outside + 1, 0)
    return Spells(entered, total + int(((outside >= span) & (known if strict else True)).sum()))


def oracle_by_score(history: History, prefill_LHU: Tensor) -> Tensor:
    """Full [K, L, T, U] of an oracle: the K_f candidates with the highest Eq. 1 score on FullKV without eviction.

    `prefill_LHU` is the score that the prompt gives; K_f is what the run held, per event, layer and table head.
    """
    score = history.scoped_mass_KLTU.double().cumsum(0)
    first = prefill_LHU.mean(1, keepdim=True) if history.tier_KLTU.shape[2] == 1 else prefill_LHU
    score = torch.cat((torch.zeros_like(score[:1]), score[:-1])) + first
    return best(score, history.competing_KLTU, history.k_full_KLT)


def oracle_by_next_mass(history: History) -> Tensor:
    """Full of an oracle that knows the next interval: the K_f candidates with the most mass there.

    Shape [K, L, T, U] without the last event if no step follows it.
    """
    known = int((history.steps_K > 0).sum())
    return best(history.scoped_mass_KLTU[:known].double(), history.competing_KLTU[:known], history.k_full_KLT[:known])


def best(score: Tensor, among: Tensor, num: Tensor) -> Tensor:
    """Mask [..., U] of the `num` [...] highest scores of the units marked in `among`; ties go to the earlier unit."""
    order = score.masked_fill(~among, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(-1, order, torch.arange(order.shape[-1]).expand(order.shape))
    return among & (rank < num[..., None])


def mean_of(values: Tensor, undefined: int) -> Mean:
    """The mean of `values`, of which `undefined` more were left out."""
    return Mean(float(values.mean()) if len(values) else nan, len(values), undefined)
