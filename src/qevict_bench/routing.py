"""Pure functions of methods that route windows between full precision, a low-bit tier and eviction.

Shapes: B rows, H table heads (1 if all KV heads share the units), U units; beside H KV heads, T table heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry, Infeasible
from qevict_bench.codecs import KeyParams, PerChannel, PerToken, Tier
from qevict_bench.fitting import infeasible, needed_fraction, pays
from qevict_bench.policy import EVICTED, FULL, Allowance, KVPolicy, LayerView, Placement
from qevict_bench.scoring import enter
from qevict_bench.selection import Split, fit_split, rank, share_of

LOW = 1
KEY_PARAMS: dict[str, KeyParams] = {"window": "window", "group": "group", "static": "static", "window8": "relative8"}


def low_tier(key_bits: int, value_bits: int, key_params: str) -> Tier:
    """Keys per channel before RoPE, values per token. `key_params`: window, group:N, static or window8."""
    kind, _, size = key_params.partition(":")
    if kind not in KEY_PARAMS or (kind == "group") != size.isdigit() or len(size) > 4:
        raise ValueError(f"method.key_params={key_params!r}: choose window, group:N, static or window8")
    key = PerChannel(bits=key_bits, params=KEY_PARAMS[kind], group=int(size or 1), pre_rope=True)
    name = f"int{key_bits}" if key_bits == value_bits else f"k{key_bits}v{value_bits}"
    return Tier(name, key, PerToken(bits=value_bits))


def check_window(low: Tier, window: int, saves: bool, may_share: bool) -> None:
    """Raise ValueError if windows share parameters without `may_share`, or save no bytes although `saves`."""
    if low.key.group > 1 and not may_share:
        raise ValueError("method.evict=false cannot bound what group:N costs: use key_params=window, static or window8")
    size = window * (low.key.slot_bytes(128, 2) + low.value.slot_bytes(128, 2))
    if saves and size + low.key.group_bytes(128, 2) / low.key.group >= window * 512:
        raise ValueError(f"method.window={window} saves no bytes: use a larger window or key_params=static")


def check_heads(head_budgets: str, alpha: float, shared: bool) -> None:
    """Raise ValueError for a share `alpha` out of range, or budgets of heads that share theirs."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"method.alpha={alpha} must lie in [0, 1]")
    if head_budgets == "adaptive" and shared:
        raise ValueError("method.head_budgets=adaptive divides among heads: set method.head_scope=kv_head")


def aged(view: LayerView, seq_len_B: Tensor, recent: int) -> Tensor:
    """Units whose last position has left the `recent` newest of `seq_len_B` tokens."""
    return view.end_BHU <= (seq_len_B - recent)[:, None, None]


def enter_aged(view: LayerView, score_BHU: Tensor, candidate_BHU: Tensor, recent: int, kind: str) -> None:
    """Set, in place, what units bring into their first competition: `accumulated`, `zero` or `mean_candidate`.

    At the first event nobody is known, and everybody competes with its own score.
    """
    if kind != "accumulated" and bool((view.event_len_B > 0).any()):
        known_BHU = candidate_BHU & aged(view, view.event_len_B, recent)
        enter(score_BHU, known_BHU, candidate_BHU & ~known_BHU, kind)


def refuse_eviction(view: LayerView, placement: Placement) -> list[Placement]:
    """The placement, if it evicts nothing alive; else raises Infeasible."""
    if bool((view.alive_BHU & (placement.tier_BHU == EVICTED)).any()):
        raise Infeasible(f"{view.seq_len_B.tolist()} tokens do not fit without eviction; give a larger budget")
    return [placement]


def random_scores(view: LayerView) -> Tensor:
    """A number in [0, 1) per live unit from its row's generator, 0 elsewhere: the same whatever rows are beside it."""
    alive_BHU = view.alive_BHU
    drawn_BHU = torch.zeros(alive_BHU.shape)
    for row, alive_HU in enumerate(alive_BHU.cpu()):
        drawn_BHU[row][alive_HU] = torch.rand(int(alive_HU.sum()), generator=view.rng(row))
    return drawn_BHU.to(alive_BHU.device)


