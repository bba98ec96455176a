"""Admission gates: what a method must pass before it enters a table, measured on the model at hand.

    found = list(outcomes(loaded, policy, affordable(loaded, policy, budget)))
    print(badge(found))

One watched run goes step by step beside a dense one; further runs repeat it at fraction 1, in chunks, in a batch, after
another prompt, forked, and with a frozen row (gate_runs.py). A gate whose premise the run did not meet, because nothing
was evicted, quantized or promoted, is `n/a` and says so with the word vacuous: it has neither passed nor failed.
What gates cannot see: memory outside the process's Python objects (holdings.py says where the walk ends), and what only
longer prompts, other budgets or other models bring about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from qevict_bench.budget import Budget, BudgetExceeded
from qevict_bench.gate_runs import (
    CHUNK,
    DECODED,
    EVERYTHING,
    OTHER_CHUNK,
    PROMPT,
    Run,
    Runs,
    Units,
    contents,
    follow_up,
    units_of,
)
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy
from qevict_bench.restored import SLACK, Restored
from qevict_bench.trace import RowTrace

PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "n/a"
LOGIT_GAP = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.6}
"""Largest accepted difference of logits, in standard deviations of FullKV's logits: rounding of the model's dtype."""
CODED_GAP = 0.05
"""The same where a low-bit tier is filled by two computations: a code may lie at the edge of rounding."""
MASS_GAP = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}
SAME_UNITS = {"float32": 0.99, "float16": 0.9, "bfloat16": 0.9}
"""Share of kept units that must agree in chunks and batches, whose rounding differs: scores may all but tie."""
LOOSE = 0.02
"""Numbers in lists and strings that a session may hold, over its bytes: counts per head and layer."""


class Outcome(NamedTuple):
    """What one gate found: `status` pass, fail or n/a; `measured` (nan where nothing was) and a sentence about it."""

    gate: str
    status: str
    measured: float
    said: str


Finding = tuple[str, float, str]


def badge(found: Sequence[Outcome]) -> str:
    """For tables: passed / applicable, with the names of failed gates: `12/12` or `10/12 fails budget, chunks`."""
    failed = [outcome.gate for outcome in found if outcome.status == FAIL]
    applicable = sum(outcome.status != NOT_APPLICABLE for outcome in found)
    count = f"{applicable - len(failed)}/{applicable}"
    return f"{count} fails {', '.join(failed)}" if failed else count


def outcomes(loaded: LoadedModel, policy: KVPolicy, budget: Budget) -> Iterator[Outcome]:
    """Every gate of GATES in turn. Raises Infeasible or ValueError if the method cannot run under the budget at all."""
    runs = Runs(loaded, policy, budget)
    for name in GATES:
        yield examine(name, runs)


def examine(name: str, runs: Runs) -> Outcome:
    """What one gate finds."""
    gate = GATES[name]
    try:
        status, measured, said = gate(runs)
    except BudgetExceeded as error:  # said once, if already the watched run ended over budget; else it is news
        excused = isinstance(runs.first, BudgetExceeded) and gate is not budget_holds
        status, measured, said = NOT_APPLICABLE if excused else FAIL, math.nan, str(error)
    except Exception as error:  # what is broken may raise anything: it has failed this gate, and the others go on
        status, measured, said = FAIL, math.nan, f"{type(error).__name__}: {error}"
    return Outcome(name, status, measured, said)


def _agreement(one: Units, other: Units) -> float:
    return len(one & other) / max(1, len(one | other))


def _off(gap: float) -> str:
    return f"differ by {gap:.1e} deviations" if gap else "do not differ"


def _judged(good: bool, measured: float, said: str) -> Finding:
    return PASS if good else FAIL, measured, said


def _vacuous(premise: str, run: Run) -> Finding:
    tokens = run.session.seq_len[0]
    return NOT_APPLICABLE, math.nan, f"vacuous: {premise} in {tokens} tokens at budget={run.session.budget.spec}"


def _moved(trace: RowTrace) -> int:
    return trace.evictions + trace.demotions + trace.promotions


def _sound(runs: Runs, restored: Restored) -> bool:
    """Low-bit tiers, and what came back from them, give what was put in."""
    return restored.coded <= 1 and max(restored.stayed, restored.promoted) <= SLACK[runs.dtype]


# ---- gates ----


def fraction_1(runs: Runs) -> Finding:
    run = runs.everything
    if torch.equal(run.logits, runs.full.logits):
        return PASS, 0.0, "bit-equal to FullKV at every step"
    gap, trace = runs.gap(run.logits, runs.full.logits), run.session.trace[0]
    said = f"logits {_off(gap)} from FullKV's, {trace.demotions} units quantized"
    if trace.evictions or not trace.demotions:
        return FAIL, gap, f"{said}, {trace.evictions} evicted"
    _, witness = runs.watched(EVERYTHING, DECODED)
    good = witness.logit_gap / runs.spread <= LOGIT_GAP[runs.dtype] and _sound(runs, witness.dense.restored)
    return _judged(good, gap, f"{said}, and a dense run with their values {'agrees' if good else 'does not agree'}")


def masked_dense(runs: Runs) -> Finding:
    run, witness = runs.observed
    gap, limit, trace = witness.logit_gap / runs.spread, LOGIT_GAP[runs.dtype], run.session.trace[0]
    moved = f"{trace.evictions} evictions, {trace.demotions} demotions"
    if gap <= limit and not _moved(trace):
        return _vacuous("nothing was evicted or quantized", run)
    said = f"logits {_off(gap)} from a dense run with the evicted masked (limit {limit:.0e}; {moved})"
    return _judged(gap <= limit, gap, said)


def low_bit_values(runs: Runs) -> Finding:
    run, witness = runs.observed
    restored, limit = witness.dense.restored, SLACK[runs.dtype]
    if len(runs.fitted.tiers) == 1:
        return NOT_APPLICABLE, math.nan, "the method has no low-bit tier"
    if not run.session.trace[0].demotions:
        return _vacuous("nothing was quantized", run)
    said = f"the worst low-bit value lies {restored.coded:.2f} times as far from its source as half a step allows"
    if restored.stayed > limit:
        said += f"; values whose codes stayed moved by {restored.stayed:.1e} of the largest (limit {limit:.0e})"
    return _judged(restored.coded <= 1 and restored.stayed <= limit, restored.coded, said)


def promotion(runs: Runs) -> Finding:
    if len(runs.fitted.tiers) == 1 or runs.fitted.restore == "none":
        return NOT_APPLICABLE, math.nan, "the method promotes nothing"
    run, witness = runs.promoting
    promoted, error, limit = run.session.trace[0].promotions, witness.dense.restored.promoted, SLACK[runs.dtype]
    if not promoted:
        return _vacuous("nothing was promoted", run)
    what = "the exact copy" if runs.fitted.restore == "host" else "what their codes gave"
    said = f"{promoted} units came back at budget={run.session.budget.spec}, at most {error:.1e} of the largest value "
    said += f"from {what} (limit {limit:.0e})"
    return _judged(error <= limit, error, said)


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


def rows_observed(runs: Runs) -> Finding:
    _, witness = runs.observed
    lost, asked = witness.lost_rows, len(witness.spy.asked)
    if not asked and not lost:
        return NOT_APPLICABLE, math.nan, "the method asks for no rows"
    said = f"{asked} rows were asked for; {lost} times a layer was not handed one, or twice, or nobody asked about it"
    return _judged(not lost, float(lost), said)


def stored_heads(runs: Runs) -> Finding:
    config, session = runs.loaded.model.config, runs.everything.session
    expected = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    stored = {sum(layer.read(False).count) / session.seq_len[0] for layer in session.layers.values()}
    stored.add(float(session.geometry.num_kv_heads))
    worst = max(stored, key=lambda heads: abs(heads - expected))
    said = f"{worst:g} slots are stored per token and layer, the model has {expected} KV heads"
    return _judged(stored == {float(expected)}, worst, said)


def allocated_is_accounted(runs: Runs) -> Finding:
    _, witness = runs.observed
    off, hidden, loose = witness.misbilled, witness.unlisted, witness.loose / witness.accounted
    error = (sum(map(abs, off.values())) + hidden) / witness.accounted
    parts = ", ".join(f"{name} {size:+d}" for name, size in off.items()) or "none"
    said = f"bytes measured beyond those billed: {parts}; in storages of no component: {hidden}"
    said += f"; Python objects grew by {100 * loose:.2f} % of all (limit {100 * LOOSE:.0f} %)"
    return _judged(not error and loose <= LOOSE, max(error, loose), said)


def budget_holds(runs: Runs) -> Finding:
    run, witness = runs.observed
    used = witness.used_fraction
    if runs.budget.native:
        return NOT_APPLICABLE, used, f"budget=native bounds nothing; at most {100 * used:.1f} % of FullKV were held"
    steps = "after the prompt" if runs.budget.enforce == "prefill" else f"at every of {len(run.ledgers)} steps"
    return _judged(used <= 1, used, f"{100 * used:.1f} % of the allowance were held at most, {steps}")


def old_codes(runs: Runs) -> Finding:
    _, witness = runs.observed
    old, changed = witness.old_codes, witness.changed_codes
    said = f"{changed} of {old} codes of units that stayed were changed by later events"
    if not old:
        return NOT_APPLICABLE, math.nan, "no unit kept codes over an event"
    if runs.fitted.recompresses:
        return NOT_APPLICABLE, math.nan, f"the method recompresses: {said}"
    return _judged(not changed, float(changed), said)


def determinism(runs: Runs) -> Finding:
    return _same("a second run", runs.alone, runs.plain(runs.prompt), runs)


def state_isolation(runs: Runs) -> Finding:
    first = runs.alone
    runs.plain(runs.other)
    return _same("the run after another prompt", first, runs.plain(runs.prompt), runs)


def _same(what: str, one: Run, other: Run, runs: Runs) -> Finding:
    """Bit-equal logits and scores at every step, and the same units in the end."""
    gap, moved = runs.gap(one.logits, other.logits), len(one.units[0] ^ other.units[0])
    steps = zip(one.ledgers, other.ledgers, strict=True)
    scores = sum(not all(map(torch.equal, mine, others)) for mine, others in steps)
    said = f"logits of {what} {_off(gap)}, {moved} kept units are others, scores differ at {scores} steps"
    good = torch.equal(one.logits, other.logits) and not moved and not scores
    return _judged(good, max(gap, float(scores)), said)


def fork(runs: Runs) -> Finding:
    """A fork, its parent and a sibling on other tokens are each what a session of its own would be."""
    steps = DECODED[0]
    session, whole = runs.open(runs.fitted, runs.budget, runs.prompt), runs.alone
    with torch.inference_mode():
        session.prefill([runs.prompt], CHUNK)
        list(follow_up(session, runs.tokens, last=steps))
        sibling, twin = session.fork(), session.fork()
        list(follow_up(sibling, runs.tokens[::-1], first=steps))
        wrong, gap = 0, 0.0
        for one in (session, twin):
            logits = torch.stack([made for _, made in follow_up(one, runs.tokens, first=steps)], dim=1).float()
            gap = max(gap, runs.gap(logits, whole.logits[:, 1 + steps :]))
            wrong += len(units_of(one, 0) ^ whole.units[0])
    said = f"logits of a fork and its parent {_off(gap)} from an undivided run's, {wrong} kept units are others"
    return _judged(not gap and not wrong, max(gap, float(wrong)), said)


def frozen_rows(runs: Runs) -> Finding:
    """Beside a row that goes on, a frozen one keeps its units and what they give.

    Its scores are left out: policies are shown frozen rows too, and may write their columns.
    """
    steps, session = DECODED[0], runs.open(runs.fitted, runs.budget, runs.prompt, runs.other)
    with torch.inference_mode():
        session.prefill([runs.prompt, runs.other], CHUNK)
        list(follow_up(session, runs.tokens, last=steps))
        session.freeze(1)
        before, moved = contents(session, 1), _moved(session.trace[0])
        list(follow_up(session, runs.tokens, first=steps))
        after = contents(session, 1)
    units, values = (
        sum(not torch.equal(one, other) for one, other in zip(*both, strict=True))
        for both in zip(before, after, strict=True)
    )
    moved = _moved(session.trace[0]) - moved
    said = f"while {moved} units moved beside it, {units} tables of a frozen row's units and {values} of its "
    said += f"{len(before[1])} heads' keys or values changed"
    if not moved and not units + values:
        return NOT_APPLICABLE, math.nan, "vacuous: nothing moved in the other row either"
    if runs.fitted.recompresses and not units:
        return NOT_APPLICABLE, float(values), f"the method recompresses, frozen rows too: {said}"
    return _judged(not units + values, float(units + values), said)


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
    "low-bit values": low_bit_values,
    "promotion": promotion,
    "prefill logits": prefill_logits,
    "scores aligned": scores_aligned,
    "rows observed": rows_observed,
    "stored heads": stored_heads,
    "allocated = accounted": allocated_is_accounted,
    "budget": budget_holds,
    "old codes": old_codes,
    "determinism": determinism,
    "state isolation": state_isolation,
    "fork": fork,
    "frozen rows": frozen_rows,
    "chunks": chunks,
    "batch rows": batch_rows,
}
