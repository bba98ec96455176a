"""What a method's cache lost of a conversation with drifting questions, turn by turn.

    python scripts/drift_lockstep.py task=drift protocol=multi_query protocol.mode=continue method=qevict budget=0.1

Takes the fields of run.py. FullKV and the method read the same conversations (`limit` counts turns): every question is
appended, then the opening of its gold answer is decoded token by token, whatever the method would say. A line per turn
goes to RESULTS_DIR/.lockstep: KL(p_full || p_method) in nats and top-1 agreement, means over the turn's tokens, and the
share of FullKV's attention on what the method had evicted (missed). scripts/drift_table.py shows them.
Exit codes: 0; 2 for a mistake in the input; 130 interrupted.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

import run as cli  # noqa: E402
from qevict_bench.attention import register  # noqa: E402
from qevict_bench.budget import Infeasible  # noqa: E402
from qevict_bench.lockstep import Part, Stream, observe_streams  # noqa: E402
from qevict_bench.record import Record  # noqa: E402
from qevict_bench.results import write_atomic  # noqa: E402
from qevict_bench.runner import make_plan  # noqa: E402
from qevict_bench.task import Example, Prompter, Task  # noqa: E402

ANSWER_TOKENS = 64  # of a gold answer: the code, and some sentences about the topic
FOLDER = ".lockstep"


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="run")
def main(cfg: DictConfig) -> None:
    try:
        path = measure(cfg)
    except (ValueError, Infeasible) as error:
        sys.exit(cli.report(ValueError(str(error))))
    print(path)


def measure(cfg: DictConfig) -> Path:
    """Read the conversations that `cfg` describes on both sides; the file with a line per turn."""
    plan = make_plan(cfg)
    settings, task = plan.settings, plan.task
    if task.name != "drift" or plan.protocol.mode != "continue":
        raise ValueError(
            f"task={task.name} protocol.mode={plan.protocol.mode}: give task=drift protocol=multi_query "
            "protocol.mode=continue"
        )
    loaded = plan.spec.load(register())
    prompter = Prompter(loaded.tokenizer, loaded.chat)
    block = task.turns * settings.batch_size  # run.py runs whole blocks
    limit = -(-settings.limit // block) * block
    examples = list(task.examples(prompter, limit, settings.seed, settings.split))
    talks = [examples[i : i + task.turns] for i in range(0, len(examples), task.turns)]
    records: list[Record] = []
    for begin in range(0, len(talks), settings.batch_size):
        streams = [stream_of(prompter, talk) for talk in talks[begin : begin + settings.batch_size]]
        records += observe_streams(loaded, plan.job.policy, plan.job.budget, streams, seed=settings.seed)
    path = settings.results_dir / FOLDER / f"{plan.job.run_id}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line for talk, record in zip(talks, records, strict=True) for line in turns_of(task, talk, record)]
    write_atomic(path, "".join(f"{line}\n" for line in [HEADER, *lines]))
    return path


HEADER = "example_id,group,distance,reasked,kl,agreement,missed,fraction"


def stream_of(prompter: Prompter, talk: Sequence[Example]) -> Stream:
    """The context, then question and answer in turns; a question's last token is decoded, as in generation."""
    first = prompter.encode(talk[0])
    parts = [Part(first.ids[: first.context_tokens], decoded=False)]
    questions = [first.ids[first.context_tokens :], *(prompter.follow_up(example).ids for example in talk[1:])]
    for question, example in zip(questions, talk, strict=True):
        answer = prompter.continuation(example)[:ANSWER_TOKENS]
        if len(answer) < ANSWER_TOKENS:
            raise ValueError(f"the gold answer of {example.id} has {len(answer)} tokens, {ANSWER_TOKENS} are compared")
        parts += [Part(question[:-1], decoded=False), Part((*question[-1:], *answer[:-1]), decoded=True)]
    return Stream(talk[0].group, tuple(parts))


def turns_of(task: Task, talk: Sequence[Example], record: Record) -> list[str]:
    """Means over the decoded tokens of each turn."""
    decoded = record.decoded_S.nonzero()[:, 0].split(ANSWER_TOKENS)
    lines = []
    for example, steps in zip(talk, decoded, strict=True):
        labels = task.metrics("", example)
        values = [float(x[steps].double().mean()) for x in (record.kl_S, record.same_S.float(), record.missed_S)]
        numbers = ",".join(f"{value:.6g}" for value in (*values, record.fraction))
        lines.append(f"{example.id},{example.group},{labels['distance']:.0f},{labels['reasked']:.0f},{numbers}")
    return lines


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    sys.exit(cli.command_line(sys.argv[1:], main))