def collect(score_BTU: Tensor, mass_BHGPU: Tensor, kind: str) -> None:
    """Add the attention of P queries to the scores of T table heads, in place.

    `sum`: summed over queries, mean over the query heads of a table head (Eq. 1 of arXiv 2608.05326). `worst`: the
    largest that any query of any head gave, DefensiveKV's guard (ICLR 2026) without its floor, pooling, value norms.
    """
    mass_BTGPU = mass_BHGPU.flatten(1, 2)[:, None] if score_BTU.shape[1] == 1 else mass_BHGPU
    if kind == "worst":
        score_BTU.copy_(score_BTU.maximum(mass_BTGPU.amax(dim=(2, 3))))
    else:
        score_BTU += mass_BTGPU.sum(dim=3).mean(dim=2)


def divided(split: Split, allowance: Allowance, head_budgets: str, alpha: float) -> Tensor:
    """Tier map [B, T, U]. `equal`: every table head gets as many units. `adaptive` (AdaKV, arXiv 2407.11550): K_f and
    K_q count units of the layer, its best over all heads get them; the best floor(alpha n) of a head come first, n its
    full-precision units in an equal division.
    """
    equal = fit_split(split, allowance, FULL, LOW, EVICTED)
    if head_budgets == "equal":
        return equal
    num_BT = share_of(((equal == FULL) & split.candidate_BHU).sum(-1), alpha)
    sure_BTU = rank(split.score_BHU, split.eligible_BHU) < num_BT[..., None]
    first_BTU = split.score_BHU + sure_BTU * (1 + split.score_BHU.amax())
    parts = (first_BTU, split.candidate_BHU, split.eligible_BHU, split.protected_BHU)
    first, candidate, eligible, protected = (x.flatten(1)[:, None] for x in parts)
    joined = Split(first, candidate, eligible, protected, split.q, split.fill)
    return fit_split(joined, _Joined(allowance, equal.shape), FULL, LOW, EVICTED).view(equal.shape)


class _Joined:
    """An allowance for tier maps [B, 1, T * U] that stand for [B, T, U]."""

    def __init__(self, allowance: Allowance, shape: torch.Size) -> None:
        self.bytes_B, self.fixed_B, self.fits_B = allowance.bytes_B, allowance.fixed_B, allowance.fits_B
        self.unit_bytes, self._allowance, self._shape = allowance.unit_bytes, allowance, shape

    def bytes_of(self, placements: Sequence[Placement]) -> Tensor:
        return self._allowance.bytes_of([Placement(each.tier_BHU.view(self._shape)) for each in placements])


def all_low_bytes(policy: KVPolicy, geometry: Geometry, recent: int, seq_len: int) -> int:
    """Bytes of one layer of a row after an event at which every window but the newest is in tier 1, none evicted.

    The first `policy.offset` and the `recent` newest tokens are at full precision, and an unfinished window as long as
    can be: a question moves its end. Room until the next event, table and references are included. Windows must not
    share parameters: what a group costs depends on when its members were demoted.
    """
    unit, size = policy.unit, (geometry.head_dim, geometry.itemsize)
    codecs = (policy.tiers[1].key, policy.tiers[1].value)
    low = max(0, seq_len - policy.offset - recent - (unit - 1))
    window_bytes = sum(unit * codec.slot_bytes(*size) + codec.group_bytes(*size) for codec in codecs)
    held = geometry.slot_bytes * (seq_len - low + policy.cadence.decode_every) - (-low * window_bytes // unit)
    held += sum(codec.reference_bytes(*size) for codec in codecs)
    entries = (policy.offset > 0) - (-max(0, seq_len + policy.cadence.decode_every - policy.offset) // unit)
    return geometry.num_kv_heads * held + entries * policy.entry_bytes * (
        1 if policy.head_shared else geometry.num_kv_heads
    )


def recent_left(
    policy: KVPolicy, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int, recent: int
) -> int:
    """The most recent tokens, at most `recent`, that the bytes pay for at every event with nothing evicted.

    Raises Infeasible, naming the nearest fraction, if not even none can be paid for, or if they would have to shrink
    although `small_budget=refuse`.
    """
    where = (budget, geometry, prompt_len, max_new, max(1, policy.cadence.decode_every))
    choices = range(recent, recent - 1 if budget.small_budget == "refuse" else -1, -1)
    for fewer in choices:
        if pays(*where, partial(all_low_bytes, policy, geometry, fewer)):
            return fewer
    what = f"{policy.offset} sink and {choices[-1]} recent tokens beside {policy.tiers[1].name} codes of the rest"
    least = needed_fraction(*where, partial(all_low_bytes, policy, geometry, choices[-1]))
    raise infeasible(budget, what, prompt_len, least)
