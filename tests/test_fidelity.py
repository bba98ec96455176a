"""Fidelity: FullKV's predictions equal transformers', KL a direct fp64 one, what is stored is not trusted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from presets import qevict
from safetensors.torch import load_file, save_file
from test_contract import greedy
from tiny_models import KeepSuffix, RandomEviction, engine, family, random_ids, reference, sdpa_copy
from torch import Tensor

from methods.full_kv import FullKV
from methods.random import Random
from methods.snapkv import SnapKV
from methods.streaming_llm import StreamingLLM
from qevict_bench import attention, fidelity, streams
from qevict_bench import engine as engine_module
from qevict_bench.budget import Budget, Geometry
from qevict_bench.engine import Generation, Readings, generate, read
from qevict_bench.fidelity import compare, measure
from qevict_bench.models import LoadedModel, ModelSpec
from qevict_bench.policy import KVPolicy
from qevict_bench.protocol import Protocol, lengths
from qevict_bench.session import KVSession, geometry_of
from qevict_bench.streams import Predictions, kl_divergence, looping, most_probable, predict
from qevict_bench.task import Example, Prompt, Prompter

EVERYTHING, UNBOUNDED = Budget("1.0"), Budget("native")
AWARE, AGNOSTIC = Protocol(), Protocol("query_agnostic")
GOLDS = (random_ids(12, 7), random_ids(5, 8), random_ids(9, 9))


def prompts_of(*num_tokens: int) -> list[Prompt]:
    """Random prompts whose last 11 tokens are the question."""
    return [Prompt(tuple(random_ids(num, num)), (), 0, num - 11) for num in num_tokens]


def measured(
    folder: Path,
    policy: KVPolicy,
    budget: Budget,
    prompts: Sequence[Prompt],
    golds: Sequence[Sequence[int]] = GOLDS,
    loaded: LoadedModel | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    return measure(
        loaded or engine(),
        policy,
        budget,
        prompts,
        golds[: len(prompts)],
        folder=folder,
        **{
            "max_new_tokens": [16] * len(prompts),
            "seed": 0,
            "example_ids": [str(len(prompt.ids)) for prompt in prompts],
            "max_tokens": 12,
            **options,
        },
    )


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Predictions]]:
    """What FullKV's runs stored, in order: key and predictions."""
    found: list[tuple[str, Predictions]] = []

    def noting(folder: Path, key: str, predictions: Predictions) -> None:
        found.append((key, predictions))
        streams.save(folder, key, predictions)

    monkeypatch.setattr(fidelity, "save", noting)
    return found


def twin(loaded: LoadedModel) -> Any:
    """The same weights under transformers' own attention."""
    return reference(loaded.name) if loaded.name != "tiny" else sdpa_copy(loaded.model)


@torch.inference_mode()
def forward_log_probs(loaded: LoadedModel, ids: Sequence[int], num: int) -> Tensor:
    """fp64 log-probabilities [num, V] of the last `num` tokens of a text, by one forward pass of transformers."""
    logits = twin(loaded)(torch.tensor([list(ids)])).logits[0]
    return logits[len(ids) - num - 1 : len(ids) - 1].double().log_softmax(-1)


# ---- FullKV's side ----


