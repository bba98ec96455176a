"""Admission gates: what a method must pass before it enters a table, measured on the model at hand.

    found = list(outcomes(loaded, policy, affordable(loaded, policy, budget)))
    print(badge(found))

One watched run (a prompt, decoded tokens, an appended question, decoded tokens, all teacher-forced) goes step by step
beside a dense one; further runs repeat it at fraction 1, in chunks, in a batch and after another prompt. Prompts are
random tokens: what the model says does not matter here.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from qevict_bench.budget import Budget, BudgetExceeded, Infeasible
from qevict_bench.models import LoadedModel
from qevict_bench.policy import Allowance, Cadence, KVPolicy, LayerView, Placement
from qevict_bench.selection import keep_all
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.witness import Witness

PROMPT, SHORTER, QUESTION = 320, 37, 13  # tokens; a second prompt is SHORTER tokens shorter
DECODED = (10, 9)  # tokens before and after the question
CHUNK, OTHER_CHUNK = 128, 61  # a prompt takes several, so that eviction between them would show
NEW = sum(DECODED) + QUESTION
EVERYTHING = Budget("1.0")
LADDER = (
    "0.25",
    "0.3",
    "0.4",
    "0.5",
    "0.6",
    "0.7",
    "0.8",
    "0.9",
)  # budgets to try where the one asked for is too small

PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "n/a"
LOGIT_GAP = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.6}
"""Largest accepted difference of logits, in standard deviations of FullKV's logits: rounding of the model's dtype."""
CODED_GAP = 0.05
"""The same where a low-bit tier is filled by two computations: a code may lie at the edge of rounding."""
MASS_GAP = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}
SAME_UNITS = {"float32": 0.99, "float16": 0.9, "bfloat16": 0.9}
"""Share of kept units that must agree in chunks and batches, whose rounding differs: scores may all but tie."""
RESTORED = 0.9
"""Largest accepted `DenseRun.restored_error`: 2-bit codes stay below 0.7, and units of other positions give 1."""
BYTE_ERROR = 0.01


class Outcome(NamedTuple):
    """What one gate found: `status` pass, fail or n/a; `measured` (nan where nothing was) and a sentence about it."""

    gate: str
    status: str
    measured: float
    said: str


Finding = tuple[str, float, str]
Units = set[tuple[int, int, int, int]]


def badge(found: Sequence[Outcome]) -> str:
    """For tables: passed / applicable, with the names of failed gates: `12/12` or `10/12 fails budget, chunks`."""
    failed = [outcome.gate for outcome in found if outcome.status == FAIL]
    applicable = sum(outcome.status != NOT_APPLICABLE for outcome in found)
    count = f"{applicable - len(failed)}/{applicable}"
    return f"{count} fails {', '.join(failed)}" if failed else count


def outcomes(loaded: LoadedModel, policy: KVPolicy, budget: Budget) -> Iterator[Outcome]:
    """Every gate of GATES in turn. Raises Infeasible or ValueError if the method cannot run under the budget at all."""
    runs = Runs(loaded, policy, budget)
    for name, gate in GATES.items():
        try:
            status, measured, said = gate(runs)
        except BudgetExceeded as error:
            status, measured, said = FAIL if gate is budget_holds else NOT_APPLICABLE, math.nan, str(error)
        except Exception as error:  # what is broken may raise anything: it has failed this gate, and the others go on
            status, measured, said = FAIL, math.nan, f"{type(error).__name__}: {error}"
        yield Outcome(name, status, measured, said)


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


# ---- runs ----


@dataclass(frozen=True)
class _Everything(KVPolicy):
    """FullKV."""

    @property
    def cadence(self) -> Cadence:
        return Cadence()

    def place(self, views: Sequence[LayerView], allowance: Allowance) -> list[Placement]:
        return [keep_all(view) for view in views]


class Run(NamedTuple):
    """Logits [B, steps, V] and, per row, what is kept at the end as (layer, table head, position, tier)."""

    logits: Tensor
    units: list[Units]
    session: KVSession


class Runs:
    """The runs that gates share, each made when it is first asked for."""

    def __init__(self, loaded: LoadedModel, policy: KVPolicy, budget: Budget) -> None:
        self.loaded, self.policy, self.budget = loaded, policy.prepare(loaded.name, loaded.fingerprint), budget
        rng, vocabulary = torch.Generator().manual_seed(0), loaded.model.config.vocab_size
        first, second, self.tokens = torch.randint(vocabulary, (3, PROMPT), generator=rng).tolist()
        fitted = [self.policy.fit(budget, geometry_of(loaded), length, NEW) for length in (PROMPT, PROMPT - SHORTER)]
        self.fitted, alike = fitted[0], fitted[0] == fitted[1]  # a batch shares one fitted policy
        self.prompt, self.other = first, second[: PROMPT - SHORTER if alike else PROMPT]

    def plain(self, *prompts: list[int], chunk: int = CHUNK) -> Run:
        return self._drive(self._open(self.fitted, self.budget, *prompts), prompts, chunk)

    def watched(self, budget: Budget) -> tuple[Run, Witness]:
        session = self._open(self.policy.fit(budget, geometry_of(self.loaded), PROMPT, NEW), budget, self.prompt)
        witness = Witness(session, PROMPT + NEW)
        return self._drive(session, [self.prompt], after=witness.after), witness

    @cached_property
    def full(self) -> Run:
        return self._drive(self._open(_Everything(), EVERYTHING, self.prompt), [self.prompt])

    @cached_property
    def everything(self) -> Run:
        """The method at fraction 1."""
        fitted = self.policy.fit(EVERYTHING, geometry_of(self.loaded), PROMPT, NEW)
        return self._drive(self._open(fitted, EVERYTHING, self.prompt), [self.prompt])

    @cached_property
    def alone(self) -> Run:
        return self.plain(self.prompt)

    @property
    def observed(self) -> tuple[Run, Witness]:
        if isinstance(self._observed, Exception):
            raise self._observed
        return self._observed

    @cached_property
    def _observed(self) -> tuple[Run, Witness] | Exception:
        """The watched run, or what stopped it: not tried again for every gate."""
        try:
            return self.watched(self.budget)
        except Exception as error:  # raised again by `observed`, and recorded there
            return error

    def _open(self, policy: KVPolicy, budget: Budget, *prompts: list[int]) -> KVSession:
        names = ["prompt" if prompt is self.prompt else "other" for prompt in prompts]
        return KVSession(self.loaded, policy, budget, len(prompts), max_new=NEW, seeds=names)

    @torch.inference_mode()
    def _drive(
        self,
        session: KVSession,
        prompts: Sequence[list[int]],
        chunk: int = CHUNK,
        after: Callable[[Sequence[int], Tensor], None] = lambda ids, logits_V: None,
    ) -> Run:
        """Prefill, decode, append, decode; `after` sees every step's tokens and logits of row 0."""
        logits = [session.prefill(prompts, chunk)]
        after(prompts[0], logits[0][0].float())
        tokens = iter(self.tokens)
        for size in (*[1] * DECODED[0], QUESTION, *[1] * DECODED[1]):
            ids = [next(tokens) for _ in range(size)]
            rows = [ids] * len(prompts)
            logits.append(session.decode(ids * len(prompts)) if size == 1 else session.append(rows, chunk))
            after(ids, logits[-1][0].float())
        kept = [_units(session, row) for row in range(len(prompts))]
        return Run(torch.stack(logits, dim=1).float(), kept, session)

    @property
    def dtype(self) -> str:
        return self.loaded.dtype

    def gap(self, one: Tensor, other: Tensor) -> float:
        """Largest difference in standard deviations of FullKV's logits."""
        return float((one - other).abs().max()) / self.spread

    @cached_property
    def spread(self) -> float:
        return float(self.full.logits.std())


