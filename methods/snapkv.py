"""SnapKV: keep what the last prompt queries attend to (Li et al., arXiv 2404.14469).

Rule: vote_j = sum over the last `window` queries of A[i, j], mean (or max) over the query heads of a KV head, pooled
along j with an odd `kernel`; keep the best-voted prefix tokens and the window. Defaults are the authors' LongBench
setting (32, 7, max); snapkv_kvpress.yaml is kvpress' (64, 5, avg, query heads merged after pooling). Deviations: one
set per KV head - the authors' code repeats keys to query heads and stores G times as much; the budget counts bytes, not
tokens. As published it evicts once, after the prompt (`enforce=prefill`); with `enforce=always` it re-selects every
`every` decoded tokens: votes plus the attention of each decoded query (`reselect_score=accumulate`) or the prompt's
votes alone (`prompt`), the newest `window` tokens kept. https://github.com/FasterDecoding/SnapKV
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from qevict_bench.observing import VotingPolicy
from qevict_bench.policy import Allowance, LayerView, Placement
from qevict_bench.scoring import Voting
from qevict_bench.selection import keep_best


@dataclass(frozen=True)
class SnapKV(VotingPolicy):
    """`window`, `kernel`, `native_tokens` in tokens; `every` decoded tokens between re-selections.

    group_reduce merges the query heads of a KV head, before the pooling (order reduce_first) or after (pool_first).
    """

    native_tokens: int = 2048
    group_reduce: str = "mean"
    order: str = "reduce_first"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check({"group_reduce": ("mean", "max"), "order": ("reduce_first", "pool_first")}, {})

    @property
    def voting(self) -> Voting:
        return Voting(self.kernel, self.pooling, self.group_reduce, self.order)

    def choose(
        self, views: Sequence[LayerView], allowance: Allowance, newest: Sequence[Tensor], found: Sequence[Tensor]
    ) -> list[Placement]:
        return [keep_best(views[0], allowance, found[0], newest[0], self.native_in_force)]