@pytest.mark.parametrize("protocol", [AWARE, AGNOSTIC, Protocol(first_token="full")], ids=["aware", "agnostic", "full"])
@pytest.mark.parametrize("kind", ["tiny", "qwen3", "gemma3"])
def test_full_kv_equals_transformers(
    kind: str, protocol: Protocol, tmp_path: Path, saved: list[tuple[str, Predictions]]
) -> None:
    loaded, prompts = engine() if kind == "tiny" else family(kind), prompts_of(45, 61, 33)
    measured(tmp_path, FullKV(), EVERYTHING, prompts, loaded=loaded, protocol=protocol, max_tokens=10)
    assert len(saved) == 6
    golds, continued = [found for _, found in saved[:3]], [found for _, found in saved[3:]]
    for gold, found in zip(GOLDS, golds, strict=True):
        assert found.token_N.tolist() == gold[:10]
    for prompt, found in zip(prompts, continued, strict=True):
        assert found.token_N.tolist() == greedy(twin(loaded), list(prompt.ids), 10)
        assert torch.equal(found.argmax_N, found.token_N)
    for prompt, found in zip([*prompts, *prompts], [*golds, *continued], strict=True):
        tokens = found.token_N.tolist()
        expected = forward_log_probs(loaded, [*prompt.ids, *tokens], len(tokens))
        everywhere = torch.full(expected.shape, torch.nan).scatter(1, found.top_NK.long(), found.log_prob_NK)
        torch.testing.assert_close(everywhere, expected.float(), atol=1e-4, rtol=1e-4)
        own = expected.gather(1, found.token_N[:, None])[:, 0]
        torch.testing.assert_close(found.token_log_prob_N, own.float(), atol=1e-4, rtol=1e-4)
        assert torch.equal(found.argmax_N, expected.argmax(-1))
        assert bool((found.rest_N == -torch.inf).all())  # the vocabulary is smaller than what is kept
        assert (found.log_prob_NK.dtype, found.rest_N.dtype) == (torch.float32, torch.float32)


def test_full_kv_ends_with_its_end_of_text(tmp_path: Path, saved: list[tuple[str, Predictions]]) -> None:
    prompts = prompts_of(45, 61)
    tokens = [greedy(sdpa_copy(engine().model), list(prompt.ids), 12) for prompt in prompts]
    ending = replace(engine(), eos_ids=(tokens[0][4],))
    [first, _] = measured(tmp_path, FullKV(), EVERYTHING, prompts, loaded=ending, streams=("full_kv",), max_tokens=12)
    length = tokens[0].index(tokens[0][4]) + 1
    assert length <= 5
    assert saved[0][1].token_N.tolist() == tokens[0][:length]
    assert first["full_kv.tokens"] == length
    assert first["full_kv.agreement"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("protocol", [AWARE, AGNOSTIC, Protocol(first_token="full")], ids=["aware", "agnostic", "full"])
def test_full_kv_against_itself(protocol: Protocol, dtype: str, tmp_path: Path) -> None:
    """Bit for bit, also where rows of a batch differ in length; a method that has nothing to move is as exact."""
    loaded = ModelSpec("tiny", "tiny", dtype=dtype, device="cpu").load(attention.register())
    for policy in (FullKV(), qevict(recent=16), SnapKV(window=16)):
        for each in measured(tmp_path, policy, EVERYTHING, prompts_of(90, 161, 120), loaded=loaded, protocol=protocol):
            for stream, num in (("gold", each["gold.tokens"]), ("full_kv", each["full_kv.tokens"])):
                expected = {"kl_first": 0, "kl": 0, "agreement_first": 1, "agreement": 1, "nll_change": 0}
                assert {name: each[f"{stream}.{name}"] for name in expected} == expected
                assert (each[f"{stream}.diverged"], each[f"{stream}.divergence"]) == (0, num)


# ---- a method's side ----


@dataclass(frozen=True)
class DirectRun:
    """fp64 log-probabilities [N, V] of FullKV and of a method along a text, without what is tested."""

    full: Tensor
    method: Tensor
    memory: float

    @staticmethod
    def of(policy: KVPolicy, budget: Budget, prompt: Prompt, gold: Sequence[int], protocol: Protocol) -> DirectRun:
        steps = protocol.steps(prompt)
        fitted = policy.fit(budget, geometry_of(engine()), *lengths(steps, 16))
        session = KVSession(engine(), fitted, budget, 1, max_new=16, seeds=[f"0/{len(prompt.ids)}"])
        logits = [read(session, [steps], protocol.first_token, 1024)[0]]
        logits += [session.decode([token])[0] for token in gold[:-1]]
        full = forward_log_probs(engine(), [*prompt.ids, *gold], len(gold))
        memory = fmean(used / whole for used, whole, _ in session.trace[0].decode)
        return DirectRun(full, torch.stack(logits).double().log_softmax(-1), memory)


@pytest.mark.parametrize("protocol", [AWARE, AGNOSTIC], ids=["aware", "agnostic"])
@pytest.mark.parametrize("policy", [StreamingLLM(), SnapKV(window=16), qevict(recent=16)], ids=lambda p: p.name)
def test_measures_equal_direct_ones(policy: KVPolicy, protocol: Protocol, tmp_path: Path) -> None:
    prompts = prompts_of(90, 161, 120)
    found = measured(tmp_path, policy, Budget("0.5"), prompts, protocol=protocol, streams=("gold",))
    for each, prompt, gold in zip(found, prompts, GOLDS, strict=True):
        run = DirectRun.of(policy, Budget("0.5"), prompt, gold, protocol)
        kl = (run.full.exp() * (run.full - run.method)).sum(-1)
        same = run.full.argmax(-1) == run.method.argmax(-1)
        nll, full_nll = (-float(side[range(len(gold)), gold].mean()) for side in (run.method, run.full))
        first_miss = next((i for i, equal in enumerate(same.tolist(), 1) if not equal), len(gold))
        expected = {
            "tokens": len(gold),
            "kl_first": float(kl[0]),
            "kl": float(kl[1:].mean()),
            "agreement_first": float(same[0]),
            "agreement": float(same[1:].double().mean()),
            "divergence": first_miss,
            "diverged": float(not bool(same.all())),
            "nll": nll,
            "nll_change": nll - full_nll,
            "looping": 0,
            "memory": run.memory,
        }
        assert {f"gold.{name}" for name in expected} == each.keys()
        assert each["gold.kl"] > 1e-3
        for name, value in expected.items():
            assert each[f"gold.{name}"] == pytest.approx(value, abs=2e-5, rel=1e-4), name


@pytest.mark.parametrize("protocol", [AWARE, AGNOSTIC], ids=["aware", "agnostic"])
@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        (StreamingLLM(), Budget("0.4")),
        (SnapKV(window=16), Budget("0.4")),
        (qevict(recent=16), Budget("0.5")),
        (RandomEviction(), UNBOUNDED),
    ],
    ids=["streaming_llm", "snapkv", "qevict", "random"],
)
def test_a_row_is_what_it_is_alone(policy: KVPolicy, budget: Budget, protocol: Protocol, tmp_path: Path) -> None:
    prompts = prompts_of(90, 161, 120)
    golds = [*GOLDS[:2], ()]
    together = measured(tmp_path, policy, budget, prompts, golds, protocol=protocol, max_tokens=20)
    assert {key: value for key, value in together[2].items() if key.startswith("gold")} == {"gold.tokens": 0}
    for each, prompt, gold in zip(together, prompts, golds, strict=True):
        [alone] = measured(tmp_path, policy, budget, [prompt], [gold], protocol=protocol, max_tokens=20)
        assert alone == pytest.approx(each, abs=1e-5, rel=1e-4)


