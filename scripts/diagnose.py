"""What does a method lose, and how does it route? python scripts/diagnose.py method=qevict_paper budget=0.2

The method and FullKV read the same streams side by side: a prompt, then FullKV's own greedy continuation of it, which
both are forced to follow. Measured is what FullKV's attention falls on, by the method's tiers: future missed mass, mass
by tier, selection churn, LIR, score agreement, regret, needle fate, and the bytes of the ledger (definitions in
src/qevict_bench/diagnostics.py, names of all scalars in measures.py). `experiment=figure1` runs variants of a method on
the same streams; `+runs.NAME.FIELD=VALUE` adds one; with tier_off=true each runs a second time, as NAME-off, with
nothing attending to its quantized tier. Fields are in configs/diagnose.yaml. Minutes on a CPU.

Writes into output_dir: scalars.csv (a row per run and stream), summary.csv (means and intervals over streams), one csv
per family of curves, figures as png and pdf. The report goes to stdout. For methods of the class QEvict with a low-bit
tier, the run `oscillation` replaces the scores on the first stream by the ledger's worst case (oscillation.py).
Exit codes: 0 done, 1 a step went over its budget, 2 a mistake in the input (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

import run as cli  # noqa: E402
from methods.full_kv import FullKV  # noqa: E402
from methods.qevict import QEvict  # noqa: E402
from qevict_bench.attention import register  # noqa: E402
from qevict_bench.budget import Budget  # noqa: E402
from qevict_bench.closing import PAPER_MODELS  # noqa: E402
from qevict_bench.diagnosis import Plan, Run, Text, continued, layer_errors, loops, observe_all, write_tables  # noqa: E402
from qevict_bench.diagnosis_figures import figures_of  # noqa: E402
from qevict_bench.figures import save  # noqa: E402
from qevict_bench.findings import Findings, read_paper, render  # noqa: E402
from qevict_bench.measures import differences, spreads  # noqa: E402
from qevict_bench.models import LoadedModel, ModelSpec  # noqa: E402
from qevict_bench.policy import KVPolicy  # noqa: E402
from qevict_bench.results import RunFailed  # noqa: E402
from qevict_bench.runner import SMALL_BYTES  # noqa: E402
from qevict_bench.settings import MAX_SEED, build  # noqa: E402
from qevict_bench.task import Prompter  # noqa: E402
from tasks.drift.topics import TOPICS, sentences  # noqa: E402
from tasks.needle import NeedleGrid  # noqa: E402

log = logging.getLogger(__name__)
WORST = "oscillation"
OFF = "-off"
_NEEDLE_TOKENS = 32  # what NeedleGrid leaves for the answer


@dataclass(frozen=True)
class Streams:
    """`source` prose: on the topics of tasks/drift, one stream each, in turn, drawn anew each time; files: consecutive
    stretches of the .txt files at `path`, one of each file in turn; needle: cells of depth 0, 25, 50, 75 and 100 % in
    turn. `question` appended: the question is a step of its own behind the context (query-agnostic).
    """

    source: Literal["prose", "files", "needle"]
    count: int
    path: str
    question: Literal["prefilled", "appended"]

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count={self.count} is not positive; give an integer of at least 1")
        if (self.source == "files") != bool(self.path):
            raise ValueError(
                f"path={self.path or '(empty)'} does not go with streams.source={self.source}; only files have one"
            )
        if self.source != "needle" and self.question != "prefilled":
            raise ValueError(
                f"question={self.question} does not go with streams.source={self.source}; only needle has one"
            )


@dataclass(frozen=True)
class Diagnosis:
    """The fields of configs/diagnose.yaml, checked; `method` is its name."""

    model: ModelSpec
    method: str
    streams: Streams
    budget: str
    basis: str
    enforce: str
    small_budget: str
    prompt_tokens: int
    new_tokens: int
    codec_scores: bool
    tier_off: bool
    batch_size: int
    workers: int
    seed: int
    paper: str
    output_dir: Path

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 2), ("new_tokens", 1), ("batch_size", 1), ("workers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too small; give an integer of at least {least}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} is out of range; give an integer from 0 to {MAX_SEED}")
        self.parsed_budget()

    def parsed_budget(self) -> Budget:
        return Budget(self.budget, self.basis, self.enforce, self.small_budget)


# ---- text ----


def texts_of(asked: Diagnosis, loaded: LoadedModel) -> list[Text]:
    """The streams that `asked` names, each opened as the tokenizer opens a text. Raises ValueError if there are too
    few tokens."""
    if asked.prompt_tokens + asked.new_tokens > loaded.max_context:
        raise ValueError(
            f"prompt_tokens={asked.prompt_tokens} with new_tokens={asked.new_tokens} exceeds the context of "
            f"{loaded.name} ({loaded.max_context} tokens); give fewer"
        )
    make = {"prose": _prose, "files": _files, "needle": _needles}[asked.streams.source]
    return list(make(asked, loaded))


def _prose(asked: Diagnosis, loaded: LoadedModel) -> Iterable[Text]:
    for number in range(asked.streams.count):
        topic, round_ = TOPICS[number % len(TOPICS)], number // len(TOPICS)
        name = f"{topic.title.removeprefix('the ')} {round_ + 1}"
        stream, text, ids = sentences(topic, Random(f"{asked.seed}/{name}")), "", list[int]()
        while len(ids) < asked.prompt_tokens:
            text += " ".join(islice(stream, 1 + asked.prompt_tokens // 16)) + " "
            ids = loaded.tokenizer(text, verbose=False)["input_ids"]
        yield Text(name, tuple(ids[: asked.prompt_tokens]))


def _files(asked: Diagnosis, loaded: LoadedModel) -> Iterable[Text]:
    path = Path(asked.streams.path).expanduser()
    paths = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    opening = list(loaded.tokenizer("")["input_ids"])
    size, stretches = asked.prompt_tokens - len(opening), list[list[Text]]()
    try:
        for each in paths:
            ids = loaded.tokenizer(each.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            cuts = range(0, len(ids) - size + 1, size)[: asked.streams.count]
            stretches.append(
                [
                    Text(
                        f"{each.relative_to(path.parent if each == path else path)}@{cut}",
                        (*opening, *ids[cut : cut + size]),
                    )
                    for cut in cuts
                ]
            )
    except (OSError, UnicodeError) as error:
        raise ValueError(f"streams.path={path} cannot be read ({error}); give text files in UTF-8") from None
    in_turn = [own[turn] for turn in range(asked.streams.count) for own in stretches if turn < len(own)]
    if len(in_turn) < asked.streams.count:
        raise ValueError(
            f"streams.path={path} has text for {len(in_turn)} streams of {size} tokens, but streams.count="
            f"{asked.streams.count}; give more text, or fewer or shorter streams"
        )
    return in_turn[: asked.streams.count]


def _needles(asked: Diagnosis, loaded: LoadedModel) -> Iterable[Text]:
    prompter, count = Prompter(loaded.tokenizer, loaded.chat), asked.streams.count
    try:
        task = NeedleGrid(lengths=(asked.prompt_tokens + _NEEDLE_TOKENS,))
        cells = len(task.subsets)
        each = -(-count // cells)
        examples = list(task.examples(prompter, each, asked.seed, "test"))
        for number in range(count):
            example = examples[number % cells * each + number // cells]
            prompt = prompter.encode(example)
            cut = prompt.context_tokens if asked.streams.question == "appended" else len(prompt.ids)
            yield Text(example.id, prompt.ids[:cut], prompt.ids[cut:], prompt.answer_positions)
    except ValueError as error:
        raise ValueError(f"prompt_tokens={asked.prompt_tokens} (+ {_NEEDLE_TOKENS} to answer): {error}") from None


# ---- the command ----


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="diagnose")
def main(cfg: DictConfig) -> None:
    try:
        print(run(*checked(cfg), _given()), flush=True)
    except (ValueError, RunFailed, OmegaConfBaseException) as error:
        sys.exit(cli.report(error))


def checked(cfg: DictConfig) -> tuple[Diagnosis, dict[str, KVPolicy]]:
    """What the configuration asks for, and the method's variants by name. Raises ValueError."""
    values: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    method, variants = values.pop("method"), values.pop("runs") or {}
    label, target = method.pop("name"), get_class(method.pop("_target_"))
    if not all(isinstance(fields_, dict) for fields_ in variants.values()):
        raise ValueError(f"runs={variants} is no mapping of names to fields; add +runs.NAME.FIELD=VALUE")
    for name in variants:
        if name == WORST or name.endswith(OFF):
            raise ValueError(f"runs.{name}: {WORST} and names that end in {OFF} are the script's own; take another")
    runs = {name: build(target, {**method, **changes}, f"runs.{name}.") for name, changes in variants.items()}
    model = build(get_class(values["model"].pop("_target_")), values["model"], "model.")
    streams = build(Streams, values["streams"], "streams.")
    if target is FullKV:  # which no smaller budget admits
        values["budget"] = "1.0"
    made: Diagnosis = build(Diagnosis, {**values, "model": model, "streams": streams, "method": label}, "")
    return made, runs or {label: build(target, method, "method.")}


