"""Every method yaml passes its gates on the tiny model; every fault of broken_methods.py fails the gate it names."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from broken_methods import BROKEN
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny_models import RandomEviction, RandomTiers, engine, family

from qevict_bench.budget import Budget, Infeasible
from qevict_bench.gate_runs import Runs, affordable
from qevict_bench.gates import FAIL, GATES, NOT_APPLICABLE, PASS, Outcome, badge, examine, masked_dense, outcomes
from qevict_bench.models import LoadedModel
from qevict_bench.policy import KVPolicy

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("calibration")
YAMLS = {path.stem: path for path in sorted((ROOT / "configs" / "method").glob("*.yaml"))}


def method(name: str) -> KVPolicy:
    policy: KVPolicy = instantiate({key: value for key, value in OmegaConf.load(YAMLS[name]).items() if key != "name"})
    return policy


def examined(policy: KVPolicy, budget: Budget, loaded: LoadedModel | None = None) -> dict[str, Outcome]:
    loaded = loaded or engine()
    prepared = policy.prepare(loaded.name, loaded.fingerprint)
    found = list(outcomes(loaded, prepared, affordable(loaded, prepared, budget)))
    assert [outcome.gate for outcome in found] == list(GATES)
    return {outcome.gate: outcome for outcome in found}


def failed(found: dict[str, Outcome]) -> dict[str, str]:
    return {name: outcome.said for name, outcome in found.items() if outcome.status == FAIL}


# ---- what is right passes ----


@pytest.mark.parametrize("name", YAMLS)
def test_every_method_passes_its_gates(name: str) -> None:
    policy = method(name)
    found = examined(policy, Budget("1.0" if name == "full_kv" else "0.2"))
    assert not failed(found)
    for gate in ("fraction 1 = FullKV", "stored heads", "allocated = accounted", "budget", "determinism", "fork"):
        assert found[gate].status == PASS
    for gate in ("masked dense", "prefill logits"):
        assert found[gate].status == PASS or (name == "full_kv" and "vacuous" in found[gate].said)
    if len(policy.tiers) > 1:
        assert found["low-bit values"].status == PASS
        assert 0.5 < found["low-bit values"].measured <= 1  # the bound is nearly reached: it is not a loose one
    if name.startswith("qevict") and name != "qevict_static":
        assert found["promotion"].status == PASS


def test_gates_without_their_premise_are_vacuous() -> None:
    """The published size of SnapKV is larger than the prompt: nothing is evicted, so nothing is proved."""
    found = examined(method("snapkv"), Budget("native"))
    assert not failed(found)
    for gate in ("masked dense", "frozen rows"):
        assert found[gate].status == NOT_APPLICABLE
        assert "vacuous: nothing" in found[gate].said
    found = examined(method("qevict_static"), Budget("0.2"))
    assert "vacuous: nothing was promoted" in found["promotion"].said


def test_what_comes_back_from_the_host_is_exact() -> None:
    policy = RandomTiers(unit=8, offset=5, promotion="host")
    runs = Runs(engine(), policy, Budget("native"))
    for gate in ("masked dense", "low-bit values", "promotion", "allocated = accounted"):
        assert examine(gate, runs).status == PASS, examine(gate, runs).said


@pytest.mark.parametrize(
    ("params", "group"), [("static", 1), ("relative8", 1), ("relative8", 3), ("group", 3), ("window", 1)]
)
def test_every_kind_of_key_parameters_reaches_its_bound(params: str, group: int) -> None:
    policy = RandomTiers(unit=8, offset=5, key_params=params, group=group, bits=4)
    outcome = examine("low-bit values", Runs(engine(), policy, Budget("native")))
    assert outcome.status == PASS, outcome.said
    assert outcome.measured > 0.9


def test_a_recompressing_method_does_so_while_decoding() -> None:
    """The watched run is longer than ZipCache's published gap of 100 decoded tokens."""
    run, _ = Runs(engine(), method("zipcache"), Budget("native")).observed
    assert run.session.policy.every == 100
    assert run.session.trace[0].events == 3


