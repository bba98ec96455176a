"""run(cfg): one method on one task with one model, beside its reference. The only engine file that knows Hydra.

Everything is checked before anything is created, and the model is loaded only if an example still has to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from importlib import import_module
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from qevict_bench.asking import Engine, Job
from qevict_bench.budget import Budget
from qevict_bench.environment import Environment
from qevict_bench.jobs import Bench
from qevict_bench.kept import Kept
from qevict_bench.model_facts import ModelFacts, describe
from qevict_bench.policy import KVPolicy
from qevict_bench.progress import Patience, Waiting, counting
from qevict_bench.protocol import Protocol
from qevict_bench.results import RunFailed, RunFolder, open_run, run_id
from qevict_bench.rowfiles import Damaged
from qevict_bench.rows import Row
from qevict_bench.settings import STREAMS, Metrics, Settings, Shard, build, naming
from qevict_bench.sharing import open_shared
from qevict_bench.summary import Facts, Summary, summarize
from qevict_bench.task import Task
from qevict_bench.tracking import Off, Wandb, Watch

_GROUPS = ("model", "method", "reference", "task", "protocol", "metrics", "tracker", "profile")
_ELSEWHERE = ("shard", "sweep", "launcher")
"""Fields that say by whom a run is carried out; its config.yaml leaves them out."""
SMALL_BYTES = 6_000_000_000
"""Models with smaller weight files (3 billion parameters in 16 bit) reproduce nothing of the paper."""
_UNMEASURED = Metrics()
_BOUNDS = ("basis", "enforce", "small_budget")
_PROTOCOL = ("protocol", "mode", "answer_prefix_at", "instruction_at", "first_token")
_IDENTITY = (*_BOUNDS, *_PROTOCOL, "seed", "split", "dtype", "batch_size")
"""Fields of a row that go into its run id, beside budget, method and the fingerprints of model, task and data."""


@dataclass(frozen=True)
class Plan:
    """What a command asks for, checked. `job` is `reference` if the method is its own reference."""

    settings: Settings
    protocol: Protocol
    task: Task
    model: ModelFacts
    spec: Any
    job: Job
    reference: Job
    reference_name: str
    tracker: Off | Wandb


@dataclass(frozen=True)
class Company:
    """How a run is shared with other processes. With `first` it is left alone (Held) if others are at it already."""

    first: bool = False


def run(
    cfg: DictConfig, engine: Engine | None = None, kept: Kept | None = None, company: Company | None = None
) -> Summary:
    """Run or continue what `cfg` (configs/run.yaml) describes; writes rows and summaries, returns the method's.

    The method runs first: its reference is needed only if one of its examples is ok. A method that no budget of this
    size admits on any example gives a summary without scores, not an error. `engine` replaces the engine in tests;
    `kept` is what runs of one process share. Other processes may work on the run if there is `company`, or with
    shard.count > 1. Raises ValueError for users' mistakes, before anything is written, and RunFailed if no example of a
    run succeeded, a step went over its budget, or rows cannot be written any more.
    """
    kept = kept or Kept()
    return carry_out(make_plan(cfg, kept), engine, kept, company)


def carry_out(plan: Plan, engine: Engine | None, kept: Kept, company: Company | None) -> Summary:
    """As `run`, of what is planned already."""
    bench = Bench(plan.settings, plan.protocol, plan.task, plan.spec, engine, kept)
    job, restart = plan.job, plan.settings.resume == "restart"
    path = plan.settings.results_dir / job.run_id
    together = not restart and (company is not None or plan.settings.shard.count > 1)
    if together:
        answered = _share(plan, bench, job, job.row.method, first=company is not None and company.first)
        if answered and job is not plan.reference:
            _share(plan, bench, plan.reference, plan.reference_name)
    opened = open_run(
        path,
        job.config,
        job.environment,
        restart="always" if restart else "never",
        wait=Waiting(f"run {job.run_id}") if together else None,
        beside=together,
    )
    with opened as folder, plan.tracker.watch(folder, job.config) as watch:
        available = bench.complete(job, folder, counting, watch.row, _alone)
        rows = bench.selected(folder)
        if job is plan.reference:
            return _conclude(plan, bench, job, folder, available, rows, watch)
        pairs: list[Row] = []
        if any(row.status == "ok" for row in rows):
            try:
                pairs = _reference_rows(plan, bench, folder, "unusable" if restart else "never", together)
            except Damaged:  # seen only now, beside the task's examples
                if not restart:
                    raise
                pairs = _reference_rows(plan, bench, folder, "always", together)
        return _conclude(plan, bench, job, folder, available, pairs, watch)


def _share(plan: Plan, bench: Bench, job: Job, name: str, first: bool = False) -> bool:
    """Complete a run together with whoever else works on it; whether an example of it is ok."""
    path, wait = plan.settings.results_dir / job.run_id, Waiting(f"run {job.run_id} ({name})")
    patience = Patience() if first else wait
    with open_shared(path, job.config, job.environment, wait=patience, first=first) as folder:
        bench.complete(job, folder, counting, lambda row: None, wait)
        return any(row.status == "ok" for row in bench.selected(folder))


def _alone(others: str) -> None:
    raise AssertionError(f"a run of one process waits for nobody, not for {others}")


def _reference_rows(plan: Plan, bench: Bench, folder: RunFolder, restart: str, beside: bool) -> list[Row]:
    """Complete the reference run for the method's run in `folder`; `restart` and `beside` as in open_run."""
    reference = plan.reference
    wait = Waiting(f"the reference run {reference.run_id} ({plan.reference_name})")
    path = plan.settings.results_dir / reference.run_id
    opened = open_run(path, reference.config, reference.environment, restart=restart, wait=wait, beside=beside)
    with opened as reference_folder, plan.tracker.watch(reference_folder, reference.config) as watch:
        available = bench.complete(reference, reference_folder, counting, watch.row, _alone)
        rows = bench.selected(reference_folder)
        bench.same_examples(folder, reference_folder)
        _conclude(plan, bench, reference, reference_folder, available, rows, watch)
    return rows


