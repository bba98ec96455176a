"""Every method yaml passes its gates on the tiny model; every fault of broken_methods.py fails the gate it names."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from broken_methods import BROKEN
from calibrated import calibrate
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tiny_models import RandomEviction, RandomTiers, family

from qevict_bench import attention
from qevict_bench.budget import Budget, Infeasible
from qevict_bench.gates import (
    FAIL,
    GATES,
    NOT_APPLICABLE,
    PASS,
    Outcome,
    Runs,
    affordable,
    badge,
    masked_dense,
    outcomes,
)
from qevict_bench.models import LoadedModel, ModelSpec
from qevict_bench.policy import KVPolicy

ROOT = Path(__file__).parents[1]
YAMLS = {path.stem: path for path in sorted((ROOT / "configs" / "method").glob("*.yaml"))}


@cache
def engine() -> LoadedModel:
    """4 layers, 6 query heads on 3 KV heads, fp32."""
    return ModelSpec("tiny", "tiny", device="cpu").load(attention.register())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def _calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QEVICT_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        calibrate(engine()).save(engine().fingerprint, {})
        yield


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
    policy = instantiate({key: value for key, value in OmegaConf.load(YAMLS[name]).items() if key != "name"})
    found = examined(policy, Budget("1.0" if name == "full_kv" else "0.2"))
    assert not failed(found)
    for gate in ("fraction 1 = FullKV", "masked dense", "stored heads", "allocated = accounted", "budget"):
        assert found[gate].status == PASS


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


@cache
def twin_failures(policy: KVPolicy) -> dict[str, str]:
    return failed(examined(policy, Budget("0.2")))


@pytest.mark.parametrize("name", BROKEN)
def test_every_fault_is_caught_by_its_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = BROKEN[name]
    assert not twin_failures(broken.twin)
    broken.sabotage(monkeypatch)
    found = examined(broken.policy, Budget("0.2"))
    assert found[broken.gate].status == FAIL, failed(found)
    assert not math.isnan(found[broken.gate].measured)  # measured, not merely crashed


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
        (["method=streaming_llm", "budget=0.3"], 0, "10/10 in "),
        (["method=qevict", "budget=native"], 2, "error: budget=native: qevict publishes no footprint"),
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
    BROKEN["uncounted bytes"].sabotage(monkeypatch)
    assert doctor().cli.command_line(["model=tiny", "method=snapkv"], doctor().main) == 1
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("fail")).split("  ")[1] == "allocated = accounted"
    assert "fails allocated = accounted in " in lines[-1]
