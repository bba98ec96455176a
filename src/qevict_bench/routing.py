"""Pure functions of methods that route windows between full precision, a low-bit tier and eviction.

Shapes: B rows, H table heads (1 if all KV heads share the units), U units.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry, Infeasible
from qevict_bench.codecs import KeyParams, PerChannel, PerToken, Tier
from qevict_bench.fitting import infeasible, needed_fraction, pays
from qevict_bench.policy import EVICTED, KVPolicy, LayerView, Placement
from qevict_bench.scoring import enter

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