def run(asked: Diagnosis, runs: Mapping[str, KVPolicy], given: str = "") -> str:
    """Measure, write, and return the report; `given` names the fields on the command line."""
    begin, budget = time.perf_counter(), asked.parsed_budget()
    paper = read_paper(Path(asked.paper)) if asked.paper else []
    for policy in runs.values():
        policy.admit(budget)
    loaded = asked.model.load(register())
    texts = texts_of(asked, loaded)
    folder = _folder(asked.output_dir)
    streams = continued(loaded, texts, asked.new_tokens, asked.batch_size)
    log.info("FullKV continued %d streams (%.0f s)", len(streams), time.perf_counter() - begin)
    plan = Plan(asked.model, budget, texts, streams, asked.codec_scores, asked.batch_size, asked.seed)
    jobs = {name: Run(policy) for name, policy in runs.items()}
    if asked.tier_off:
        jobs |= {f"{name}{OFF}": Run(policy, low_hidden=True) for name, policy in runs.items() if _quantizes(policy)}
    worst = [policy for policy in runs.values() if isinstance(policy, QEvict) and _quantizes(policy)][:1]
    if worst:
        jobs[WORST] = Run(worst[0], oscillates=True)
    done = {}
    for name, observed in observe_all(plan, loaded, jobs, asked.workers):
        done[name] = observed
        log.info("%s is measured (%.0f s)", name, time.perf_counter() - begin)
    table = {name: spreads(observed.streams) for name, observed in done.items()}
    files = write_tables(folder, done, {stream.name: loops(stream) for stream in streams}, table)
    oscillation = done.pop(WORST, None)
    title = title_of(asked, loaded, given)
    for name, figure in figures_of(done, oscillation, f"{title[0]}. {title[1]}; {title[2]}.").items():
        files += save(figure, folder, name)
    return render(
        Findings(
            title=title,
            num_streams=len(streams),
            num_looping=sum(map(loops, streams)),
            runs={name: table[name] for name in done},
            kl_change={
                (first, second): change
                for (first, second), change in differences({name: x.streams for name, x in done.items()}, "kl").items()
                if OFF not in (first[-4:], second[-4:]) or second == first + OFF
            },
            errors={name: layer_errors(observed.streams) for name, observed in done.items()},
            worst=oscillation.streams[0].scalars if oscillation else {},
            paper=paper,
            files=files,
        )
    )


