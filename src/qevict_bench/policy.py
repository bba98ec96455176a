"""The interface between a method and the engine. No algorithm lives here.

observe is a fold, place is a decision, the store is the only thing that moves slots, the budget is bytes.

Shapes: L layers, B rows (sequences), H KV heads, G query heads per KV head, Q new queries, P probed rows, U units. A
unit is `policy.unit` consecutive positions counted from `policy.offset`; unit 0 holds the first `offset` positions
when offset > 0. Unit-level tensors have H = 1 when `policy.head_shared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Geometry
from qevict_bench.codecs import Exact, Tier

EVICTED = -1
FULL = 0
FULL_TIER = Tier("full", Exact(), Exact())
FITTED = {"fitted": True}  # metadata of fields that `fit` chooses and nobody else sets


@dataclass(frozen=True)
class Placement:
    """The tier every unit is to have: index into `policy.tiers`, or EVICTED. Integer tensor [B, H or 1, U]."""

    tier_BHU: Tensor


@dataclass(frozen=True)
class Cadence:
    """When `place` runs: after the prompt (or an appended question), and every `decode_every` decoded tokens.

    `decode_every` 0 leaves decoding alone. With `replay` the queries of an interval are buffered and scored together at
    its end instead of one by one.
    """

    prefill: bool = True
    decode_every: int = 0
    replay: bool = False


@dataclass
class LayerView:
    """All a policy sees of one layer; it may write only into `columns`.

    pos_BHU first position of each unit (-1 = dead entry); end_BHU one past its last position once complete (a unit at
    the tail may not be complete yet, or not begun); tier_BHU its tier (EVICTED for dead entries); exact_BHU still the
    model's own values; seq_len_B tokens seen; prompt_len_B tokens of the first prefill; event_len_B tokens seen at the
    last routing event. `rng(row)` is the row's seeded generator, `w_o()` the layer's output projection [hidden, H * G
    * D], `values(row)` the values [H, U, D] of a row's full-precision units (zero elsewhere), for units of one token.
    """

    layer_idx: int
    num_layers: int
    prompt_len_B: Tensor
    seq_len_B: Tensor
    event_len_B: Tensor
    pos_BHU: Tensor
    end_BHU: Tensor
    tier_BHU: Tensor
    exact_BHU: Tensor
    columns: dict[str, Tensor]
    rng: Callable[[int], torch.Generator]
    w_o: Callable[[], Tensor]
    values: Callable[[int], Tensor]

    @property
    def alive_BHU(self) -> Tensor:
        return self.pos_BHU >= 0

    @property
    def len_BHU(self) -> Tensor:
        """Tokens each unit holds now."""
        return (torch.minimum(self.end_BHU, self.seq_len_B[:, None, None]) - self.pos_BHU.clamp(min=0)).clamp(min=0)

    def rows(self, first: int, last: int) -> LayerView:
        """The view of rows first .. last - 1; columns are shared, so writes reach this view."""
        cut = slice(first, last)
        lens = (self.prompt_len_B[cut], self.seq_len_B[cut], self.event_len_B[cut])
        maps = (self.pos_BHU[cut], self.end_BHU[cut], self.tier_BHU[cut], self.exact_BHU[cut])
        columns = {name: column[cut] for name, column in self.columns.items()}
        return LayerView(
            self.layer_idx,
            self.num_layers,
            *lens,
            *maps,
            columns,
            lambda row: self.rng(first + row),
            self.w_o,
            lambda row: self.values(first + row),
        )


class Allowance(Protocol):
    """What a placement may cost, in bytes per row, summed over the views that `place` was given.

    `bytes_B` the bound, `fixed_B` what no placement avoids (slack until the next event, references), `fits_B` rows in
    which nothing has to move. `unit_bytes[t]` is one complete unit of tier t newly placed in one table entry (all KV
    heads if the table is shared), its metadata included.
    """

    bytes_B: Tensor
    fixed_B: Tensor
    fits_B: Tensor
    unit_bytes: tuple[float, ...]

    def bytes_of(self, placements: Sequence[Placement]) -> Tensor:
        """Exact bytes [B] the store would hold: payload, parameters, partial groups, ledger, table, slack."""
        ...


@dataclass(frozen=True)
class KVPolicy(ABC):
    """A method. Subclasses are frozen dataclasses that hold hyper-parameters only; state lives in the store's columns.

    Class-level declarations that depend on hyper-parameters are overridden as properties.
    """

    publishes_size: ClassVar[bool] = True
    """Whether budget=native, the setting that the authors publish, means something."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tier 0 is full precision."""
        return (FULL_TIER,)

    def layer_tiers(self, layer_idx: int) -> tuple[Tier, ...]:
        """`tiers` of one layer, for codecs with parameters of their own per layer (calibrated codebooks)."""
        return self.tiers

    @property
    def recompresses(self) -> bool:
        """Whether units that stay in a low-bit tier are decoded and encoded again at every event (ZipCache)."""
        return False

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the fp32 ledger columns kept per unit."""
        return ()

    @property
    def entry_bytes(self) -> int:
        """Bytes of one table entry: first position, tier, tier of its codes, and the columns."""
        return 4 + 1 + 1 + 4 * len(self.columns)

    @property
    def unit(self) -> int:
        return 1

    @property
    def offset(self) -> int:
        return 0

    @property
    def head_shared(self) -> bool:
        return False

    @property
    def scope(self) -> str:
        """`layer`: place decides each layer alone; `model`: all layers together."""
        return "layer"

    @property
    def cadence(self) -> Cadence:
        """After the prompt and every 8 decoded tokens, so that a budget holds while decoding too."""
        return Cadence(decode_every=8)

    @property
    def restore(self) -> str:
        """What promotion brings back: `dequantize` a reconstruction, `host` the exact copy, `none` promotes nothing."""
        return "dequantize"

    @property
    def rope(self) -> str:
        """`absolute` keeps original positions; `compact` re-indexes stored tokens 0 .. n - 1."""
        return "absolute"

    def admit(self, budget: Budget) -> None:
        """Raise ValueError for a budget that no example can make sense of."""
        if budget.native and not self.publishes_size:
            raise ValueError(f"budget=native: {self.name} publishes no size of its own; give a fraction such as 0.2")

    def prepare(self, model: str, fingerprint: str) -> Self:
        """The method with what it must know of a model beforehand (calibrated tables), read once, before `fit`.

        Raises ValueError, naming the command that makes it, if it is missing.
        """
        return self

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Self:
        """Choose knobs for one example so that its worst step fits; raises Infeasible. The result is what runs."""
        return self

    def knobs(self) -> dict[str, Any]:
        """What `fit` may have changed, for the result row."""
        return {}

    def probe(
        self, start: int, stop: int, prompt_len_B: Tensor, phase: str, rng: Callable[[int], torch.Generator]
    ) -> Tensor | None:
        """Which of the absolute rows start .. stop - 1 to observe: bool [B, Q], or None for none.

        phase is `prefill`, `append` (several tokens onto a compressed cache) or `decode`.
        """
        return None

    def observe(self, view: LayerView, mass_BHGPU: Tensor, rows_BP: Tensor) -> None:
        """Fold the attention mass (fp32, summed per unit) of the probed rows into `view.columns`."""
        raise TypeError(f"{self.name} probes attention, so it must define observe")

    def check(self, choices: Mapping[str, Sequence[str]], at_least: Mapping[str, int]) -> None:
        """Raise ValueError naming field, value and remedy unless each field holds an option, or enough tokens."""
        for field, options in choices.items():
            if getattr(self, field) not in options:
                raise ValueError(f"method.{field}={getattr(self, field)!r}: choose one of {', '.join(options)}")
        for field, least in at_least.items():
            if getattr(self, field) < least:
                raise ValueError(f"method.{field}={getattr(self, field)} must be at least {least}")

    @abstractmethod
    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        """The tier of every unit. `views` holds one layer, or all of them with scope=model."""
