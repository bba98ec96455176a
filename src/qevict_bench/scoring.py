"""Pure functions from attention mass (and values) to scores.

Shapes: B rows, H KV heads, G query heads per KV head, P probed rows, U units, N tokens, D head dim, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_TOKENS = 4096  # tokens whose projected values are held at once


class Voting(NamedTuple):
    """How observed attention becomes one score per unit of a KV head.

    kernel, pooling (`max` | `avg`) smooth along units; group_reduce (`mean` | `max`) merges the query heads of a KV
    head, before the pooling (order `reduce_first`) or after it (`pool_first`).
    """

    kernel: int
    pooling: str
    group_reduce: str = "mean"
    order: str = "reduce_first"

    def columns(self, group: int) -> tuple[str, ...]:
        """Ledger columns: one, or one per query head where only their final sums can be merged.

        Means commute with sums and with average pooling; a maximum commutes with neither.
        """
        commutes = self.group_reduce == "mean" and (self.pooling == "avg" or self.order == "reduce_first")
        return ("vote",) if commutes else tuple(f"vote{g}" for g in range(group))


def last_rows(start: int, stop: int, prompt_len_B: Tensor, window: int) -> Tensor | None:
    """Bool [B, stop - start]: which absolute rows are among the last `window` of their prompt; None if no row is."""
    rows = torch.arange(start, stop, device=prompt_len_B.device)
    mask = (rows >= prompt_len_B[:, None] - window) & (rows < prompt_len_B[:, None])
    return mask if bool(mask.any()) else None


def all_rows(start: int, stop: int, prompt_len_B: Tensor) -> Tensor:
    """Bool [B, stop - start]: every row."""
    return torch.ones((len(prompt_len_B), stop - start), dtype=torch.bool, device=prompt_len_B.device)


def observed_rows(start: int, stop: int, prompt_len_B: Tensor, phase: str, window: int, later: bool) -> Tensor | None:
    """The prompt's last `window` rows and, with `later`, every row after the prompt; None for no row."""
    if phase == "prefill":
        return last_rows(start, stop, prompt_len_B, window)
    return all_rows(start, stop, prompt_len_B) if later else None


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


def add_votes(votes: Sequence[Tensor], mass_BHGPU: Tensor) -> None:
    """Fold probed rows into the vote columns [B, H, U], in place: their mean over the group, or one per query head."""
    if len(votes) == 1:
        votes[0].add_(reduce_group(mass_BHGPU, "mean"))
        return
    for column, vote in zip(votes, mass_BHGPU.sum(dim=3).unbind(dim=2), strict=True):
        column.add_(vote)


def settle_votes(votes: Sequence[Tensor], first_B: Tensor, beside_BHU: Tensor, voting: Voting) -> Tensor:
    """Scores [B, H, U] from the vote columns.

    In rows at their first event (`first_B`) the votes are pooled, once and in place; units `beside` the competition
    (the observation window, dead ones) neither lend to their neighbours nor keep votes.
    """
    raw_CBHU = torch.stack(list(votes))
    if bool(first_B.any()):
        cut = raw_CBHU.masked_fill(beside_BHU, 0.0)
        if voting.order == "reduce_first":
            cut = _merge(cut, voting.group_reduce)[None]
        smooth = pool(cut.flatten(0, 1), voting.kernel, voting.pooling).view_as(cut).masked_fill(beside_BHU, 0.0)
        raw_CBHU = torch.where(first_B[:, None, None], smooth, raw_CBHU)
        for column, settled in zip(votes, raw_CBHU, strict=True):
            column.copy_(settled)
    return _merge(raw_CBHU, voting.group_reduce)


def _merge(votes_CBHU: Tensor, kind: str) -> Tensor:
    return votes_CBHU.amax(dim=0) if kind == "max" else votes_CBHU.mean(dim=0)


def enter(score_BHU: Tensor, known_BHU: Tensor, new_BHU: Tensor, kind: str) -> None:
    """Set, in place, the score of units that join the candidates: `zero`, or the `mean_candidate` of the known ones."""
    start = torch.zeros_like(score_BHU[..., :1])
    if kind == "mean_candidate":
        total = (score_BHU * known_BHU).double().sum(-1, keepdim=True)  # fp64: the same however rows are padded
        start = (total / known_BHU.sum(-1, keepdim=True).clamp(min=1)).to(score_BHU.dtype)
    score_BHU.copy_(torch.where(new_BHU, start, score_BHU))


def defensive_peak(mass_BHGPU: Tensor, inside_BHPU: Tensor, kernel: int) -> Tensor:
    """Largest attention of any query head and probed row per unit [B, H, U] (DefensiveKV's aggregation).

    Every row is average-pooled over the units `inside` its prefix, then rescaled to the mass it had there.
    """
    inside = inside_BHPU[:, :, None]
    cut = mass_BHGPU * inside
    smooth = pool(cut.flatten(0, 2), kernel, "avg").view_as(cut) * inside
    scale = cut.sum(-1, keepdim=True) / smooth.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (smooth * scale).amax(dim=(2, 3))


def mean_floor(score_BHU: Tensor, candidate_BHU: Tensor) -> Tensor:
    """Scores raised to at least their head's mean over the candidates."""
    total = (score_BHU * candidate_BHU).sum(-1, keepdim=True)
    return score_BHU.maximum(total / candidate_BHU.sum(-1, keepdim=True).clamp(min=1))


def covering(mass_BHU: Tensor, candidate_BHU: Tensor, share_B: Tensor) -> Tensor:
    """How many [B, H] of a head's largest candidates lie before the one at which they hold `share_B` of its mass."""
    held = (mass_BHU * candidate_BHU).double()
    total = held.sum(-1, keepdim=True)
    reached = held.sort(dim=-1, descending=True, stable=True).values.cumsum(-1) >= share_B[:, None, None] * total
    return torch.where(total[..., 0] > 0, (~reached).sum(-1), 0)


def projected_norms(value_HND: Tensor, w_o: Tensor) -> Tensor:
    """Mean over a KV head's query heads of || v W_O ||_1 [H, N]; `w_o` is the output projection [hidden, H * G * D]."""
    heads, num, dim = value_HND.shape
    group = w_o.shape[1] // (heads * dim)
    norm_HN = torch.zeros((heads, num), device=value_HND.device)
    for head in range(heads * group):
        weight_DK = w_o[:, head * dim : (head + 1) * dim].float().T
        for begin in range(0, num, NORM_TOKENS):
            part = slice(begin, begin + NORM_TOKENS)
            projected = value_HND[head // group, part].float() @ weight_DK
            norm_HN[head // group, part] += projected.abs().sum(-1) / group
    return norm_HN


def fill_norms(
    norm_BHU: Tensor, seen_BHU: Tensor, values: Callable[[int], Tensor], w_o: Tensor, head_share: bool
) -> None:
    """Set, in place, the projected norms of seen units that have none yet (0): the newest, held by every KV head.

    With `head_share` a token's norms are divided by their sum over the KV heads.
    """
    tiny = torch.finfo(torch.float32).tiny
    for row, column in enumerate(norm_BHU):
        new_HU = seen_BHU[row] & (column == 0)
        if not bool(new_HU.any()):
            continue
        heads = len(column)
        norm_HN = projected_norms(values(row)[new_HU].unflatten(0, (heads, -1)), w_o).clamp(min=tiny)
        if head_share:
            norm_HN = norm_HN / norm_HN.sum(dim=0)
        column[new_HU] = norm_HN.flatten()
