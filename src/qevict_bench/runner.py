"""run(cfg): one method on one task with one model, beside its reference. The only engine file that knows Hydra.

Everything is checked before anything is created, and the model is loaded only if an example still has to run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from qevict_bench.budget import Budget
from qevict_bench.environment import Environment
from qevict_bench.jobs import Bench, Generate, Job, RunFailed
from qevict_bench.model_facts import ModelFacts, describe
from qevict_bench.policy import KVPolicy
from qevict_bench.progress import Waiting
from qevict_bench.results import Row, RunFolder, open_run, run_id
from qevict_bench.settings import Settings, build
from qevict_bench.summary import Facts, Summary, summarize
from qevict_bench.task import Task

_GROUPS = ("model", "method", "reference", "task", "protocol", "profile")
SMALL_BYTES = 6_000_000_000
"""Models with smaller weight files (3 billion parameters in 16 bit) reproduce nothing of the paper."""
_BOUNDS = ("basis", "enforce", "small_budget")
_IDENTITY = (*_BOUNDS, "protocol", "first_token", "seed", "split", "dtype", "batch_size")
"""Fields of a row that go into its run id, beside budget, method and the fingerprints of model, task and data."""


@dataclass(frozen=True)
class Plan:
    """What a command asks for, checked. `job` is `reference` if the method is its own reference."""

    settings: Settings
    task: Task
    model: ModelFacts
    spec: Any
    environment: Environment
    job: Job
    reference: Job
    reference_name: str


def run(cfg: DictConfig, generate: Generate | None = None) -> Summary:
    """Run or continue what `cfg` (configs/run.yaml) describes; writes rows and summaries, returns the method's.

    `generate` replaces engine.generate in tests. Raises ValueError for users' mistakes, before anything is written, and
    RunFailed if no example of a run succeeded or a step went over its budget.
    """
    plan = make_plan(cfg)
    bench = Bench(plan.settings, plan.task, plan.spec, generate)
    results_dir, job, reference = plan.settings.results_dir, plan.job, plan.reference
    restart = plan.settings.resume == "restart"
    path = results_dir / job.run_id
    with open_run(path, job.config, plan.environment, restart="always" if restart else "never") as folder:
        if job is reference:
            return _finish(plan, bench, job, folder, None)
        wait = Waiting(f"the reference run {reference.run_id} ({plan.reference_name})")
        reference_path = results_dir / reference.run_id
        how = "unusable" if restart else "never"
        with open_run(reference_path, reference.config, plan.environment, restart=how, wait=wait) as reference_folder:
            _finish(plan, bench, reference, reference_folder, None)
        return _finish(plan, bench, job, folder, reference_folder)


def _finish(plan: Plan, bench: Bench, job: Job, folder: RunFolder, reference_folder: RunFolder | None) -> Summary:
    """Run what is missing of one run and write its summary; without `reference_folder` it is its own reference."""
    available = bench.complete(job, folder)
    facts = Facts(
        num_layers=plan.model.num_layers,
        compressible_layers=plan.model.num_compressible,
        small_model=plan.model.weight_bytes < SMALL_BYTES,
        reference=plan.reference_name,
        reference_id=plan.reference.run_id,
        limit=plan.settings.limit,
        available=available,
    )
    rows = bench.selected(folder)
    summary = summarize(rows, bench.selected(reference_folder or folder), facts)
    folder.write_summary(summary.to_json())
    if not summary.num_examples and summary.num_errors:
        raise RunFailed(
            f"no example of run {job.run_id} ({job.row.method}) succeeded; the first failed with {summary.problem}"
        )
    return summary


def make_plan(cfg: DictConfig) -> Plan:
    """Check the configuration and build its objects; reads the model's config and the task's files, but no weights."""
    values = _plain(cfg, "")
    own_fields = {name: value for name, value in values.items() if name not in _GROUPS}
    settings: Settings = build(Settings, {**own_fields, "protocol": values["protocol"]["name"]}, "")
    method, policy = _method(cfg.method, "method.")
    reference_method, reference_policy = _method(cfg.reference, "reference.")
    task: Task = _build(cfg.task, "task.")
    spec = _build(cfg.model, "model.")
    model = describe(spec)
    context_length = getattr(task, "context_length", 0)
    if context_length > model.max_context:
        raise ValueError(
            f"task.context_length={context_length} is longer than the context of {model.name} ({model.max_context} "
            "tokens); give a smaller task.context_length or profile, or a model with a longer context"
        )
    policy = policy.prepare(model.name, model.fingerprint)
    reference_policy = reference_policy.prepare(model.name, model.fingerprint)
    environment = Environment.current(model.device)
    fingerprints = {"model": [model.fingerprint, spec.chat], "task": [_identity(task), task.fingerprint()]}

    def job(name: str, policy: KVPolicy, variant: str, budget: Budget, node: DictConfig) -> Job:
        row = Row(
            run_id="",
            model=model.name,
            method=name,
            variant=variant,
            task=task.name,
            seed=settings.seed,
            split=settings.split,
            budget=budget.spec,
            basis=budget.basis,
            enforce=budget.enforce,
            small_budget=budget.small_budget,
            batch_size=settings.batch_size,
            protocol=settings.protocol,
            first_token=settings.first_token,
            prompt_source=task.prompt_source,
            device=model.device,
            dtype=model.dtype,
            git_sha=environment.git_sha,
        )
        identity = {field: getattr(row, field) for field in _IDENTITY} | fingerprints
        identity |= {"budget": _canonical(budget), "method": [name, _identity(policy)]}
        config = OmegaConf.merge(cfg, {"method": node, **{field: getattr(budget, field) for field in _BOUNDS}})
        config.budget = budget.spec
        return Job(policy, budget, replace(row, run_id=run_id(identity)), OmegaConf.to_yaml(config, resolve=True))

    reference = job(reference_method, reference_policy, "", Budget("1.0"), cfg.reference)
    is_reference = (method, policy) == (reference_method, reference_policy)
    own = reference if is_reference else job(method, policy, _variant(), settings.parsed_budget(), cfg.method)
    return Plan(settings, task, model, spec, environment, own, reference, reference_method)


def _plain(node: DictConfig, where: str) -> dict[str, Any]:
    try:
        return dict(OmegaConf.to_container(node, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
    except MissingMandatoryValue as error:
        raise ValueError(f"{where}{error.key} has no value; set {where}{error.key}=...") from None


def _method(node: DictConfig, where: str) -> tuple[str, KVPolicy]:
    return node.name, _build(node, where)


def _build(node: DictConfig, where: str) -> Any:
    """The dataclass that `_target_` names; `name` labels a preset unless the dataclass has such a field."""
    values = _plain(node, where)
    target = get_class(values.pop("_target_"))
    if "name" not in (field.name for field in fields(target)):
        values.pop("name", None)
    return build(target, values, where)


def _identity(instance: Any) -> dict[str, Any]:
    """Class and all settable fields, as JSON types."""
    values = {field.name: repr(getattr(instance, field.name)) for field in fields(instance) if field.init}
    assert not any(" at 0x" in value for value in values.values()), f"{instance} has fields without a stable repr"
    return {"class": type(instance).__qualname__, **values}


def _canonical(budget: Budget) -> str:
    """0.2, 0.20 and 1/5 are one budget."""
    return budget.spec if budget.native or budget.spec.endswith("t") else str(Fraction(budget.spec))


def _variant() -> str:
    """The method's fields given on the command line, e.g. "key_bits=4"."""
    if not HydraConfig.initialized():
        return ""
    overrides = [text.lstrip("+") for text in HydraConfig.get().overrides.task]
    return ",".join(text.removeprefix("method.") for text in overrides if text.startswith("method."))
