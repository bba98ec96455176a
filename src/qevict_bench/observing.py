"""What methods share that score a prompt by its last queries: SnapKV and its descendants.

The last `window` prompt queries fill the ledger; after the prompt the newest tokens stay and a method chooses among the
others. With `enforce=always` it chooses again every `every` decoded tokens, from the ledger plus the attention of each
decoded query (`reselect_score=accumulate`) or from the prompt's alone (`prompt`); as published it chooses once.

Shapes: B rows, H KV heads, G query heads per KV head, P probed rows, U units of one token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.policy import FITTED, Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.scoring import Voting, add_votes, observed_rows, settle_votes
from qevict_bench.selection import clamp_protected, keep_all, settled


@dataclass(frozen=True)
class Observing(KVPolicy):
    """`window` and `kernel` in tokens; `every` decoded tokens between re-selections."""

    window: int = 32
    kernel: int = 7
    reselect_score: str = "accumulate"
    every: int = 8
    recent: int = field(default=32, metadata=FITTED)  # newest tokens kept, at most `window`
    enforced: bool = field(default=True, metadata=FITTED)  # bound decoding too
    published: bool = field(default=False, metadata=FITTED)  # budget=native
    group: int = field(default=1, metadata=FITTED)  # query heads per KV head
    degenerate: str = field(default="", metadata=FITTED)  # what a small model leaves nothing to decide

    def __post_init__(self) -> None:
        self.check({"reselect_score": ("accumulate", "prompt")}, {"window": 1, "kernel": 1, "every": 1})
        if self.kernel % 2 == 0:
            raise ValueError(f"method.kernel={self.kernel} must be odd: an even kernel shifts the votes")

    @property
    def accumulates(self) -> bool:
        """Whether decoded queries count too."""
        return self.enforced and self.reselect_score == "accumulate"

    @property
    def cadence(self) -> Cadence:
        return Cadence(decode_every=self.every if self.enforced else 0, replay=self.accumulates)

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        fitted = replace(
            self,
            enforced=budget.enforce == "always" and not budget.native,
            published=budget.native,
            group=geometry.group_size,
            degenerate=self.nothing_to_decide(geometry),
        )
        reserve, entry = self.every if fitted.enforced else 0, fitted.entry_bytes
        _, recent = clamp_protected(budget, geometry, prompt_len, max_new, 0, self.window, reserve, metadata=entry)
        return replace(fitted, recent=recent)

    def nothing_to_decide(self, geometry: Geometry) -> str:
        """What makes the method equal to a simpler one on this model, in words for the row; empty if nothing does."""
        return ""

    def knobs(self) -> dict[str, Any]:
        said = {"degenerate": self.degenerate} if self.degenerate else {}
        return {"recent": self.recent, **said}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        return observed_rows(start, stop, prompt_len_B, phase, self.window, self.accumulates)

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        if self.enforced or bool((views[0].event_len_B == 0).any()):  # as published: once, after the prompt
            newest = [view.pos_BHU >= view.seq_len_B[:, None, None] - self.recent for view in views]
            found = [self.settle(view, new) for view, new in zip(views, newest, strict=True)]
            if self.published or not all(bool(settled(view, allowance).all()) for view in views):
                return self.choose(views, allowance, newest, found)
        return [keep_all(view) for view in views]

    @abstractmethod
    def settle(self, view: LayerView, newest_BHU: Tensor) -> Tensor:
        """Bring a layer's ledger up to date at an event, whether or not anything moves; the result is for `choose`."""

    @abstractmethod
    def choose(
        self, views: Sequence[LayerView], allowance: Allowance, newest: Sequence[Tensor], found: Sequence[Tensor]
    ) -> list[Placement]:
        """The tier of every unit: the newest [B, H, U] of each layer stay, `found` is what `settle` returned."""


@dataclass(frozen=True)
class VotingPolicy(Observing):
    """Observed attention, summed and pooled, is a vote; `native_tokens` per head (their mean) with budget=native."""

    pooling: str = "max"
    native_tokens: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"pooling": ("max", "avg")}, {"native_tokens": 1})

    @property
    def voting(self) -> Voting:
        return Voting(self.kernel, self.pooling)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.voting.columns(self.group)

    @property
    def native_in_force(self) -> int:
        """`native_tokens` with budget=native, else 0: bytes decide."""
        return self.native_tokens if self.published else 0

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        add_votes(self._votes(view), mass_BHGPU)

    def settle(self, view: LayerView, newest_BHU: Tensor) -> Tensor:
        """Votes [B, H, U], pooled at a row's first event."""
        return settle_votes(self._votes(view), view.event_len_B == 0, newest_BHU | ~view.alive_BHU, self.voting)

    def _votes(self, view: LayerView) -> list[Tensor]:
        return [view.columns[name] for name in self.voting.columns(self.group)]
