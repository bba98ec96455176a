"""Every configuration file composes and fits the class it names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from qevict_bench import runner
from qevict_bench.policy import KVPolicy
from qevict_bench.settings import set_anyway
from qevict_bench.task import Task

CONFIGS = Path(__file__).parents[1] / "configs"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def configs() -> Iterator[None]:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    return compose("run", overrides=list(overrides))


@pytest.mark.parametrize("method", options("method"))
def test_every_method_composes(method: str) -> None:
    name, policy = runner._method(composed(f"method={method}").method, "method.")
    assert name == method
    assert isinstance(policy, KVPolicy)


@pytest.mark.parametrize(("task", "model"), list(product(options("task"), options("model"))))
def test_every_task_and_model_compose(task: str, model: str) -> None:
    cfg = composed(f"task={task}", f"model={model}")
    assert isinstance(runner._build(cfg.task, "task."), Task)
    assert runner._build(cfg.model, "model.").name in (model, "")
    OmegaConf.to_yaml(cfg, resolve=True)


STUDY = yaml.safe_load((CONFIGS / "study.yaml").read_text(encoding="utf-8"))
CHANGES = [each for settings in STUDY["points"].values() for each in settings]
CHANGES += [f"method={name} {each}" for name, settings in STUDY["trials"].items() for each in settings]


@pytest.mark.parametrize("change", sorted(set(CHANGES)))
def test_every_change_of_the_study_is_a_policy(change: str) -> None:
    cfg = composed(*map(set_anyway, change.split()))
    assert isinstance(runner._method(cfg.method, "method.")[1], KVPolicy)


@pytest.mark.parametrize("run", STUDY["runs"].values())
def test_every_task_of_the_study_composes(run: str) -> None:
    cfg = composed(*map(set_anyway, run.split()))
    assert isinstance(runner._build(cfg.task, "task."), Task)


@pytest.mark.parametrize("group", ["method", "protocol", "profile"])
def test_a_file_and_its_name_agree(group: str) -> None:
    assert options(group)
    for option in options(group):
        assert composed(f"{group}={option}")[group].name == option


def test_every_reference_is_a_method() -> None:
    for option in options("reference"):
        cfg = composed(f"reference={option}", f"method={option}")
        assert cfg.reference == cfg.method


@pytest.mark.parametrize(
    ("profile", "limit", "length"), [("quick", 4, 1024), ("standard", 25, 4096), ("paper", 500, 32768)]
)
def test_a_profile_sets_limit_and_length_and_an_override_wins(profile: str, limit: int, length: int) -> None:
    cfg = composed(f"profile={profile}", "task=ruler")
    assert (cfg.limit, cfg.task.context_length) == (limit, length)
    cfg = composed("task.context_length=777", "limit=3", f"profile={profile}", "task=ruler")
    assert (cfg.limit, cfg.task.context_length) == (3, 777)


def test_the_main_job_is_the_documented_one() -> None:
    cfg = composed()
    chosen = (cfg.model.name, cfg.method.name, cfg.task.name if "name" in cfg.task else "ruler", str(cfg.budget))
    assert chosen == ("smollm2_135m", "qevict", "ruler", "0.2")
    assert (cfg.reference.name, cfg.protocol.name, cfg.profile.name) == ("full_kv", "query_aware", "quick")
    assert (cfg.basis, cfg.enforce, cfg.small_budget, cfg.first_token) == ("sequence", "always", "clamp", "compressed")
    assert cfg.results_dir == "results/runs"