@pytest.mark.parametrize("protocol", [AWARE, AGNOSTIC], ids=["aware", "agnostic"])
@pytest.mark.parametrize("policy", [SnapKV(window=16), qevict(recent=16), Random()], ids=lambda p: p.name)
def test_what_generation_has_read_is_not_read_again(
    policy: KVPolicy, protocol: Protocol, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changes, neither answers nor measures, and every prompt is read once; but for answers too short."""
    prompts, names = prompts_of(90, 161, 120), ["90", "161", "120"]
    common: dict[str, Any] = {"protocol": protocol, "seed": 0, "example_ids": names}
    budget, num_read = Budget("0.5"), []
    read = KVSession.prefill
    monkeypatch.setattr(
        KVSession, "prefill", lambda self, ids, chunk: num_read.append(len(ids)) or read(self, ids, chunk)
    )

    def both(new: int, readings: dict[str, Readings]) -> tuple[list[Generation], list[dict[str, float]]]:
        limits = [new] * 3
        made = generate(engine(), policy, budget, prompts, max_new_tokens=limits, stop=(), **common, **readings)
        found = measured(tmp_path, policy, budget, prompts, max_new_tokens=limits, protocol=protocol, **readings)
        return [replace(each, ttft_s=0.0, decode_s=0.0) for each in made], found

    both(16, {})  # FullKV's side is stored
    for new, times in ((16, 1), (5, 2)):  # streams of 12 tokens need more room than answers of 5
        num_read.clear()
        apart, in_all = both(new, {}), sum(num_read)
        num_read.clear()
        assert both(new, {"readings": Readings()}) == apart
        assert (in_all, sum(num_read)) == (6, 3 * times)


@dataclass(frozen=True)
class FittedSuffix(KeepSuffix):
    """Keeps a suffix as long as the tokens of the prompt's first step allow: another policy for every length."""

    def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> FittedSuffix:
        return replace(self, suffix=prompt_len // 2)


def test_policies_fitted_to_their_example(tmp_path: Path) -> None:
    prompts = prompts_of(90, 161, 90)
    together = measured(tmp_path, FittedSuffix(), UNBOUNDED, prompts)
    for each, prompt, gold in zip(together, prompts, GOLDS, strict=True):
        [same] = measured(tmp_path, KeepSuffix((len(prompt.ids) - 1) // 2), UNBOUNDED, [prompt], [gold])
        assert same == pytest.approx(each, abs=1e-5, rel=1e-4)


def test_room_is_fitted_as_for_generation(tmp_path: Path) -> None:
    """For max_new_tokens, or for a longer stream; FullKV's stream does not shorten it."""
    rooms = []

    @dataclass(frozen=True)
    class Fitted(KeepSuffix):
        def fit(self, budget: Budget, geometry: Geometry, prompt_len: int, max_new: int) -> Fitted:
            rooms.append((prompt_len, max_new))
            return self

    prompts = prompts_of(40, 50)
    measured(tmp_path, Fitted(), UNBOUNDED, prompts, max_tokens=8, max_new_tokens=[32, 4], protocol=AGNOSTIC)
    assert rooms == [(29, 11 + 31), (39, 11 + 7)]


@pytest.mark.parametrize("policy", [StreamingLLM(), SnapKV(window=8)], ids=["streaming_llm", "snapkv"])
def test_kl_falls_with_budget(policy: KVPolicy, tmp_path: Path) -> None:
    prompts, golds = prompts_of(*range(160, 168)), [random_ids(16, seed) for seed in range(8)]
    means = []
    for fraction in ("0.3", "0.5", "0.7", "0.9", "1.0"):
        found = measured(tmp_path, policy, Budget(fraction), prompts, golds, streams=("gold",))
        means.append(sum(each["gold.kl"] for each in found) / len(found))
    assert means == sorted(means, reverse=True)
    assert means[0] > 2 * means[-2] > means[-1] == 0


@pytest.fixture
def trained(smollm2: LoadedModel) -> Iterator[LoadedModel]:
    """SmolLM2 under the engine's attention."""
    before = smollm2.model.config._attn_implementation
    smollm2.model.set_attn_implementation(attention.register())
    yield smollm2
    smollm2.model.set_attn_implementation(before)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [StreamingLLM(), SnapKV(), qevict()], ids=lambda policy: policy.name)
def test_kl_falls_with_budget_on_a_trained_model(policy: KVPolicy, trained: LoadedModel, tmp_path: Path) -> None:
    prompter = Prompter(trained.tokenizer, trained.chat)
    lines = [f"The code of house {i} is {i * 7919 % 9973}." for i in range(40)]
    example = Example("x-0", "x", "\n".join(lines) + "\n", "What is the code of house 12?", "", ("",), 16, ())
    prompt, gold = prompter.encode(example), prompter.continuation(replace(example, gold=lines[12]))
    found = [
        measured(tmp_path, policy, Budget(fraction), [prompt], [gold], loaded=trained, max_tokens=16)[0]
        for fraction in ("0.2", "0.5", "1.0")
    ]
    assert found[0]["gold.kl"] > found[1]["gold.kl"] > found[2]["gold.kl"] == 0
    assert found[0]["gold.nll_change"] > found[2]["gold.nll_change"] == 0


# ---- what is kept of a distribution ----


@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_the_rest_bucket(scale: float) -> None:
    """On a vocabulary larger than what is kept: never above the KL of all tokens, and close where FullKV is peaked."""
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(6, 20_000, generator=generator) * scale
    method = full + torch.randn(6, 20_000, generator=generator) * 0.3
    tokens, top = torch.arange(6), most_probable(full)
    coarse = kl_divergence(*(predict(logits, tokens, top) for logits in (full, method)))
    p, q = (logits.double().log_softmax(-1) for logits in (full, method))
    exact = (p.exp() * (p - q)).sum(-1)
    assert bool((coarse <= exact + 1e-6).all())
    assert bool((coarse > 0).all())
    mass = torch.stack([p[i].exp().sort(descending=True).values[1024:].sum() for i in range(6)])
    torch.testing.assert_close(predict(full, tokens, top).rest_N.double().exp(), mass, rtol=1e-5, atol=0)
    if scale >= 3:
        torch.testing.assert_close(coarse, exact, rtol=0.25 if scale == 3 else 1e-4, atol=1e-9)


@pytest.mark.parametrize("shift", [20.0, 60.0, 200.0])
def test_a_rest_too_small_to_subtract(shift: float) -> None:
    """1 - sum of the kept would be 0 or below; the bucket's logarithm is what the others add up to."""
    logits = torch.zeros(1, 2000)
    logits[0, :1024] += shift
    found = predict(logits, torch.tensor([0]), most_probable(logits))
    expected = math.log(976) - math.log(1024) - shift
    assert float(found.rest_N) == pytest.approx(expected, rel=1e-5)


def test_kl_is_never_below_zero_and_exactly_zero_of_equals() -> None:
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        full = (torch.randn(200, 3000, generator=generator) * 4).to(dtype)
        near = full + torch.randn(200, 3000, generator=generator).to(dtype) * 1e-4
        top = most_probable(full)
        sides = [predict(logits, torch.zeros(200, dtype=torch.int64), top) for logits in (full, near, full.clone())]
        assert bool((kl_divergence(sides[0], sides[2]) == 0).all())
        assert bool((kl_divergence(sides[0], sides[1]) >= 0).all())


def test_both_sides_are_normalized() -> None:
    """What rounding adds to or takes from all log-probabilities alike is no divergence."""
    logits = torch.randn(20, 3000, generator=torch.Generator().manual_seed(2))
    full = predict(logits, torch.zeros(20, dtype=torch.int64), most_probable(logits))
    for shift in (-1e-3, 1e-3):
        shifted = full._replace(log_prob_NK=full.log_prob_NK + shift, rest_N=full.rest_N + shift)
        assert float(kl_divergence(full, shifted).max()) < 1e-6
        assert float(kl_divergence(shifted, full).max()) < 1e-6


def test_tokens_without_mass_add_nothing() -> None:
    full = torch.tensor([[0.0, 0.0, -torch.inf]])
    method = torch.tensor([[0.0, math.log(3), -torch.inf]])
    kl = kl_divergence(*(predict(logits, torch.tensor([0]), most_probable(full)) for logits in (full, method)))
    assert float(kl) == pytest.approx(math.log(0.5) - (math.log(0.25) + math.log(0.75)) / 2)


def test_logits_that_are_no_numbers() -> None:
    logits = torch.tensor([[0.0, torch.nan]])
    with pytest.raises(ArithmeticError, match="not numbers"):
        predict(logits, torch.tensor([0]), torch.tensor([[0, 1]], dtype=torch.int32))


def test_divergence_is_censored() -> None:
    def side(argmax: list[int]) -> Predictions:
        logits = torch.nn.functional.one_hot(torch.tensor(argmax), 5).float()
        return predict(logits, torch.tensor([1, 1, 1, 1]), torch.arange(5, dtype=torch.int32).expand(4, -1))

    full = side([1, 2, 3, 4])
    cases = {(1, 2, 3, 4): (4, False), (0, 2, 3, 4): (1, True), (1, 2, 0, 0): (3, True), (1, 2, 3, 0): (4, True)}
    for argmax, expected in cases.items():
        found = compare(full, side(list(argmax)))
        assert (found.divergence, found.diverged) == expected
        assert found.agreement_first == (argmax[0] == 1)
        assert found.agreement == sum(a == b for a, b in zip(argmax[1:], (2, 3, 4), strict=True)) / 3


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5] * 48, True),
        ([*range(24), *[7, 8, 9] * 8], True),
        ([*range(24), *[1, 2, 3, 4, 5, 6, 7, 8] * 3], True),
        ([*range(24), *list(range(8)) * 2, *range(7), 99], False),
        ([*range(24), *[1, 2, 3, 4, 5, 6, 7, 8, 9] * 3], False),
        (list(range(48)), False),
        ([*[7] * 30, *range(18)], False),
        ([5] * 16, True),
        ([5] * 15, False),
        ([*range(9), *[3] * 8], False),
        ([], False),
    ],
)
def test_loops(tokens: list[int], expected: bool) -> None:
    assert looping(tokens) is expected


