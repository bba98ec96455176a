"""The closing report of a run: plain text, at most 100 columns (names longer than 40 characters excepted)."""

from __future__ import annotations

from math import exp
from textwrap import wrap

from qevict_bench import alarms
from qevict_bench.comparison import Comparison, shown_p
from qevict_bench.statistics import ALPHA, Interval
from qevict_bench.summary import Summary

FEW = 10
"""Intervals from fewer examples than this are marked."""
PAPER_MODELS = ("llama31_8b", "qwen25_7b", "mistral_7b_v02")
PAPER_SETTING = "The paper's setting: model=llama31_8b profile=paper (32K tokens, 500 per subset; needs a GPU)."
WORDINGS = {
    "own": "-style (own wording)",
    "official": " (official prompts)",
    "redrawn": " (official wording, drawn anew)",
}
"""What stands behind a task's name, by the prompt source of its rows."""
WIDTH = 100
_MIB = 2**20


def render(summary: Summary) -> str:
    """The whole report; its last line is `last_line(summary)`."""
    sections = (_title, _scores, _memory, _routing, _fidelity, _alarms, _notes)
    parts = [section(summary) for section in sections]
    return "\n\n".join("\n".join(lines) for lines in (*parts, [last_line(summary)]) if lines)


def last_line(summary: Summary) -> str:
    """One line for scripts: scores and interval in points, memory as mean share of FullKV's bytes, workspace in MiB."""
    overall, memory = summary.overall, summary.memory
    full, low, high = (overall.reference, overall.diff.low, overall.diff.high) if overall else (None, None, None)
    return (
        f"run {summary.run_id}: score={_points(summary.macro)} full_kv={_points(full)} "
        f"diff=[{_points(low)},{_points(high)}] memory={_share(memory.mean if memory else None)} "
        f"workspace={_mib(memory.workspace) if memory else 'n/a'}"
    )


def _title(summary: Summary) -> list[str]:
    facts = summary.facts
    variant = f" ({summary.variant})" if summary.variant else ""
    wording = WORDINGS.get(summary.prompt_source, f" ({summary.prompt_source})")
    if summary.model in PAPER_MODELS:
        claim = "the paper's model: a reproduction only where context, budget, protocol, prompts and n match too"
    elif facts.small_model:
        claim = "small model: not a reproduction"
    else:
        claim = "not one of the paper's models: not a reproduction"
    return [
        f"{summary.method}{variant} on {summary.model} ({summary.dtype}, {summary.device}), "
        f"{facts.compressible_layers} of {facts.num_layers} layers compressible",
        f"{summary.task.upper()}{wording}, protocol {summary.protocol}, first_token {summary.first_token}, "
        f"split {summary.split}, seed {summary.seed}",
        f"budget {summary.budget}, basis {summary.basis}, enforce {summary.enforce}; {claim}",
    ]


def _scores(summary: Summary) -> list[str]:
    if summary.all_infeasible:
        return [
            f"Nothing could be run: all {summary.num_infeasible} examples are infeasible at budget {summary.budget}.",
            *_wrapped(summary.problem),
        ]
    if not summary.scored:
        return _likelihood(summary)
    if summary.overall is None:
        return ["No example is ok in both runs: there are no scores to compare."]
    macro = [("macro, all subsets", summary.overall)]
    if summary.above_floor is not None:
        macro.append(("macro, not at floor", summary.above_floor))
    width = max(len(name) for name in [*summary.subsets, *(name for name, _ in macro)])
    label = summary.method[:16]
    own = max(len(label), 6)
    header = f"{'subset':{width}}  {'n':>5}  {'FullKV':>6}  {label:>{own}}  {'difference, 95 % interval':<25}"
    rule = "-" * (len(header) + 15)
    lines = [header.rstrip(), rule]
    for name, comparison in summary.subsets.items():
        lines.append(_score_line(name, comparison, width, own, "*" if summary.adjusted[name] <= ALPHA else ""))
    lines += [rule, *(_score_line(name, comparison, width, own, "") for name, comparison in macro)]
    overall = summary.overall
    counts = f"{overall.wins}/{overall.ties}/{overall.losses}"
    lines.append(f"All subsets: p {shown_p(overall.p)} (bootstrap), wins/ties/losses {counts}.")
    lines.append(f"Macro differences under +-{overall.noise:.1f} points are noise at this n.")
    if any(p <= ALPHA for p in summary.adjusted.values()):
        lines.append("*: differs from FullKV (exact test on wins and losses, 5 % after Holm over the subsets)")
    if overall.num_clusters < overall.num_pairs:
        lines.append(f"The {overall.num_pairs} examples share {overall.num_clusters} contexts, resampled as such.")
    return lines


def _score_line(name: str, comparison: Comparison, width: int, own: int, star: str) -> str:
    marks = [f"n < {FEW}"] * (comparison.num_pairs < FEW) + ["floor"] * comparison.at_floor
    return (
        f"{name:{width}}  {comparison.num_pairs:5}  {comparison.reference:6.1f}  {comparison.score:{own}.1f}  "
        f"{_interval(comparison.diff):<25}{star:<1} {', '.join(marks)}"
    ).rstrip()


