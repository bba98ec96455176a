"""Speed and memory of the engine as ratios: A and B take turns (ABBA) in one process, on one thread.

    python scripts/bench_engine.py --only b,c --model smollm2_135m --repeats 6 --csv results/bench.csv

a  FullKV against transformers' own generate (sdpa, dynamic cache): same prompt, same number of new tokens
b  a budget of 20 % against FullKV, seconds per example: `--methods`, by default QEvict (working copy on and off,
   preset `paper`), SnapKV, StreamingLLM
c  one routing event of one layer, 8 KV heads, D 128, in milliseconds of CPU time
d  peak memory of a long prefill above the loaded model, every method in a process of its own

A ratio is the median over pairs, its smallest and largest beside it. Absolute times hold for this machine and moment.

Case c: one row in bf16, QEvict as by default (windows of 8 tokens, key_params=window). Random keys and values are
routed at the budget, which is the first event; there are as many as it takes for full-precision and INT2 slots together
to be about `--event-slots` per head. A steady event follows every 8 more tokens, after `--moves` full-precision and as
many INT2 windows, drawn at random, have exchanged scores: about that many are promoted and demoted; ageing and
evictions come on top. place: what the policy is told (table, view, bytes) and decides; rebuild: the working copy.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench.accounting import PlacementCost, usage  # noqa: E402
from qevict_bench.attention import register  # noqa: E402
from qevict_bench.budget import Budget, Geometry, Infeasible  # noqa: E402
from qevict_bench.engine import generate  # noqa: E402
from qevict_bench.models import LoadedModel  # noqa: E402
from qevict_bench.policy import FULL  # noqa: E402
from qevict_bench.protocol import Protocol  # noqa: E402
from qevict_bench.rope import Rope  # noqa: E402
from qevict_bench.session import KVSession, geometry_of  # noqa: E402
from qevict_bench.store import LayerStore  # noqa: E402
from qevict_bench.task import Prompt  # noqa: E402

Times = dict[str, float]
COLUMNS = ("case", "measure", "median", "min", "max", "unit", "n", "a_s", "b_s")  # a_s, b_s: median seconds per side
Row = tuple[str, str, float, float, float, str, int, float, float]
MODELS = ("smollm2_135m", "gemma3_270m", "tiny")
WARM_UP = 2  # steady events that are not counted
COMPARED = "qevict;qevict, no working copy;qevict_paper;snapkv;streaming_llm"


def row(case: str, measure: str, values: Sequence[float], unit: str, a_s: float = 0.0, b_s: float = 0.0) -> Row:
    return case, measure, median(values), min(values), max(values), unit, len(values), a_s, b_s


def configured(group: str, name: str, **more: Any) -> Any:
    """What configs/GROUP/NAME.yaml describes."""
    fields = yaml.safe_load((ROOT / "configs" / group / f"{name}.yaml").read_text()) | more
    module, _, kind = fields.pop("_target_").rpartition(".")
    if group == "method":
        del fields["name"]
    return getattr(importlib.import_module(module), kind)(**fields)


def load(name: str, attention: str) -> LoadedModel:
    """A model on the CPU that never ends a generation before its last token."""
    loaded = configured("model", name, device="cpu").load(attention)
    loaded.model.generation_config.eos_token_id = None
    loaded.model.generation_config.pad_token_id = 0
    return replace(loaded, eos_ids=())  # type: ignore[no-any-return]


def random_ids(loaded: LoadedModel, length: int) -> list[int]:
    top = min(loaded.model.config.vocab_size, len(loaded.tokenizer)) - 3
    return torch.randint(0, top, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def example(loaded: LoadedModel, name: str, budget: str, length: int, new: int, first: str, copy: bool = True) -> Times:
    """Seconds of one prompt through `engine.generate`."""
    begin, prompt = time.perf_counter(), Prompt(tuple(random_ids(loaded, length)), (), 0, length)
    how: dict[str, Any] = {"max_new_tokens": [new], "stop": (), "seed": 0, "example_ids": ["bench"]}
    how |= {"protocol": Protocol(first_token=first), "working_copy": copy}
    [done] = generate(loaded, configured("method", name), Budget(budget), [prompt], **how)
    assert len(done.new_ids) == new
    return {"whole": time.perf_counter() - begin, "prefill": done.ttft_s, "decode": done.decode_s}


def in_turns(case: str, name: str, run_a: Callable[[], Times], run_b: Callable[[], Times], pairs: int) -> list[Row]:
    """Run A and B as AB BA AB ...; the ratios A / B of the times that both have."""
    a: list[Times] = []
    b: list[Times] = []
    for turn in range(pairs):
        for seen, run in [(a, run_a), (b, run_b)][:: -1 if turn % 2 else 1]:
            seen.append(run())
    rows = []
    for part in [part for part in a[0] if part in b[0]]:
        ratios = [x[part] / y[part] for x, y in zip(a, b, strict=True)]
        seconds = (median(times[part] for times in side) for side in (a, b))
        rows.append(row(case, f"{name}, {part}", ratios, "ratio", *seconds))
    return rows


def against_transformers(args: argparse.Namespace) -> list[Row]:
    ours, theirs = load(args.model, register()), load(args.model, "sdpa")
    ids = torch.tensor([random_ids(theirs, args.prompt_a)])
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": args.new_a, "do_sample": False}

    def run_theirs() -> Times:
        begin = time.perf_counter()
        with torch.inference_mode():
            assert theirs.model.generate(ids, **how).shape[1] == args.prompt_a + args.new_a
        return {"whole": time.perf_counter() - begin}

    def run_ours() -> Times:
        return example(ours, "full_kv", "1.0", args.prompt_a, args.new_a, "full")

    run_ours(), run_theirs()
    return in_turns("a", "full_kv / transformers", run_ours, run_theirs, args.repeats)


def against_full_kv(args: argparse.Namespace) -> Iterator[Row]:
    loaded = load(args.model, register())

    def run(label: str, new: int) -> Times:
        name, _, without = label.partition(", ")
        budget = "1.0" if name == "full_kv" else args.budget
        return example(loaded, name, budget, args.prompt_b, new, "compressed", not without)

    run("full_kv", 2)  # warms up
    for label in args.methods.split(";"):
        try:
            run(label, 2)
        except (Infeasible, ValueError) as error:  # too small a budget, or no calibration
            print(f"b    {label}: {error}", file=sys.stderr)
            continue
        run_a, run_b = (lambda label=who: run(label, args.new_b) for who in (label, "full_kv"))
        yield from in_turns("b", f"{label} / full_kv", run_a, run_b, args.repeats)


class Event:
    """The layer of case c (see above)."""

    def __init__(self, budget: str, slots: int) -> None:
        self.policy = configured("method", "qevict", window=8, q=0.7, key_params="window")
        self.geometry, self.budget = Geometry(1, 8, 4, 128, 2), budget
        config = LlamaConfig(hidden_size=4096, num_attention_heads=32, max_position_embeddings=131072)
        rope = Rope(LlamaRotaryEmbedding(config), ["full_attention"], ["default"])
        self.rng, like = torch.Generator().manual_seed(0), torch.empty((0, 128), dtype=torch.bfloat16)
        self.layer = LayerStore(self.policy, self.geometry, 0, rope, like, 1, lambda _: self.rng, lambda: like)
        self.prompt = int(
            slots / (3 * float(budget))
        )  # a share of 0.3 as it is, 0.7 in units of about 0.26 of the bytes
        self.layer.prompt_len = [self.prompt]
        self.layer.reserve([0], [self.prompt], 0)
        self.append(self.prompt)
        score = self.layer.view().columns["score"]
        score.copy_(torch.rand(score.shape, generator=self.rng))

    def append(self, tokens: int) -> None:
        keys, values = (torch.randn((1, 8, tokens, 128), generator=self.rng).bfloat16() for _ in range(2))
        self.layer.append([0], [tokens], keys, values)

    def exchange(self, moves: int) -> None:
        view = self.layer.view()
        score, tier, end = view.columns["score"][0, 0], view.tier_BHU[0, 0], view.end_BHU[0, 0]
        old = (view.pos_BHU[0, 0] > 0) & (end <= self.layer.seq_len[0] - 64)  # neither sink nor recent
        full, low = (torch.nonzero(old & mask)[:, 0] for mask in (tier == FULL, tier > FULL))
        full, low = (at[torch.randperm(len(at), generator=self.rng)[:moves]] for at in (full, low))
        score[full], score[low] = score[low].clone(), score[full].clone()

    def route(self) -> tuple[Times, Times]:
        """CPU milliseconds of the parts, and how many windows moved."""
        layer, room, times = self.layer, [self.policy.cadence.decode_every], [time.process_time()]
        allowed = Budget(self.budget).allowed_bytes(self.geometry, self.prompt, layer.seq_len[0], 0) or 0
        layer.table.cover([layer.seq_len[0] + room[0]])
        [placement] = self.policy.place([layer.view()], PlacementCost([layer], room, [allowed], False))
        times.append(time.process_time())
        moves = layer.apply(placement, room)
        times.append(time.process_time())
        assert usage(layer, 0).total <= allowed
        times.append(time.process_time())
        layer.read(True)
        times.append(time.process_time())
        layer.event_len = list(layer.seq_len)
        spans = [1000 * (end - begin) for begin, end in pairwise(times)]
        parts = zip(("place", "apply", "accounting", "rebuild"), spans, strict=True)
        counts = zip(moves._fields, torch.cat(moves).tolist(), strict=True)
        return {"place + apply": spans[0] + spans[1], **dict(parts)}, dict(counts)


def routing_event(args: argparse.Namespace) -> list[Row]:
    event = Event(args.budget, args.event_slots)
    first, _ = event.route()
    steady = []
    for _ in range(WARM_UP + args.events):
        event.append(event.policy.cadence.decode_every)
        event.exchange(args.moves)
        steady.append(event.route())
    rows = [row("c", f"first event, {name}", [ms], "ms") for name, ms in first.items()]
    for i, title, unit in ((0, "steady event, ", "ms"), (1, "windows, ", "per event")):
        for name in steady[0][i]:
            rows.append(row("c", title + name, [both[i][name] for both in steady[WARM_UP:]], unit))
    low = int((event.layer.table.rect().tier[0, 0] > FULL).sum()) * event.policy.unit
    held = [event.layer.full.count[0] + low]
    return [*rows, row("c", "held per head", held, "slots"), row("c", "seen", event.layer.seq_len, "tokens")]


def resident(field: str) -> int:
    """Bytes resident now (VmRSS) or at most (VmHWM), from Linux: a child's getrusage begins at its parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def one_prefill(args: argparse.Namespace) -> Times:
    """The child of case d: bytes before a prefill, the highest until then, the highest after it; its seconds."""
    loaded, policy, seen = load(args.model_d, register()), configured("method", args.child), {}
    budget = Budget("1.0" if args.child == "full_kv" else args.budget)
    for length in (512, args.prompt_d):  # the short one touches all weights
        with suppress(OSError):  # where Linux lets us, forget the highest until now
            Path("/proc/self/clear_refs").write_text("5")
        seen = {"before": resident("VmRSS"), "until": resident("VmHWM"), "s": -time.perf_counter()}
        session = KVSession(loaded, policy.fit(budget, geometry_of(loaded), length, 1), budget, 1)
        session.prefill([random_ids(loaded, length)])
        session.decode([0])
        seen["s"] += time.perf_counter()
    return {**seen, "peak": resident("VmHWM")}