def _conclude(
    plan: Plan,
    bench: Bench,
    job: Job,
    folder: RunFolder,
    available: Mapping[str, int],
    reference: list[Row],
    watch: Watch,
) -> Summary:
    """Write the summary of a complete run beside its reference's rows."""
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
    summary = summarize(rows, reference, facts)
    folder.write_summary(summary.to_json())
    watch.summary(rows, summary)
    if not summary.num_examples and summary.num_errors:
        raise RunFailed(
            f"no example of run {job.run_id} ({job.row.method}) succeeded; the first failed with {summary.problem}"
        )
    return summary


def make_plan(cfg: DictConfig, kept: Kept | None = None) -> Plan:
    """Check the configuration and build its objects; reads the model's config and the task's files, but no weights."""
    kept = kept or Kept()
    values = _plain(cfg, "")
    own_fields = {name: value for name, value in values.items() if name not in (*_GROUPS, *_ELSEWHERE)}
    shard = build(Shard, values.get("shard", {}), "shard.")
    settings: Settings = build(Settings, {**own_fields, "shard": shard}, "")
    protocol: Protocol = build(Protocol, {**values["protocol"], "first_token": settings.first_token}, "protocol.")
    method, policy = _method(cfg.method, "method.")
    reference_method, reference_policy = _method(cfg.reference, "reference.")
    metrics: Metrics = build(Metrics, values["metrics"], "metrics.")
    if metrics.fidelity and protocol.mode == "continue":
        raise ValueError(
            "metrics.fidelity=true: with protocol.mode=continue a question would follow different answers for FullKV "
            "and for the method; use protocol.mode=reset"
        )
    task: Task = _build(cfg.task, "task.")
    if not (task.scored or metrics.fidelity):
        raise ValueError(f"task={task.name} does not judge answers: its figure is the NLL, set metrics.fidelity=true")
    with naming(type(task), "task."):
        data = kept.fact(repr(task), task.fingerprint)
    if settings.split not in task.splits:
        raise ValueError(
            f"split={settings.split}: {task.name} with these settings has no such split; choose one of "
            f"{', '.join(task.splits)}"
        )
    spec = _build(cfg.model, "model.")
    model = kept.fact(repr(spec), lambda: describe(spec))
    context_length = getattr(task, "context_length", 0)
    if context_length > model.max_context:
        raise ValueError(
            f"task.context_length={context_length} is longer than the context of {model.name} ({model.max_context} "
            "tokens); give a smaller task.context_length or profile, or a model with a longer context"
        )
    policy = policy.prepare(model.name, model.fingerprint)
    reference_policy = reference_policy.prepare(model.name, model.fingerprint)
    fingerprints = {"model": [model.fingerprint, spec.chat], "task": [_identity(task), data]}

    def job(
        name: str, policy: KVPolicy, variant: str, budget: Budget, node: DictConfig, measured: Metrics = _UNMEASURED
    ) -> Job:
        origin = model.device, type(policy), type(task)
        environment = kept.fact(origin, lambda: Environment.current(*origin))
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
            protocol=protocol.name,
            mode=protocol.mode,
            answer_prefix_at=protocol.answer_prefix_at,
            instruction_at=protocol.instruction_at,
            first_token=protocol.first_token,
            prompt_source=task.prompt_source,
            device=model.device,
            dtype=model.dtype,
            git_sha=environment.git_sha,
        )
        identity = {field: getattr(row, field) for field in _IDENTITY} | fingerprints
        identity |= {"budget": _canonical(budget), "method": [name, _identity(policy)]}
        if measured.fidelity:
            identity |= {"fidelity": measured.fidelity_tokens}
            if (streams := sorted(measured.fidelity_streams)) != sorted(STREAMS):
                identity |= {"fidelity_streams": streams}
        own_fields = OmegaConf.masked_copy(cfg, [str(field) for field in cfg if field not in _ELSEWHERE])
        config = OmegaConf.merge(own_fields, {"method": node, **{field: getattr(budget, field) for field in _BOUNDS}})
        config.budget = budget.spec
        text = OmegaConf.to_yaml(config, resolve=True)
        return Job(policy, budget, replace(row, run_id=run_id(identity)), text, environment, measured)

    reference = job(reference_method, reference_policy, "", Budget("1.0"), cfg.reference)
    is_reference = (method, policy) == (reference_method, reference_policy) and not metrics.fidelity
    if not is_reference:
        policy.admit(settings.parsed_budget())
    own = (
        reference
        if is_reference
        else job(
            method,
            policy,
            _variant(),
            Budget("1.0") if method == reference_method else settings.parsed_budget(),
            cfg.method,
            metrics,
        )
    )
    return Plan(
        settings, protocol, task, model, spec, own, reference, reference_method, _build(cfg.tracker, "tracker.")
    )


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
    path = str(values.pop("_target_"))
    module, _, name = path.rpartition(".")
    try:
        target = getattr(import_module(module), name)
        fields(target)
    except Exception as error:  # whatever the user's own module raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{where}_target_={path} is no dataclass that can be imported ({reason})") from error
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