def test_a_loop_of_full_kv_is_flagged(tmp_path: Path, saved: list[tuple[str, Predictions]]) -> None:
    [each] = measured(tmp_path, FullKV(), EVERYTHING, prompts_of(30), max_tokens=48)
    tokens = next(found for key, found in saved if '"full_kv"' in key).token_N.tolist()
    assert each["full_kv.tokens"] == 48
    assert each["full_kv.looping"] == looping(tokens)
    assert each["gold.looping"] == 0


# ---- streams ----


def test_one_gold_token_and_none(tmp_path: Path) -> None:
    one, none = measured(tmp_path, SnapKV(window=16), Budget("0.4"), prompts_of(90, 120), [[5], []], streams=("gold",))
    assert none == {"gold.tokens": 0}
    assert one["gold.tokens"] == one["gold.divergence"] == 1
    assert not {"gold.kl", "gold.agreement"} & one.keys()
    assert {"gold.kl_first", "gold.agreement_first", "gold.nll", "gold.nll_change"} < one.keys()
    assert all(math.isfinite(value) for value in one.values())


def test_streams_end_at_max_tokens_and_at_the_context(tmp_path: Path) -> None:
    prompts, gold = prompts_of(90, 120), [random_ids(70, 1), random_ids(6, 2)]
    found = measured(tmp_path, FullKV(), EVERYTHING, prompts, gold, max_tokens=fidelity.MAX_TOKENS)
    assert [each["gold.tokens"] for each in found] == [48, 6]
    assert [each["full_kv.tokens"] for each in found] == [48, 48]
    found = measured(tmp_path, FullKV(), EVERYTHING, prompts, gold, max_tokens=7)
    assert [(each["gold.tokens"], each["full_kv.tokens"]) for each in found] == [(7, 7), (6, 7)]
    short = replace(engine(), max_context=123)
    found = measured(tmp_path, FullKV(), EVERYTHING, prompts, gold, loaded=short, max_tokens=48)
    assert [(each["gold.tokens"], each["full_kv.tokens"]) for each in found] == [(33, 33), (3, 3)]
    with pytest.raises(ValueError, match="prompt 120 has 120 tokens"):
        measured(tmp_path, FullKV(), EVERYTHING, prompts, gold, loaded=replace(engine(), max_context=120))