def _units(session: KVSession, row: int) -> Units:
    found: Units = set()
    for index, layer in session.layers.items():
        rect = layer.table.rect()
        for head, (pos, tier) in enumerate(zip(rect.pos[row].tolist(), rect.tier[row].tolist(), strict=True)):
            found |= {(index, head, p, t) for p, t in zip(pos, tier, strict=True) if p >= 0}
    return found


def _agreement(one: Units, other: Units) -> float:
    return len(one & other) / max(1, len(one | other))


def _off(gap: float) -> str:
    return f"differ by {gap:.1e} deviations" if gap else "do not differ"


def _judged(good: bool, measured: float, said: str) -> Finding:
    return PASS if good else FAIL, measured, said


# ---- gates ----


def fraction_1(runs: Runs) -> Finding:
    run = runs.everything
    if torch.equal(run.logits, runs.full.logits):
        return PASS, 0.0, "bit-equal to FullKV at every step"
    gap, trace = runs.gap(run.logits, runs.full.logits), run.session.trace[0]
    said = f"logits {_off(gap)} from FullKV's, {trace.demotions} units quantized"
    if trace.evictions or not trace.demotions:
        return FAIL, gap, f"{said}, {trace.evictions} evicted"
    _, witness = runs.watched(EVERYTHING)
    good = witness.logit_gap / runs.spread <= LOGIT_GAP[runs.dtype] and witness.dense.restored_error <= RESTORED
    return _judged(good, gap, f"{said}, and a dense run with their values {'agrees' if good else 'does not agree'}")


def masked_dense(runs: Runs) -> Finding:
    run, witness = runs.observed
    gap, limit, error = witness.logit_gap / runs.spread, LOGIT_GAP[runs.dtype], witness.dense.restored_error
    moved = f"{run.session.trace[0].evictions} evictions, {run.session.trace[0].demotions} demotions"
    said = f"logits {_off(gap)} from a dense run with the evicted masked (limit {limit:.0e}; {moved})"
    if error:
        said += f"; low-bit units lie {error:.2f} times as far from their own values as from others' (limit {RESTORED})"
    return _judged(gap <= limit and error <= RESTORED, gap, said)


def prefill_logits(runs: Runs) -> Finding:
    one, other = runs.observed[0].logits[:, 0], runs.full.logits[:, 0]
    gap = runs.gap(one, other)
    return _judged(torch.equal(one, other), gap, f"the prompt's logits {_off(gap)} from FullKV's")


