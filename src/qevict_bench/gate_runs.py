"""The runs that admission gates share: prompts, budgets and steps, each run made when it is first asked for.

Prompts are random tokens: what the model says does not matter here. A run is a prompt, decoded tokens, an appended
question and decoded tokens, all teacher-forced. The watched one goes on for LONG, past a hundred decoded tokens, so
that events happen which a few tokens do not reach: promotions, recompression, a budget that later steps break.

Shapes: B rows, H KV heads, U units, C ledger columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qevict_bench.budget import Budget, Infeasible
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy
from qevict_bench.restored import worst
from qevict_bench.selection import KeepEverything
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.witness import Witness, known_before

PROMPT, SHORTER, QUESTION = 320, 37, 13  # tokens; a second prompt is SHORTER tokens shorter
DECODED, LONG = (10, 9), (10, 105)  # tokens before and after the question; LONG in the watched run
CHUNK, OTHER_CHUNK = 128, 61  # a prompt takes several, so that eviction between them would show
NEW = sum(LONG) + QUESTION
EVERYTHING = Budget("1.0")
LADDER = ("0.25", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")
"""Budgets to try where the one asked for is too small."""
ROOMY = ("0.3", "0.5")
"""Budgets to try where too little is kept in full precision for a promotion."""

Units = set[tuple[int, int, int, int]]
After = Callable[[Sequence[int], Tensor], None]


def affordable(loaded: LoadedModel, policy: KVPolicy, budget: Budget) -> Budget:
    """`budget`, or the smallest larger fraction of LADDER that the method can run under on the gates' prompts."""
    fraction = 0.0 if budget.native or budget.spec.endswith("t") else float(budget.spec)
    larger = [replace(budget, spec=spec) for spec in LADDER if 0 < fraction < float(spec)]
    refusals = []
    for candidate in (budget, *larger):
        try:
            for length in (PROMPT - SHORTER, PROMPT):
                policy.fit(candidate, geometry_of(loaded), length, NEW)
        except Infeasible as error:
            refusals.append(error)
        else:
            return candidate
    raise refusals[0]


class Run(NamedTuple):
    """Logits [B, steps, V]; per row, what is kept at the end as (layer, table head, position, tier); after every step
    the ledger [C, B, H or 1, U] of every layer.
    """

    logits: Tensor
    units: list[Units]
    ledgers: list[list[Tensor]]
    session: KVSession


class Runs:
    def __init__(self, loaded: LoadedModel, policy: KVPolicy, budget: Budget) -> None:
        self.loaded, self.policy, self.budget = loaded, policy.prepare(loaded.name, loaded.fingerprint), budget
        rng, vocabulary = torch.Generator().manual_seed(0), loaded.model.config.vocab_size
        first, second, self.tokens = torch.randint(vocabulary, (3, PROMPT), generator=rng).tolist()
        fitted = [self.policy.fit(budget, geometry_of(loaded), length, NEW) for length in (PROMPT, PROMPT - SHORTER)]
        self.fitted, alike = fitted[0], fitted[0] == fitted[1]  # a batch shares one fitted policy
        self.prompt, self.other = first, second[: PROMPT - SHORTER if alike else PROMPT]

    # ---- whole runs ----

    def plain(self, *prompts: list[int], chunk: int = CHUNK) -> Run:
        return drive(self.open(self.fitted, self.budget, *prompts), prompts, self.tokens, chunk)

    def watched(self, budget: Budget, decoded: tuple[int, int]) -> tuple[Run, Witness]:
        before = known_before(self.policy, self.loaded.model)
        session = self.open(self.policy.fit(budget, geometry_of(self.loaded), PROMPT, NEW), budget, self.prompt)
        witness = Witness(session, PROMPT + NEW, before)
        return drive(session, [self.prompt], self.tokens, decoded=decoded, after=witness.after), witness

    @cached_property
    def full(self) -> Run:
        return drive(self.open(KeepEverything(), EVERYTHING, self.prompt), [self.prompt], self.tokens)

    @cached_property
    def everything(self) -> Run:
        """The method at fraction 1."""
        fitted = self.policy.fit(EVERYTHING, geometry_of(self.loaded), PROMPT, NEW)
        return drive(self.open(fitted, EVERYTHING, self.prompt), [self.prompt], self.tokens)

    @cached_property
    def alone(self) -> Run:
        return self.plain(self.prompt)

    @property
    def observed(self) -> tuple[Run, Witness]:
        if isinstance(self.first, Exception):
            raise self.first
        return self.first

    @cached_property
    def first(self) -> tuple[Run, Witness] | Exception:
        """The watched run, or what stopped it: not tried again for every gate."""
        try:
            return self.watched(self.budget, LONG)
        except Exception as error:  # raised again by `observed`, and recorded there
            return error

    @property
    def promoting(self) -> tuple[Run, Witness]:
        """The watched run, or one with a larger budget if nothing is promoted before that."""
        found = self.observed
        for spec in ROOMY:
            if found[0].session.trace[0].promotions or self.budget.native or self.budget.spec.endswith("t"):
                break
            if float(spec) > float(self.budget.spec):
                found = self.watched(replace(self.budget, spec=spec), LONG)
        return found

    def open(self, policy: KVPolicy, budget: Budget, *prompts: list[int]) -> KVSession:
        names = ["prompt" if prompt is self.prompt else "other" for prompt in prompts]
        return KVSession(self.loaded, policy, budget, len(prompts), max_new=NEW, seeds=names)

    # ---- comparing ----

    @property
    def dtype(self) -> str:
        return self.loaded.dtype

    def gap(self, one: Tensor, other: Tensor) -> float:
        """Largest difference in standard deviations of FullKV's logits."""
        return worst(0.0, (one - other).abs()) / self.spread

    @cached_property
    def spread(self) -> float:
        return float(self.full.logits.std())


