"""Pure functions from attention mass to scores.

Shapes: B rows, H KV heads, G query heads per KV head, P probed rows, U units.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def last_rows(start: int, stop: int, prompt_len_B: Tensor, window: int) -> Tensor | None:
    """Bool [B, stop - start]: which absolute rows are among the last `window` of their prompt; None if no row is."""
    rows = torch.arange(start, stop, device=prompt_len_B.device)
    mask = (rows >= prompt_len_B[:, None] - window) & (rows < prompt_len_B[:, None])
    return mask if bool(mask.any()) else None


def pool(score_BHU: Tensor, kernel: int, kind: str) -> Tensor:
    """Smooth scores along neighbouring units (stride 1, same length).

    `avg` pads with zeros that count, `max` with -inf, as SnapKV's avg_pool1d and max_pool1d do. `kernel` must be odd.
    """
    if kernel == 1:
        return score_BHU
    if kind == "max":
        return F.max_pool1d(score_BHU, kernel, stride=1, padding=kernel // 2)
    return F.avg_pool1d(score_BHU, kernel, stride=1, padding=kernel // 2)


def reduce_group(mass_BHGPU: Tensor, kind: str) -> Tensor:
    """Sum over probed rows, then `mean` or `max` over the query heads of a group: [B, H, U]."""
    votes_BHGU = mass_BHGPU.sum(dim=3)
    return votes_BHGU.amax(dim=2) if kind == "max" else votes_BHGU.mean(dim=2)


def enter(score_BHU: Tensor, known_BHU: Tensor, new_BHU: Tensor, kind: str) -> None:
    """Set, in place, the score of units that join the candidates: `zero`, or the `mean_candidate` of the known ones."""
    start = torch.zeros_like(score_BHU[..., :1])
    if kind == "mean_candidate":
        start = (score_BHU * known_BHU).sum(-1, keepdim=True) / known_BHU.sum(-1, keepdim=True).clamp(min=1)
    score_BHU.copy_(torch.where(new_BHU, start, score_BHU))