def scores_aligned(runs: Runs) -> Finding:
    _, witness = runs.observed
    gap, moved, limit = witness.mass_gap, witness.spy.moved_scores, MASS_GAP[runs.dtype]
    if not runs.fitted.columns and not witness.masses_seen:
        return NOT_APPLICABLE, math.nan, "the method keeps no scores"
    said = f"attention mass differs by {gap:.1e} from the dense run's (limit {limit:.0e}), {moved} scores changed units"
    return _judged(gap <= limit and not moved, max(gap, float(moved)), said)


def stored_heads(runs: Runs) -> Finding:
    config, session = runs.loaded.model.config, runs.everything.session
    expected = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    stored = {sum(layer.read(False).count) / session.seq_len[0] for layer in session.layers.values()}
    stored.add(float(session.geometry.num_kv_heads))
    worst = max(stored, key=lambda heads: abs(heads - expected))
    said = f"{worst:g} slots are stored per token and layer, the model has {expected} KV heads"
    return _judged(stored == {float(expected)}, worst, said)


def allocated_is_accounted(runs: Runs) -> Finding:
    error = runs.observed[1].byte_error
    said = f"storages found by walking the session differ from its accounts by {100 * error:.2f} % at most (limit 1 %)"
    return _judged(error <= BYTE_ERROR, error, said)


def budget_holds(runs: Runs) -> Finding:
    used = runs.observed[1].used_fraction
    if runs.budget.native:
        return NOT_APPLICABLE, used, f"budget=native bounds nothing; at most {100 * used:.1f} % of FullKV were held"
    steps = "after the prompt" if runs.budget.enforce == "prefill" else "at every step"
    return _judged(used <= 1, used, f"{100 * used:.1f} % of the allowance were held at most, {steps}")


def old_codes(runs: Runs) -> Finding:
    _, witness = runs.observed
    old, changed = witness.old_codes, witness.changed_codes
    said = f"{changed} of {old} codes of units that stayed were changed by later events"
    if not old:
        return NOT_APPLICABLE, math.nan, "no unit kept codes over an event"
    if runs.fitted.recompresses:
        error = witness.dense.restored_error
        said = (
            f"the method recompresses: {said}, and lie {error:.2f} times as far from their own values as from others'"
        )
        return NOT_APPLICABLE, error, said
    return _judged(not changed, float(changed), said)


def determinism(runs: Runs) -> Finding:
    return _same(runs, "a second run", runs.alone, runs.plain(runs.prompt))


def state_isolation(runs: Runs) -> Finding:
    first = runs.alone
    runs.plain(runs.other)
    return _same(runs, "the run after another prompt", first, runs.plain(runs.prompt))


def _same(runs: Runs, what: str, one: Run, other: Run) -> Finding:
    gap = runs.gap(one.logits, other.logits)
    moved = len(one.units[0] ^ other.units[0])
    said = f"logits of {what} {_off(gap)}, {moved} kept units are others"
    return _judged(torch.equal(one.logits, other.logits) and not moved, gap, said)


def chunks(runs: Runs) -> Finding:
    others = [runs.plain(runs.prompt, chunk=size) for size in (OTHER_CHUNK, PROMPT)]
    return _alike(runs, f"chunks of {OTHER_CHUNK} and {PROMPT}", [(runs.alone, 0, other, 0) for other in others])


def batch_rows(runs: Runs) -> Finding:
    batch, other = runs.plain(runs.prompt, runs.other), runs.plain(runs.other)
    return _alike(runs, "rows in a batch", [(runs.alone, 0, batch, 0), (other, 0, batch, 1)])


def _alike(runs: Runs, what: str, pairs: list[tuple[Run, int, Run, int]]) -> Finding:
    """Kept units agree; where they are the same, so do the logits, within rounding."""
    agreed = min(_agreement(a.units[i], b.units[j]) for a, i, b, j in pairs)
    same = [(a.logits[i], b.logits[j]) for a, i, b, j in pairs if a.units[i] == b.units[j]]
    gap = max((runs.gap(*logits) for logits in same), default=0.0)
    limit = max(LOGIT_GAP[runs.dtype], CODED_GAP if len(runs.fitted.tiers) > 1 else 0.0)
    good = agreed >= SAME_UNITS[runs.dtype] and gap <= limit
    said = f"{what} keep {100 * agreed:.1f} % of the same units"
    return _judged(good, 1 - agreed, said + (f"; logits differ by {gap:.1e} deviations" if same else ""))


GATES: dict[str, Callable[[Runs], Finding]] = {
    "fraction 1 = FullKV": fraction_1,
    "masked dense": masked_dense,
    "prefill logits": prefill_logits,
    "scores aligned": scores_aligned,
    "stored heads": stored_heads,
    "allocated = accounted": allocated_is_accounted,
    "budget": budget_holds,
    "old codes": old_codes,
    "determinism": determinism,
    "state isolation": state_isolation,
    "chunks": chunks,
    "batch rows": batch_rows,
}