@pytest.mark.parametrize("kind", ["gemma3", "qwen3", "phi3_partial", "mixtral", "llama_yarn"])
def test_the_dense_run_knows_every_family(kind: str) -> None:
    """Sliding layers, partial and scaled rope, experts; with ragged heads and with a low-bit tier."""
    for policy in (RandomEviction(), RandomTiers(unit=8, offset=5)):
        status, gap, said = masked_dense(Runs(family(kind), policy, Budget("native")))
        assert status == PASS, said
        assert gap < 2e-5
        assert " 0 evictions" not in said


def test_compact_positions_on_sliding_layers() -> None:
    policy = instantiate({"_target_": "methods.streaming_llm.StreamingLLM", "position": "compact"})
    assert not failed(examined(policy, Budget("0.3"), family("gemma3")))


def test_a_method_that_must_not_compress_says_so() -> None:
    """FullKV at 20 % fails the budget; gates that need the run that stopped are not applicable."""
    policy = instantiate({"_target_": "methods.full_kv.FullKV"})
    found = examined(policy, Budget("0.2"))
    assert list(failed(found)) == ["budget"]
    assert "FullKV holds" in found["budget"].said
    assert found["masked dense"].status == NOT_APPLICABLE
    assert found["fraction 1 = FullKV"].status == PASS


# ---- what is broken fails ----


def examined_by(gate: str, policy: KVPolicy, budget: str) -> Outcome:
    prepared = policy.prepare(engine().name, engine().fingerprint)
    return examine(gate, Runs(engine(), prepared, affordable(engine(), prepared, Budget(budget))))


@cache
def twin(gate: str, policy: KVPolicy, budget: str) -> str:
    return examined_by(gate, policy, budget).status


@pytest.mark.parametrize("name", BROKEN)
def test_every_fault_is_caught_by_its_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BROKEN[name]
    assert twin(broken.gate, broken.twin, broken.budget) == PASS
    broken.sabotage(monkeypatch)
    outcome = examined_by(broken.gate, broken.policy, broken.budget)
    assert outcome.status == FAIL, outcome.said
    assert not math.isnan(outcome.measured) or "allowed are" in outcome.said  # measured, not merely crashed


# ---- words ----


def test_badges() -> None:
    good, bad, none = (Outcome(status, status, 0.0, "") for status in (PASS, FAIL, NOT_APPLICABLE))
    assert badge([good, good, none]) == "2/2"
    assert badge([good, bad, none, bad]) == "1/3 fails fail, fail"


def test_an_unaffordable_budget_is_raised_to_the_next_that_is() -> None:
    policy = instantiate({"_target_": "methods.qevict.QEvict", "evict": False, "key_params": "static"})
    assert affordable(engine(), policy, Budget("0.3")).spec == "0.3"
    assert affordable(engine(), policy, Budget("0.1", enforce="prefill")) == Budget("0.25", enforce="prefill")
    with pytest.raises(Infeasible, match="nearest feasible fraction"):
        affordable(engine(), policy, Budget("10t"))


def doctor() -> ModuleType:
    spec = importlib.util.spec_from_file_location("doctor", ROOT / "scripts" / "doctor.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["method=streaming_llm", "budget=0.3"], 0, "12/12 in "),
        (["method=qevict", "budget=native"], 2, "error: budget=native: .* publishes no "),
        (["method=snapkv", "budget=2t"], 2, "nearest feasible fraction is"),
        (["method=snapkv", "method.kernel=2"], 2, "error: method.kernel=2 must be odd"),
        (["method=quantum"], 2, "error: .*Available options in 'method'"),
    ],
)
def test_the_doctor(
    arguments: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["doctor.py"])
    assert doctor().cli.command_line(["model=tiny", *arguments], doctor().main) == code
    captured = capsys.readouterr()
    text = captured.out if code == 0 else captured.err
    assert len(text.splitlines()) == (2 + len(GATES) if code == 0 else 1)
    assert re.search(said, text)
    assert not list(tmp_path.iterdir())


def test_the_doctor_fails_with_what_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["doctor.py"])
    BROKEN["keys aside"].sabotage(monkeypatch)
    assert doctor().cli.command_line(["model=tiny", "method=snapkv"], doctor().main) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("fail")).split("  ")[1] == "allocated = accounted"
    assert "fails allocated = accounted in " in lines[-1]
