"""Memory arithmetic: what FullKV costs, what a budget allows, what a cache used. All figures are bytes.

FullKV bytes count the keys and values of the compressible (full-attention) layers at the model's dtype; sliding-window
layers keep their window uncompressed and are billed apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

BASES = ("sequence", "prompt", "total")
ENFORCE = ("always", "prefill")
SMALL_BUDGET = ("clamp", "refuse")


class BudgetExceeded(RuntimeError):
    """A step ended with more bytes than its budget allows; the message names method, step, components and limit."""


class Infeasible(RuntimeError):
    """No setting of the method fits the budget; the message names the nearest fraction that would."""


@dataclass(frozen=True)
class Geometry:
    """Shape of the compressible part of a model's KV cache, and of the sliding part beside it.

    `itemsize` is bytes per element (2 for bfloat16), `head_dim` elements, `sliding_window` tokens.
    """

    num_layers: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    itemsize: int
    sliding_layers: int = 0
    sliding_window: int = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of one full-precision slot: key and value of one token in one KV head of one layer."""
        return 2 * self.head_dim * self.itemsize

    def full_bytes(self, num_tokens: int) -> int:
        """FullKV bytes of `num_tokens` tokens over all compressible layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.slot_bytes * num_tokens

    def sliding_bytes(self, num_tokens: int) -> int:
        """Bytes the sliding-window layers hold after `num_tokens` tokens."""
        kept = min(num_tokens, self.sliding_window)
        return self.sliding_layers * self.num_kv_heads * self.slot_bytes * kept


@dataclass(frozen=True)
class Budget:
    """How many bytes a method may hold.

    spec: a fraction of FullKV bytes ("0.2"), slots per KV head ("1024t"), or "native" (the method's published setting,
    unbounded). basis: the tokens FullKV is counted over - `sequence` seen so far, `prompt` the first prefill, `total`
    prompt + max_new_tokens. enforce: `always` also bounds decoding, `prefill` only the prompt, as published.
    small_budget: `clamp` shrinks the protected tokens to half the allowance, `refuse` raises Infeasible.
    Raises ValueError naming the value and the remedy.
    """

    spec: str
    basis: str = "sequence"
    enforce: str = "always"
    small_budget: str = "clamp"

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", str(self.spec).strip())
        for name, options in (("basis", BASES), ("enforce", ENFORCE), ("small_budget", SMALL_BUDGET)):
            if getattr(self, name) not in options:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(options)}")
        remedy = "give a fraction in (0, 1] such as 0.2, tokens per KV head such as 1024t, or native"
        if self.native:
            return
        try:
            if len(self.spec) > 20 or "e" in self.spec.lower() or not self.spec.isascii():  # no astronomic exponents
                raise ValueError
            if self.spec.endswith("t"):
                if not 1 <= int(self.spec[:-1]) <= 10**9:
                    raise ValueError
            elif not 0 < Fraction(self.spec) <= 1:
                raise ValueError
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"budget={self.spec} is not a budget; {remedy}") from None

    @property
    def native(self) -> bool:
        return self.spec == "native"

    @property
    def everything(self) -> bool:
        """True at fraction 1, which bounds payload only: nothing has to move. Not of the prompt, which is outgrown."""
        fraction = not self.native and not self.spec.endswith("t")
        return fraction and self.basis != "prompt" and Fraction(self.spec) == 1

    def allowed_bytes(self, geometry: Geometry, prompt_len: int, seq_len: int, max_new: int) -> int | None:
        """Bytes allowed over all compressible layers of one row, or None if unbounded (native)."""
        if self.native:
            return None
        if self.spec.endswith("t"):
            return geometry.full_bytes(int(self.spec[:-1]))
        tokens = {"sequence": seq_len, "prompt": prompt_len, "total": prompt_len + max_new}[self.basis]
        return int(Fraction(self.spec) * geometry.full_bytes(tokens))


@dataclass(frozen=True)
class Usage:
    """Bytes one row of a cache holds, by component.

    `counted` maps payload.<tier>, params.<tier>, table (positions, tiers, score columns), ledger (codes of windows
    that are not quantized now), reference (per-prompt parameters) and slack (room for tokens until the next event).
    `host` is exact copies in host memory, `workspace` dequantized working copies, `sliding` the windows of sliding
    layers.
    """

    counted: Mapping[str, int] = field(default_factory=dict)
    host: int = 0
    workspace: int = 0
    sliding: int = 0

    @property
    def total(self) -> int:
        """Bytes that the budget bounds below fraction 1."""
        return sum(self.counted.values())

    @property
    def payload(self) -> int:
        """Bytes that the budget bounds at fraction 1: live keys and values without metadata."""
        return sum(size for name, size in self.counted.items() if name.startswith("payload."))

    def filled(self, size: int) -> Usage:
        """The same memory after `size` bytes of its free room became full-precision slots."""
        if not size:
            return self
        moved = {"payload.full": self.counted["payload.full"] + size, "slack": self.counted["slack"] - size}
        return replace(self, counted={**self.counted, **moved})

    def __add__(self, other: Usage) -> Usage:
        names = list(self.counted) + [name for name in other.counted if name not in self.counted]
        counted = {name: self.counted.get(name, 0) + other.counted.get(name, 0) for name in names}
        return Usage(counted, self.host + other.host, self.workspace + other.workspace, self.sliding + other.sliding)
