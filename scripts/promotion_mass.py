"""Does recovery follow attention? FullKV's attention mass of promoted against demoted windows in the next interval.

    python scripts/promotion_mass.py --model smollm2_135m --tokens 256 --prompt 1024 --budget 0.1

QEvict and FullKV are teacher-forced on the same generated prose in lockstep. Every window that QEvict promotes or
demotes gets the mass FullKV puts on it in the interval that follows (the increment of Eq. 1, arXiv 2608.05326). Of the
demoted, `aged` had just left the recent tokens, `displaced` were candidates before. Differences are taken within a
layer and averaged per event; the interval is a bootstrap over events.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from methods.qevict import QEvict  # noqa: E402
from qevict_bench import attention  # noqa: E402
from qevict_bench.budget import Budget  # noqa: E402
from qevict_bench.models import LoadedModel, ModelSpec  # noqa: E402
from qevict_bench.policy import FULL  # noqa: E402
from qevict_bench.routing import LOW  # noqa: E402
from qevict_bench.session import KVSession, geometry_of  # noqa: E402
from qevict_bench.statistics import paired_interval  # noqa: E402
from tasks.ruler.prose import sentences  # noqa: E402


class Move(NamedTuple):
    """A window that changed tier when `seen` tokens were seen, and its mass in the interval after that."""

    seen: int
    place: tuple[int, int, int]  # layer, table head, first position
    kind: str
    mass: float


def windows(session: KVSession) -> dict[tuple[int, int, int], tuple[int, float]]:
    """Tier and Eq. 1 score of every window that is held."""
    found = {}
    for index, layer in session.layers.items():
        view = layer.view()
        for head, rows in enumerate(zip(view.pos_BHU[0], view.tier_BHU[0], view.columns["score"][0], strict=True)):
            units = zip(*(row.tolist() for row in rows), strict=True)
            found.update({(index, head, pos): (tier, score) for pos, tier, score in units if pos >= 0})
    return found


def measure(loaded: LoadedModel, policy: QEvict, budget: Budget, ids: list[int], prompt_len: int) -> list[Move]:
    """Every move of a decode event that a whole interval follows. `ids` are the prompt and what follows it."""
    new = len(ids) - prompt_len
    fitted = policy.fit(budget, geometry_of(loaded), prompt_len, new)
    watch = replace(fitted, decode_scores="every_step", aged_score="accumulated", decay=1.0)  # at fraction 1: FullKV
    full, tested = KVSession(loaded, watch, Budget("1.0"), 1), KVSession(loaded, fitted, budget, 1, max_new=new)
    for session in (full, tested):
        session.prefill([ids[:prompt_len]])
    before, scores, waiting, done = windows(tested), windows(full), list[Move](), list[Move]()
    for seen, token in enumerate(ids[prompt_len:], prompt_len + 1):
        full.decode([token])
        tested.decode([token])
        if (seen - prompt_len) % fitted.omega:
            continue
        now, after = windows(full), windows(tested)
        done += [move._replace(mass=now[move.place][1] - scores[move.place][1]) for move in waiting]
        waiting = []
        for place, (tier, _) in after.items():
            aged = place[2] + fitted.window > seen - fitted.omega - fitted.recent
            move = (before.get(place, (FULL, 0.0))[0], tier)
            if move in ((LOW, FULL), (FULL, LOW)):
                kind = "promoted" if tier == FULL else "aged" if aged else "displaced"
                waiting.append(Move(seen, place, kind, 0.0))
        before, scores = after, now
    return done


def compare(moves: list[Move], kinds: tuple[str, ...]) -> str:
    """Mass of promoted windows against windows of the given kinds, paired within layers, averaged per event."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    for seen, layer_head in sorted({(move.seen, move.place[:2]) for move in moves}):
        here = [move for move in moves if (move.seen, move.place[:2]) == (seen, layer_head)]
        up = [move.mass for move in here if move.kind == "promoted"]
        down = [move.mass for move in here if move.kind in kinds]
        if up and down:
            pairs.setdefault(seen, []).append((fmean(up), fmean(down)))
    if not pairs:
        return f"no event with promoted and {kinds} windows"
    up, down = ([fmean(pair[i] for pair in event) for event in pairs.values()] for i in (0, 1))
    found = paired_interval(up, down)
    values = f"{fmean(up):.4f} - {fmean(down):.4f} = {found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    return f"promoted - {'+'.join(kinds)}: {values} over {len(pairs)} events"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", help="a name in configs/model")
    parser.add_argument("--budget", default="0.1")
    for name, number in (("prompt", 1024), ("tokens", 256), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args(argv)
    fields = yaml.safe_load((ROOT / f"configs/model/{args.model}.yaml").read_text())
    loaded = ModelSpec(**{k: v for k, v in fields.items() if k != "_target_"}).load(attention.register())
    stream, text, num = sentences(Random(args.seed)), "", args.prompt + args.tokens
    while len(ids := loaded.tokenizer(text, verbose=False)["input_ids"]) < num:
        text += " ".join(next(stream) for _ in range(50)) + " "
    moves = measure(loaded, QEvict(), Budget(args.budget), ids[:num], args.prompt)
    print(", ".join(f"{name} {value}" for name, value in vars(args).items()))
    print(", ".join(f"{kind} {sum(m.kind == kind for m in moves)}" for kind in ("promoted", "aged", "displaced")))
    for kinds in (("aged", "displaced"), ("displaced",)):
        print(compare(moves, kinds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
