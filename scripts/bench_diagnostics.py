"""What diagnostics cost per decoded token: python scripts/bench_diagnostics.py --model smollm2_135m --prompt 2048

Plain QEvict decodes the same tokens that lockstep observes and measures.py condenses; both are timed over a short and a
long stretch, and the difference divided by the difference in tokens, so that reading the prompt, which FullKV's side
does too, falls out. (FullKV's continuation, which diagnose.py makes once for all its runs, is left out.) The two
alternate; per round their ratio, then its median and range. --plain-twice compares plain with itself: the noise. Prints
the peak resident memory too. Minutes on a CPU.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from statistics import median

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from methods.qevict import QEvict  # noqa: E402
from qevict_bench.attention import register  # noqa: E402
from qevict_bench.budget import Budget  # noqa: E402
from qevict_bench.lockstep import Part, Stream, observe_streams  # noqa: E402
from qevict_bench.measures import Answer, measure  # noqa: E402
from qevict_bench.models import ModelSpec  # noqa: E402
from qevict_bench.session import KVSession, geometry_of  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", help="a name in configs/model")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--tokens", type=int, nargs=2, default=(16, 80), help="decoded: short and long stretch")
    parser.add_argument("--streams", type=int, default=1, help="side by side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="0.2")
    parser.add_argument("--plain-twice", action="store_true")
    args = parser.parse_args()
    fields = yaml.safe_load((ROOT / f"configs/model/{args.model}.yaml").read_text())
    loaded = ModelSpec(**{k: v for k, v in fields.items() if k != "_target_"}).load(register())
    short, long = args.tokens
    rng = torch.Generator().manual_seed(0)
    vocab = loaded.model.config.vocab_size
    ids = torch.randint(vocab, (args.streams, args.prompt + long), generator=rng).tolist()
    budget = Budget(args.budget)

    def plain(num: int) -> float:
        policy = QEvict().fit(budget, geometry_of(loaded), args.prompt, num)
        session = KVSession(loaded, policy, budget, args.streams, max_new=num)
        session.prefill([row[: args.prompt] for row in ids])
        begin = time.process_time()
        for step in range(args.prompt, args.prompt + num):
            session.decode([row[step] for row in ids])
        return time.process_time() - begin

    def observed(num: int) -> float:
        parts = [
            (Part(tuple(row[: args.prompt]), False), Part(tuple(row[args.prompt : args.prompt + num]), True))
            for row in ids
        ]
        streams = [Stream(str(i), each) for i, each in enumerate(parts)]
        begin = time.process_time()
        for record in observe_streams(loaded, QEvict(), budget, streams, seed=0):
            measure(record, Answer((), 0), seed=0)
        return time.process_time() - begin

    ratios = []
    for number in range(args.rounds):
        each = []
        for timed in (plain, plain if args.plain_twice else observed):
            low, high = timed(short), timed(long)
            each.append((high - low) / (long - short))
        ratios.append(each[1] / each[0])
        print(
            f"round {number + 1}: plain {1000 * each[0]:.1f} ms, {'again' if args.plain_twice else 'observed'} "
            f"{1000 * each[1]:.1f} ms of CPU per step of {args.streams} streams, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"ratio {median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f}); peak resident {peak:.2f} GiB")


if __name__ == "__main__":
    main()