def _likelihood(summary: Summary) -> list[str]:
    """The result of a task without a score."""
    found = summary.fidelity
    if "gold.nll" not in found:
        return ["Answers to this task are not scored; metrics.fidelity=true measures how likely its text is (NLL)."]
    nll, change = found["gold.nll"].value, found["gold.nll_change"]
    full, label, few = nll - change.value, summary.method[:16], f"  n < {FEW}" * (summary.num_examples < FEW)
    return [
        f"How likely the text is after its beginning: {summary.num_examples} examples, "
        f"{found['gold.tokens'].value:.0f} tokens of each (metrics.fidelity_tokens)",
        f"  NLL in nats per token: FullKV {full:.4f}, {label} {nll:.4f}, difference {change.value:+.4f}  "
        f"[{change.low:+.4f}, {change.high:+.4f}]{few}",
        f"  perplexity, exp(NLL): FullKV {exp(full):.2f}, {label} {exp(nll):.2f}",
        f"  memory while reading it: {found['gold.memory'].value:.3f} of FullKV's bytes (below: for one token)",
    ]


def _memory(summary: Summary) -> list[str]:
    memory, sizes = summary.memory, summary.bytes
    if memory is None:
        return []
    payload = sum(size for name, size in sizes.items() if name.startswith("payload."))
    other = ("params", "table", "reference")
    metadata = sum(size for name, size in sizes.items() if name.split(".")[0] in other)
    state = "matched" if summary.matched else "unmatched"
    return [
        "Cache as a share of FullKV's bytes at the same step, mean over examples",
        f"  allowed {_share(memory.allowed)}, after prefill {_share(memory.after_prefill)}, "
        f"peak {_share(memory.peak)}, mean {_share(memory.mean)}, final {_share(memory.final)}",
        f"  {state}; whole cache with sliding layers {_share(memory.whole_cache)}; "
        f"while reading the prompt {_share(memory.prefill_peak)}",
        f"  at the end: payload {_mib(payload)}, metadata {_mib(metadata)}, ledger {_mib(sizes.get('ledger', 0))}, "
        f"slack {_mib(sizes.get('slack', 0))}",
        f"  not counted: workspace (dequantized copies, buffered queries) {_mib(memory.workspace)}, "
        f"host copies {_mib(memory.host)}",
    ]


def _routing(summary: Summary) -> list[str]:
    if summary.memory is None:
        return []
    lines = [
        f"Per example: {summary.events:.1f} routing events, {summary.promotions:.1f} promotions, "
        f"{summary.demotions:.1f} demotions, {summary.evictions:.1f} evictions"
    ]
    if summary.needle_fate:
        names = {"full": "full", "int2": "INT2", "evicted": "evicted"}
        shares = ", ".join(f"{names.get(name, name)} {100 * x:.1f} %" for name, x in summary.needle_fate.items())
        lines.append(f"Needle fate (answer tokens before the first answer token): {shares}")
    timings = summary.timings
    if timings is not None:
        lines.append(
            f"Speed on {summary.device}: {timings.ttft_s + timings.decode_s:.2f} s per example (first token "
            f"{timings.ttft_s:.2f}), {timings.slowdown:.2f} x FullKV's {timings.reference_s:.2f} s"
        )
    return lines


def _fidelity(summary: Summary) -> list[str]:
    found = summary.fidelity
    if not found:
        return []
    lines = ["Beside FullKV's next-token distributions, the same text fed to both (KL in nats, tokens 2 to N)"]
    for stream, text in (("gold", "gold text"), ("full_kv", "FullKV's own answer")):
        parts = [
            f"{name} {found[key].value:.4f} [{found[key].low:.4f}, {found[key].high:.4f}]"
            for name, key in (("KL", f"{stream}.kl"), ("NLL change", f"{stream}.nll_change"))
            if key in found
        ]
        shares = [
            f"{name} {100 * found[key].value:.1f} %"
            for name, key in (("same top token", f"{stream}.agreement"), ("loops", f"{stream}.looping"))
            if key in found and (name != "loops" or found[key].value)
        ]
        if parts:
            first = f"first token KL {found[f'{stream}.kl_first'].value:.4f}"
            lines += _wrapped(f"{text}: {', '.join([*parts, *shares])}; {first}")
    return lines


def _alarms(summary: Summary) -> list[str]:
    if not summary.alarms or summary.all_infeasible:
        return []
    return [
        "Before you believe the scores:",
        *(text for line in alarms.lines(summary.alarms) for text in _wrapped(line)),
    ]


def _wrapped(line: str) -> list[str]:
    return wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _notes(summary: Summary) -> list[str]:
    lines = []
    if summary.problem and not summary.all_infeasible:
        lines += ["The first example without a score:", *_wrapped(summary.problem)]
    for name, count in summary.facts.available.items():
        lines.append(f"{name} has {count} examples, fewer than limit={summary.facts.limit}.")
    return [*lines, PAPER_SETTING]


def _interval(diff: Interval) -> str:
    return f"{diff.value:+6.1f}  [{diff.low:+6.1f}, {diff.high:+6.1f}]"


def _points(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _mib(size: float) -> str:
    return f"{size / _MIB:.2f}MiB"