def _quantizes(policy: KVPolicy) -> bool:
    return len(policy.tiers) > 1 and not (isinstance(policy, QEvict) and policy.evict and policy.q == 0)


def title_of(asked: Diagnosis, loaded: LoadedModel, given: str) -> list[str]:
    """Three lines: method and model, streams, budget and what this is no reproduction of."""
    small = 2 * sum(weight.numel() for weight in loaded.model.parameters()) < SMALL_BYTES
    claim = "not one of the paper's models: not a reproduction"
    if loaded.name in PAPER_MODELS:
        claim = "the paper's model; texts and prompts are not the paper's"
    elif small:
        claim = "small model: not a reproduction"
    source = {"files": f"{asked.streams.path}", "needle": f"needle (own wording), question {asked.streams.question}"}
    text = source.get(asked.streams.source, "prose (own wording, drift topics)")
    return [
        f"{asked.method}{f' ({given})' if given else ''} on {loaded.name} ({loaded.dtype}, {loaded.device}), "
        f"{len(loaded.compressible_layers)} of {loaded.num_layers} layers compressible",
        f"{asked.streams.count} streams of {text}, {asked.prompt_tokens} tokens and FullKV's {asked.new_tokens} next, "
        f"seed {asked.seed}",
        f"budget {asked.budget}, basis {asked.basis}, enforce {asked.enforce}; {claim}",
    ]


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output_dir={path} cannot be made ({error.strerror}); name a folder") from error
    return path


def _given() -> str:
    """The method's fields that the command line sets."""
    given = [text.lstrip("+") for text in HydraConfig.get().overrides.task]
    return ", ".join(text.removeprefix("method.") for text in given if text.startswith("method."))


def job() -> None:
    """`main`, unless a field is unknown: of those, `cli` would name the known ones of run.py."""
    known = [field.name for field in fields(Diagnosis)] + ["runs", "experiment"]
    for text in sys.argv[1:]:
        named = re.match(r"[+~]*(?!hydra\b)(\w+)[\w./]*=", text)
        if named and named[1] not in known:
            raise ValueError(f"{named[1]} is no field; fields: {', '.join(known)}")
        nested = re.match(r"[+~]*(streams\.(\w+))=", text)
        if nested and nested[2] not in (own := [field.name for field in fields(Streams)]):
            raise ValueError(f"{nested[1]} is no field; fields of streams: {', '.join(own)}")
    logging.getLogger("fontTools").setLevel(logging.WARNING)  # it tells what it embeds
    main()


if __name__ == "__main__":
    sys.exit(cli.command_line(sys.argv[1:], job))