def nothing(ids: Sequence[int], logits_V: Tensor) -> None:
    """For runs that nobody watches."""


@torch.inference_mode()
def drive(
    session: KVSession,
    prompts: Sequence[list[int]],
    tokens: Sequence[int],
    chunk: int = CHUNK,
    decoded: tuple[int, int] = DECODED,
    after: After = nothing,
) -> Run:
    """Prefill and everything that follows; `after` sees every step's tokens and logits of row 0."""
    logits = [session.prefill(prompts, chunk)]
    after(prompts[0], logits[0][0].float())
    ledgers = [_ledger(session)]
    for ids, made in follow_up(session, tokens, chunk, decoded):
        after(ids, made[0].float())
        logits.append(made)
        ledgers.append(_ledger(session))
    kept = [units_of(session, row) for row in range(len(prompts))]
    return Run(torch.stack(logits, dim=1).float(), kept, ledgers, session)


def follow_up(
    session: KVSession,
    tokens: Sequence[int],
    chunk: int = CHUNK,
    decoded: tuple[int, int] = DECODED,
    first: int = 0,
    last: int | None = None,
) -> Iterator[tuple[list[int], Tensor]]:
    """Decode, append, decode: steps first .. last - 1 of a run after its prompt, as tokens and logits [B, V]."""
    sizes = (*[1] * decoded[0], QUESTION, *[1] * decoded[1])
    rows = len(session.seq_len)
    for step in range(len(sizes))[first:last]:
        begin = sum(sizes[:step])
        ids = list(tokens[begin : begin + sizes[step]])
        yield ids, session.decode(ids * rows) if len(ids) == 1 else session.append([ids] * rows, chunk)


def _ledger(session: KVSession) -> list[Tensor]:
    return [layer.table.rect().columns.clone() for layer in session.layers.values()]


def units_of(session: KVSession, row: int) -> Units:
    found: Units = set()
    for index, layer in session.layers.items():
        rect = layer.table.rect()
        for head, (pos, tier) in enumerate(zip(rect.pos[row].tolist(), rect.tier[row].tolist(), strict=True)):
            found |= {(index, head, p, t) for p, t in zip(pos, tier, strict=True) if p >= 0}
    return found


def contents(session: KVSession, row: int) -> tuple[list[Tensor], list[Tensor]]:
    """Positions and tiers of a row's units; all keys and values that it attends to."""
    units, stored = [], []
    for layer in session.layers.values():
        rect, slots = layer.table.rect(), layer.read(keep_working_copy=False)
        live = rect.pos[row] >= 0
        units += [x[row][live] for x in (rect.pos, rect.tier, rect.coded)]
        for segment in range(row * layer.num_heads, (row + 1) * layer.num_heads):
            held = slice(slots.start[segment], slots.start[segment] + slots.count[segment])
            stored += [slots.k[held].clone(), slots.v[held].clone()]
    return units, stored