def prefill_memory(args: argparse.Namespace) -> list[Row]:
    rows, full = [], 0.0
    for name in ("full_kv", *args.methods_d.split(";")):
        command = [sys.executable, __file__, *args.argv, "--child", name]
        seen = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        peak = (seen["peak"] - seen["before"]) / 1e9
        full = full or peak
        at_most = ", at most" if seen["peak"] <= seen["until"] else ""
        rows.append(row("d", f"{name} prefill peak{at_most}", [peak], "GB", seen["s"]))
        rows.append(row("d", f"{name} - full_kv", [peak - full], "GB"))
    return rows


CASES: dict[str, Callable[[argparse.Namespace], Iterable[Row]]] = {
    "a": against_transformers,
    "b": against_full_kv,
    "c": routing_event,
    "d": prefill_memory,
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="a,b,c,d", help="cases, separated by commas")
    parser.add_argument("--model", default="smollm2_135m", choices=MODELS, help="model of cases a and b")
    parser.add_argument("--model-d", default="gemma3_270m", choices=MODELS, help="model of case d")
    parser.add_argument("--budget", default="0.2", help="fraction of FullKV bytes in b, c and d")
    parser.add_argument("--methods", default=COMPARED, help="yamls of configs/method for case b, separated by ;")
    parser.add_argument("--methods-d", default="snapkv;qevict", help="the same for case d, beside full_kv")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    sizes = {"repeats": 6, "threads": 1, "prompt-a": 512, "new-a": 48, "prompt-b": 2048, "new-b": 32, "events": 12}
    for name, size in (sizes | {"event-slots": 32768, "moves": 8, "prompt-d": 16384}).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args(argv)
    if unknown := set(args.only.split(",")) - set(CASES):
        parser.error(f"--only {args.only}: {', '.join(sorted(unknown))} is no case; choose from {', '.join(CASES)}")
    args.argv = argv
    torch.set_num_threads(args.threads)
    if args.child:
        print(json.dumps(one_prefill(args)))
        return 0
    print(f"torch {torch.__version__}, {args.threads} thread(s), model {args.model} ({args.model_d} in d)")
    print(("{:5}{:42}" + 3 * "{:>10}" + "  {:10}{:>3}{:>9}{:>9}").format(*COLUMNS), flush=True)
    rows = []
    for case in sorted(set(args.only.split(","))):
        for line in CASES[case](args):
            print(("{:5}{:42}" + 3 * "{:10.3f}" + "  {:10}{:3}{:9.2f}{:9.2f}").format(*line), flush=True)
            rows.append(line)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
