"""For methods that evict nothing: does a budget pay for their footprint, and which units get the better tier?

Shapes: B rows, H table heads (1 if all KV heads share the units), U units.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry, Infeasible
from qevict_bench.policy import Allowance, LayerView, Placement
from qevict_bench.selection import rank


def bounded_steps(budget: Budget, prompt_len: int, max_new: int, every: int) -> range:
    """Tokens seen at the routing events whose bytes the budget bounds."""
    return range(prompt_len, prompt_len + (max_new if budget.enforce == "always" else 0) + 1, every)


def needed_fraction(
    budget: Budget, geometry: Geometry, prompt_len: int, max_new: int, every: int, need: Callable[[int], int]
) -> Fraction:
    """The smallest fraction that pays at every event for the `need(seq_len)` bytes one layer then takes.

    Rounded up to three decimals, so that the figure can be named in a message and given as a budget.
    """
    most = Fraction(0)
    for seq_len in bounded_steps(budget, prompt_len, max_new, every):
        tokens = {"sequence": seq_len, "prompt": prompt_len, "total": prompt_len + max_new}[budget.basis]
        most = max(most, Fraction((need(seq_len) + 1) * geometry.num_layers, geometry.full_bytes(tokens)))
    return Fraction(math.ceil(most * 1000), 1000)


def pays(
    budget: Budget, geometry: Geometry, prompt_len: int, max_new: int, every: int, need: Callable[[int], int]
) -> bool:
    """Whether `budget` pays for `need(seq_len)` bytes per layer at every event that it bounds."""
    if budget.native or budget.everything:
        return True
    for seq_len in bounded_steps(budget, prompt_len, max_new, every):
        allowed = budget.allowed_bytes(geometry, prompt_len, seq_len, max_new) or 0
        if need(seq_len) > allowed // geometry.num_layers:
            return False
    return True


def infeasible(budget: Budget, what: str, prompt_len: int, nearest: Fraction) -> Infeasible:
    """The error that names what does not fit, and the fraction that would pay for it."""
    hint = f"the nearest feasible fraction is {float(nearest):.3f}"
    if nearest >= 1:
        hint = "no fraction below 1 does; use a longer prompt or another method"
    return Infeasible(f"budget={budget.spec} does not pay for {what} of {prompt_len} tokens: {hint}")


def lift_best(
    view: LayerView,
    allowance: Allowance,
    score_BHU: Tensor,
    lower_BHU: Tensor,
    eligible_BHU: Tensor,
    upper: int,
    unit_gain: float,
) -> Tensor:
    """Tier map [B, H, U]: `lower_BHU`, but tier `upper` for as many of the best eligible units as the bytes pay for.

    Every head lifts the same number. `unit_gain` is what lifting one unit of one table head costs, in bytes.
    """
    heads = view.tier_BHU.shape[1]
    ranks_BHU = rank(score_BHU, eligible_BHU)
    num_BH = eligible_BHU.sum(-1)
    while True:
        tier_BHU = torch.where(ranks_BHU < num_BH[..., None], upper, lower_BHU)
        excess_B = allowance.bytes_of([Placement(tier_BHU)]) - allowance.bytes_B
        over_B = (excess_B > 0) & (num_BH.sum(-1) > 0)
        if not bool(over_B.any()):
            return tier_BHU
        fewer_B = torch.ceil(excess_B.clamp(min=0).double() / (heads * unit_gain)).long().clamp(min=1)
        num_BH = torch.where(over_B[:, None], num_BH.amax(-1, keepdim=True) - fewer_B[:, None], num_BH).clamp(min=0)
        num_BH = torch.minimum(num_BH, eligible_BHU.sum(-1))
