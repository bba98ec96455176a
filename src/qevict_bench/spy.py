"""A policy that is watched: which rows it asks for, what it is handed, and whether its scores stay with their units.

Shapes: H KV heads, G query heads per KV head, P probed rows, U units, C ledger columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qevict_bench.policy import Allowance, KVPolicy, LayerView, Placement


class Mass(NamedTuple):
    """Attention mass as handed to a policy: layer, absolute rows [P], units [H or 1, U], mass [H, G, P, U]."""

    layer_idx: int
    rows_P: Tensor
    pos_HU: Tensor
    end_HU: Tensor
    mass_HGPU: Tensor


class Spy:
    """Stands in for the policy of a session of one row."""

    def __init__(self, policy: KVPolicy) -> None:
        self.policy = policy
        self.masses: list[Mass] = []
        self.moved_scores = 0
        self.asked_about: set[int] = set()  # absolute rows that `probe` was called for
        self.asked: set[int] = set()  # and those of them that it wants
        self.observed: dict[int, Counter[int]] = {}  # rows whose mass was handed over, per layer
        self._left: dict[int, tuple[Tensor, Tensor]] = {}  # per layer: positions [H or 1, U], columns [C, H or 1, U]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        mask_BQ = self.policy.probe(start, stop, prompt_len_B, phase, rng)
        self.asked_about.update(range(start, stop))
        if mask_BQ is not None:
            self.asked.update((start + torch.nonzero(mask_BQ[0])[:, 0]).tolist())
        return mask_BQ

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        self._enter(view)
        self.observed.setdefault(view.layer_idx, Counter()).update(rows_BP[0].tolist())
        self.masses.append(Mass(view.layer_idx, rows_BP[0], view.pos_BHU[0], view.end_BHU[0], mass_BHGPU[0]))
        self.policy.observe(view, mass_BHGPU, rows_BP)
        self._leave(view)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        for view in views:
            self._enter(view)
        placements = self.policy.place(views, allowance)
        for view in views:
            self._leave(view)
        return placements

    def lost_rows(self, layers: Sequence[int], seen: int) -> int:
        """Rows below `seen` nobody asked the policy about, and rows a layer should have been handed, or should not."""
        lost, wanted = len(self.asked_about ^ set(range(seen))), Counter(self.asked)
        for layer in layers:
            observed = self.observed.get(layer, Counter())
            lost += (wanted - observed).total() + (observed - wanted).total()
        return lost

    def _leave(self, view: LayerView) -> None:
        if view.columns:
            columns = torch.stack([column[0] for column in view.columns.values()])
            self._left[view.layer_idx] = (view.pos_BHU[0], columns)

    def _enter(self, view: LayerView) -> None:
        """Every unit must have the scores it was left with; a new one has zeros."""
        if not view.columns:
            return
        columns = torch.stack([column[0] for column in view.columns.values()])
        old_pos, old_columns = self._left.get(view.layer_idx, (view.pos_BHU[0, :, :0], columns[..., :0]))
        for head, pos_U in enumerate(view.pos_BHU[0]):
            known = old_pos[head] >= 0
            before_U, scores_CU = old_pos[head][known].contiguous(), old_columns[:, head, known]
            pos_U = pos_U[pos_U >= 0].contiguous()
            expected = columns.new_zeros((len(columns), len(pos_U)))
            if len(before_U):
                at = torch.searchsorted(before_U, pos_U).clamp(max=len(before_U) - 1)
                expected = torch.where(before_U[at] == pos_U, scores_CU[:, at], expected)
            self.moved_scores += int((columns[:, head, : len(pos_U)] != expected).sum())
