"""Compare runs on the examples they share, every pair of them.

    python scripts/compare.py RUN RUN [RUN ...] [--subsets] [--allow=versions] [--results-dir results/runs]

RUN is the folder of a run or the id of one in --results-dir; it need not be finished. Differences are paired: first
minus second on the same examples, in points, macro over subsets, with a bootstrap over examples (over contexts, where
examples share them). Runs must agree in everything but method and budget. Exit codes: 0; 2 for a mistake in the input.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from qevict_bench import alarms  # noqa: E402
from qevict_bench.comparison import MIN_DIFFERING, Comparison, Comparisons, Pair, compare, pair, points, shown_p  # noqa: E402
from qevict_bench.runs import (  # noqa: E402
    Difference,
    Run,
    data_difference,
    one_line,
    origin_differences,
    read_run,
    setting_differences,
)
from qevict_bench.statistics import ALPHA, holm, spearman  # noqa: E402
from qevict_bench.terminal import allow_any_sign, columns, cut, fitted, wrapped  # noqa: E402

WIDTH = 100


@dataclass(frozen=True)
class Match:
    """Two runs, their pairs by subset, and what they say."""

    first: Run
    second: Run
    pairs: Mapping[str, Sequence[Pair]]
    found: Comparisons

    @property
    def label(self) -> str:
        return f"{self.first.number} - {self.second.number}"

    @property
    def num_either(self) -> int:
        """Examples that one run or the other has, whatever their status."""
        return len({row.example_id for run in (self.first, self.second) for row in run.rows})

    @property
    def flat(self) -> list[Pair]:
        return [both for members in self.pairs.values() for both in members]


def load(name: str, results_dir: Path, number: int) -> Run:
    """Read one run; raises ValueError (one line) for anything that is missing or damaged."""
    path = next((path for path in (Path(name), results_dir / name) if path.is_dir()), None)
    if path is None:
        raise ValueError(f"{name} is neither the folder of a run nor the id of one in {results_dir}; see --results-dir")
    run = read_run(path, number)
    if not run.scored:
        raise ValueError(f"{path} has no scores (task={run.first.task}); compare the NLL in the tables of run.py")
    return run


def check(first: Run, second: Run, allowed: Sequence[str]) -> None:
    """Raise ValueError, naming the field and both values, unless the runs may be compared."""
    for difference in setting_differences(first, second):
        _refuse(first, second, difference, "compare runs that differ in method and budget only")
    if "versions" not in allowed:
        for difference in origin_differences(first, second):
            _refuse(first, second, difference, "run one again, or compare all the same: --allow=versions")
    if other := data_difference(first.rows, second.rows):
        _refuse(first, second, other, "their task data are not the same")


def _refuse(first: Run, second: Run, difference: Difference, remedy: str) -> None:
    name, mine, theirs = difference
    raise ValueError(
        f"{first.path.name} and {second.path.name} cannot be compared: {name} is {_short(mine)} in one and "
        f"{_short(theirs)} in the other; {remedy}"
    )


def report(runs: Sequence[Run], matches: Sequence[Match], subsets: bool) -> Iterator[str]:
    """The lines of the report, at most WIDTH columns each."""
    adjusted = dict(zip((m.label for m in matches), holm([_p(m.found.overall) for m in matches]), strict=True))
    yield from _title(runs)
    yield ""
    yield from _run_table(runs)
    yield ""
    yield from _pair_table(matches, adjusted)
    if subsets:
        for match in matches:
            yield from _subset_table(match)
    found = list(_alarms(runs, matches))
    if found:
        yield from ["", "Before you believe the differences:", *found]


def _title(runs: Sequence[Run]) -> Iterator[str]:
    row = runs[0].rows[0]
    wording = "-style (own wording)" if row.prompt_source == "own" else f" ({row.prompt_source} wording)"
    devices = ", ".join(sorted({run.rows[0].device for run in runs}))
    yield from _wrapped(f"{row.task.upper()}{wording} on {row.model} ({row.dtype}, {devices})", "")
    yield f"protocol {row.protocol_words}, first_token {row.first_token}, split {row.split}, seed {row.seed}"
    mixed = {name for a, b in combinations(runs, 2) for name, _, _ in origin_differences(a, b)}
    if mixed:
        yield from _wrapped(f"NOT THE SAME SOFTWARE (--allow=versions): {', '.join(sorted(mixed))} differ", "")
    if any(run.environment.git_dirty for run in runs):
        yield "Some runs were made with uncommitted changes."
    sizes = sorted({run.rows[0].batch_size for run in runs})
    if len(sizes) > 1:
        yield f"Batch sizes differ ({', '.join(map(str, sizes))}): 16-bit arithmetic may answer differently."


def _run_table(runs: Sequence[Run]) -> Iterator[str]:
    header = f"{'no':>2}  {'run':12}  {'method':24}  {'budget':8}  {'memory':>6}  {'ok':>5}  {'others':>6}  state"
    yield header
    yield "-" * WIDTH
    for run in runs:
        row, num_good = run.rows[0], len(run.good)
        memory = f"{run.memory:6.3f}" if run.good else f"{'n/a':>6}"
        state = "summarized" if run.finished else "partial"
        yield (
            f"{run.number:2}  {fitted(row.run_id, 12)}  {fitted(row.method, 24)}  {fitted(row.budget, 8)}  {memory}  "
            f"{num_good:5}  {len(run.rows) - num_good:6}  {state}"
        )
        if row.variant:
            yield from _wrapped(row.variant, " " * 18)


def _pair_table(matches: Sequence[Match], adjusted: Mapping[str, float]) -> Iterator[str]:
    yield (
        f"{'pair':>7} {'n':>5} {'first':>6} {'second':>6} {'difference, 95 % interval':<25} "
        f"{'p':>5}  {'Holm':>5}  {'w/t/l':>11} {'exact':>5} {'noise':>5} {'rho':>5}"
    )
    yield "-" * WIDTH
    verdicts = []
    for match in matches:
        found = match.found.overall
        if found is None:
            yield f"{match.label:>7} {0:5} no example is ok in both"
            continue
        diff, p = found.diff.value, adjusted[match.label]
        stands_out = found.stands_out(p)
        both = ([points(row) for row in side] for side in zip(*match.flat, strict=True))
        correlation = spearman(*both)
        rho = "n/a" if correlation is None else f"{correlation:.2f}"
        yield _figures(f"{match.label:>7}", found, p, stands_out, show_p=True) + f" {found.noise:5.1f} {rho:>5}"
        if stands_out:
            high, low = (match.first, match.second) if diff > 0 else (match.second, match.first)
            bytes_differ = abs(high.memory - low.memory) > alarms.SAME_BYTES * max(high.memory, low.memory)
            memory = f" with {high.memory:.3f} against {low.memory:.3f} of the bytes" if bytes_differ else ""
            verdicts.append(f"{high.number} scores above {low.number} by {abs(diff):.1f}{memory}")
    yield "-" * WIDTH
    verdict = "; ".join(verdicts) or "no difference is larger than noise, so nothing here ranks these runs"
    yield from _wrapped(f"After Holm over {len(matches)} pair{'s' * (len(matches) > 1)} (5 %): {verdict}.", "")
    yield "p: bootstrap of the macro difference; exact: McNemar (sign test for scores other than 0 and 1);"
    yield "w/t/l: wins, ties, losses; noise: smaller differences do not stand out; rho: Spearman of the scores;"
    yield f"*: Holm's p at most 5 %, beyond noise, and at least {MIN_DIFFERING} examples differ"
    for match in matches:
        found = match.found.overall
        if len(match.flat) < match.num_either:
            yield f"{match.label}: {len(match.flat)} of {match.num_either} examples shared (ok in both)"
        if found is not None and found.num_clusters < found.num_pairs:
            yield f"{match.label}: {found.num_pairs} examples share {found.num_clusters} contexts, resampled as such"


def _subset_table(match: Match) -> Iterator[str]:
    width = max([len("subset"), *(columns(cut(name, 28)) for name in match.found.subsets)])
    yield ""
    yield (
        f"{match.label:{width}} {'n':>5} {'first':>6} {'second':>6} {'difference, 95 % interval':<25} "
        f"{'Holm':>5}  {'w/t/l':>11} {'exact':>5}"
    )
    yield "-" * (width + 72)
    for name, found in match.found.subsets.items():
        p = match.found.adjusted[name]
        yield _figures(fitted(name, width), found, p, p <= ALPHA, show_p=False)


def _figures(label: str, found: Comparison, adjusted: float, star: bool, *, show_p: bool) -> str:
    diff = found.diff
    interval = f"{diff.value:+6.1f}  [{diff.low:+6.1f}, {diff.high:+6.1f}]"
    own_p = f"{shown_p(found.p)}  " if show_p else ""
    counts = f"{found.wins}/{found.ties}/{found.losses}"
    return (
        f"{label} {found.num_pairs:5} {found.score:6.1f} {found.reference:6.1f} {interval:<25} "
        f"{own_p}{shown_p(adjusted)}{'*' if star else ' '} {counts:>11} {shown_p(found.exact_p)}"
    )


def _alarms(runs: Sequence[Run], matches: Sequence[Match]) -> Iterator[str]:
    """Runs and pairs with the same alarm share it."""
    labels: dict[str, list[str]] = {}
    for run in runs:
        for line in alarms.lines(alarms.row_alarms(run.rows)):
            labels.setdefault(line, []).append(str(run.number))
    for match in matches:
        made = alarms.identical(match.flat, str(match.second.number))
        if match.second.is_reference and not match.first.is_reference:
            made += [*alarms.above(match.found), *alarms.limits(match.found)]
        for line in alarms.lines(made):
            labels.setdefault(line, []).append(match.label)
    for line, names in labels.items():
        yield from _wrapped(f"{', '.join(names)}: {line}", "  ")


def _p(found: Comparison | None) -> float:
    return 1.0 if found is None else found.p


def _wrapped(text: str, indent: str) -> list[str]:
    return wrapped(text, WIDTH, indent, indent + "  ")


def _short(value: object) -> str:
    return cut(str(value), 60) or "empty"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder or id of a run; at least two")
    parser.add_argument("--subsets", action="store_true", help="a table per pair with every subset")
    parser.add_argument("--results-dir", type=Path, default=Path("results/runs"))
    parser.add_argument(
        "--allow", action="append", default=[], choices=["versions"], help="compare although code or libraries differ"
    )
    args = parser.parse_args(argv)
    try:
        runs = [load(name, args.results_dir, number) for number, name in enumerate(args.runs, start=1)]
        if len(runs) < 2:
            raise ValueError("one run cannot be compared; give at least two")
        for first, second in combinations(runs, 2):
            if first.path.resolve() == second.path.resolve():
                raise ValueError(f"{first.path} is given twice; give different runs")
            check(first, second, args.allow)
        # The reference goes second, so that a difference is what a method gains or loses.
        ordered = [(b, a) if a.is_reference else (a, b) for a, b in combinations(runs, 2)]
        matches = [Match(a, b, pairs, compare(pairs)) for a, b in ordered for pairs in [pair(a.rows, b.rows)]]
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print("\n".join(report(runs, matches, args.subsets)))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # quiet in `| head`
    allow_any_sign()
    sys.exit(main())