def test_several_questions(tmp_path: Path) -> None:
    prompts = prompts_of(90, 120)
    alone = measured(tmp_path, SnapKV(window=16), Budget("0.4"), prompts, protocol=AGNOSTIC)
    assert measured(tmp_path, SnapKV(window=16), Budget("0.4"), prompts, protocol=Protocol("multi_query")) == alone
    with pytest.raises(ValueError, match="mode=continue.*use mode=reset"):
        measured(tmp_path, FullKV(), EVERYTHING, prompts, protocol=Protocol("multi_query", "continue"))


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 0), ("streams", ("golden",))])
def test_wrong_settings(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*(give|choose)"):
        measured(tmp_path, FullKV(), EVERYTHING, prompts_of(90), **{name: value})


# ---- files ----


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the policies that read prompts, in order."""
    names: list[str] = []

    def noting(session: KVSession, *args: Any) -> Tensor:
        names.append(session.policy.name)
        return read(session, *args)

    monkeypatch.setattr(engine_module, "read", noting)
    return names


def test_full_kv_runs_once_for_all_methods(tmp_path: Path, readings: list[str]) -> None:
    prompts = prompts_of(90, 120)
    for policy, budget in ((SnapKV(window=16), "0.4"), (SnapKV(window=16), "0.6"), (StreamingLLM(), "0.4")):
        measured(tmp_path, policy, Budget(budget), prompts)
    assert readings == ["KeepEverything", "SnapKV", "SnapKV", "StreamingLLM"]
    assert len(list(tmp_path.iterdir())) == 4


DIFFERENT: dict[str, Callable[[Path, list[Prompt]], object]] = {
    "protocol": lambda folder, prompts: measured(folder, FullKV(), EVERYTHING, prompts, protocol=AGNOSTIC),
    "first_token": lambda folder, prompts: measured(
        folder, FullKV(), EVERYTHING, prompts, protocol=Protocol(first_token="full")
    ),
    "gold": lambda folder, prompts: measured(folder, FullKV(), EVERYTHING, prompts, [GOLDS[2], GOLDS[1]]),
    "company": lambda folder, prompts: measured(folder, FullKV(), EVERYTHING, prompts[:1]),
    "max_tokens": lambda folder, prompts: measured(folder, FullKV(), EVERYTHING, prompts, max_tokens=11),
    "chunk": lambda folder, prompts: measured(folder, FullKV(), EVERYTHING, prompts, prefill_chunk=64),
    "model": lambda folder, prompts: measured(
        folder, FullKV(), EVERYTHING, prompts, loaded=replace(engine(), fingerprint="another")
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_changes_full_kv_runs_it_again(name: str, tmp_path: Path, readings: list[str]) -> None:
    prompts = prompts_of(90, 120)
    measured(tmp_path, FullKV(), EVERYTHING, prompts)
    DIFFERENT[name](tmp_path, prompts)
    assert readings == ["KeepEverything", "FullKV"] * 2


def _cut(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def _foreign(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


def _unlabelled(path: Path, other: Path) -> None:
    save_file(load_file(path), path)


def _incomplete(path: Path, other: Path) -> None:
    save_file({"token_N": torch.zeros(3)}, path)


@pytest.mark.parametrize("damage", [_cut, _empty, _flip, _foreign, _unlabelled, _incomplete])
def test_a_damaged_file_is_made_again(
    damage: Callable[[Path, Path], None], tmp_path: Path, readings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of(90, 120)
    expected = measured(tmp_path, SnapKV(window=16), Budget("0.4"), prompts)
    path, other = sorted(tmp_path.iterdir())[:2]
    damage(path, other)
    assert measured(tmp_path, SnapKV(window=16), Budget("0.4"), prompts) == expected
    assert [record.message for record in caplog.records if path.name in record.message]
    assert len(list(tmp_path.iterdir())) == 4
    measured(tmp_path, SnapKV(window=16), Budget("0.4"), prompts)
    assert readings == ["KeepEverything", "SnapKV", "KeepEverything", "SnapKV", "SnapKV"]


def test_writers_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers meet no file or a whole one, whatever several writers do."""
    logits = torch.randn(40, 2000)
    made = predict(logits, torch.zeros(40, dtype=torch.int64), most_probable(logits))
    broken: list[Path] = []
    monkeypatch.setattr(streams.os, "getpid", threading.get_ident)  # as in several processes

    def write() -> None:
        for _ in range(20):
            streams.save(tmp_path, "key", made)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = streams.load(tmp_path, "key")
        if found is None and streams.path_of(tmp_path, "key").exists():
            broken.append(tmp_path)
    for writer in writers:
        writer.join()
    found = streams.load(tmp_path, "key")
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(found, made, strict=True))
    assert [path.name for path in tmp_path.iterdir()] == [streams.path_of(tmp_path, "key").name]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/fidelity, for FullKV's predictions, cannot be written"):
        measured(tmp_path / "file" / "fidelity", FullKV(), EVERYTHING, prompts_of(30))
