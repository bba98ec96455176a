"""QEvict's hybrids: windows ranked over all heads of a layer, worst-case scores against eager attention."""

from __future__ import annotations

import naive
import pytest
import torch
from presets import qevict
from tiny_models import attentions, engine, random_ids

from methods.qevict import QEvict
from qevict_bench.budget import Budget
from qevict_bench.policy import EVICTED, FULL, LayerView
from qevict_bench.session import KVSession, geometry_of

HEADS, GROUP, LOW = 3, 2, 1


def after(policy: QEvict, spec: str, prompt_len: int, seed: int) -> KVSession:
    """A session that has read a prompt of random tokens."""
    budget = Budget(spec)
    fitted = policy.fit(budget, geometry_of(engine()), prompt_len, 16)
    session = KVSession(engine(), fitted, budget, 1, max_new=16)
    session.prefill([random_ids(prompt_len, seed)])
    return session


def candidates(view: LayerView, policy: QEvict) -> torch.Tensor:
    return (view.pos_BHU >= policy.sink) & (view.end_BHU <= view.seq_len_B[:, None, None] - policy.recent)


def counts(session: KVSession, tier: int) -> torch.Tensor:
    """Windows that compete and are in `tier`, [layers, heads]."""
    views = [layer.view() for layer in session.layers.values()]
    return torch.stack([((v.tier_BHU == tier) & candidates(v, session.policy)).sum(-1)[0] for v in views])  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["0.25", "0.3"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_layers_best_windows_stay_whichever_head_they_are_of(spec: str, seed: int) -> None:
    """Without a safe share, no window of any head outranks one of a higher tier; evicted scores are those of a run that
    evicts nothing."""
    session = after(qevict(head_scope="kv_head", head_budgets="adaptive", alpha=0.0), spec, 400, seed)
    whole = after(qevict(head_scope="kv_head", head_budgets="adaptive", alpha=0.0), "1.0", 400, seed)
    for index, layer in session.layers.items():
        view, all_of_it = layer.view(), whole.layers[index].view()
        score = dict(enumerate(all_of_it.columns["score"][0].tolist()))
        tiers = {
            (head, pos): tier
            for head in range(HEADS)
            for pos, tier in zip(view.pos_BHU[0, head].tolist(), view.tier_BHU[0, head].tolist(), strict=True)
            if pos >= 0
        }
        ranked: dict[int, list[float]] = {FULL: [], LOW: [], EVICTED: []}
        known = candidates(all_of_it, session.policy)[0]  # type: ignore[arg-type]
        for head in range(HEADS):
            for unit, pos in enumerate(all_of_it.pos_BHU[0, head].tolist()):
                if known[head, unit]:
                    ranked[tiers.get((head, pos), EVICTED)].append(score[head][unit])
        assert min(map(len, ranked.values())) > 0
        assert min(ranked[FULL]) >= max(ranked[LOW])
        assert min(ranked[LOW]) >= max(ranked[EVICTED])


def test_heads_differ_but_for_their_safe_share() -> None:
    """At least floor(alpha n) full windows per head, n as in an equal division; what it rounds off goes to the best."""
    equal = after(qevict(head_scope="kv_head"), "0.2", 600, 3)
    num, spread = counts(equal, FULL), []
    assert len(num.unique()) == 1
    for alpha in (0.0, 0.5, 1.0):
        session = after(qevict(head_scope="kv_head", head_budgets="adaptive", alpha=alpha), "0.2", 600, 3)
        found = counts(session, FULL)
        assert bool((found >= (alpha * num).floor()).all())
        assert bool((found.sum(1) - num.sum(1) < HEADS).all())
        spread.append(int((found - num).abs().max()))
        allowed = session.budget.allowed_bytes(session.geometry, 600, 600, 16)
        assert allowed is not None
        assert 0.97 * allowed < session.usage(0).total <= allowed
    assert spread[0] > 1 >= spread[2]


@pytest.mark.parametrize("head_scope", ["layer", "kv_head"])
def test_the_worst_case_is_the_largest_mass_of_any_query_and_head(head_scope: str) -> None:
    prompt_len, decoded, window, sink, observation = 61, 8, 8, 5, 20
    policy = qevict(score="worst", head_scope=head_scope, observation=observation)
    session = after(policy, "1.0", prompt_len, 3)
    ids = random_ids(prompt_len + decoded, 3)
    for token in ids[prompt_len:]:
        session.decode([token])
    queries = range(prompt_len - observation, prompt_len + decoded)
    for index, heads in enumerate(attentions(len(ids), 3)):
        groups = [heads] if head_scope == "layer" else [heads[GROUP * h : GROUP * h + GROUP] for h in range(HEADS)]
        view = session.layers[index].view()
        for table_head, group in enumerate(groups):
            expected: dict[int, float] = {}
            for query in queries:
                for head in group:
                    for w, mass in naive.window_scores([head], [query], window, sink).items():
                        expected[w] = max(expected.get(w, 0.0), mass)
            stored = zip(view.pos_BHU[0, table_head].tolist(), view.columns["score"][0, table_head], strict=True)
            found = {pos: float(score) for pos, score in stored if pos < len(ids)}
            assert found == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_budgets": "adaptive"}, "set method.head_scope=kv_head"),
        ({"head_budgets": "some"}, "choose one of equal, adaptive"),
        ({"score": "mean"}, "choose one of sum, worst"),
        ({"alpha": 1.5}, "must lie in"),
    ],
)
def test_mistakes(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qevict(**changes)  # type: ignore[arg-type]
