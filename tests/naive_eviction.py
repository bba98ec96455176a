"""Slow and obvious versions of the eviction baselines, on lists and dicts: the oracles of test_eviction.py.

A score table is a dict from position to number, one per KV head; the newest tokens, which always stay, are not in it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

Table = dict[int, float]


def best(table: Table, num: int, first: set[int] | None = None) -> set[int]:
    """The `num` best positions, those in `first` before all others; ties go to the earlier one."""
    return set(sorted(table, key=lambda j: (j not in (first or set()), -table[j], j))[:num])


def best_of_all(tables: list[Table], num: int, first: list[set[int]] | None = None) -> list[set[int]]:
    """The `num` best of all heads (or layers and heads); ties go to the earlier head, then position."""
    ahead = first or [set[int]() for _ in tables]
    every = [(head, j) for head, table in enumerate(tables) for j in table]
    every.sort(key=lambda at: (at[1] not in ahead[at[0]], -tables[at[0]][at[1]], at))
    return [{j for h, j in every[:num] if h == head} for head in range(len(tables))]


def half_even(x: Fraction) -> int:
    return round(x)


def h2o_sums(attention_GQS: Any) -> Table:
    """Everything a KV head's query heads ever put on a token."""
    queries = range(len(attention_GQS[0]))
    return {j: sum(head[i][j] for head in attention_GQS for i in queries) for j in queries}


def h2o_kept(sums: Table, num: int, recent: int) -> set[int]:
    newest = set(sorted(sums)[len(sums) - min(recent, len(sums)) :])
    return newest | best({j: s for j, s in sums.items() if j not in newest}, num - len(newest))


def tova_scores(attention_HQS: Any) -> Table:
    """Mean over all query heads of the last query."""
    last = [head[-1] for head in attention_HQS]
    return {j: sum(row[j] for row in last) / len(last) for j in range(len(last[0]))}


def adakv_blend(tables: list[Table], total: int, alpha: str) -> list[int]:
    """The authors' head budgets, before anything is brought to the bytes."""
    base = total // len(tables)
    counts = [len(kept) for kept in best_of_all(tables, base * len(tables))]
    floor = int(Fraction(alpha) * base)
    return [half_even((1 - Fraction(alpha)) * count + floor) for count in counts]


def adakv_floor(num_heads: int, total: int, window: int, alpha: str) -> int:
    """kvpress' safe tokens per head, less the window, which is part of them."""
    return max(int((total // num_heads + window) * Fraction(alpha)) - window, 0)


def adakv(tables: list[Table], total: int, window: int, alpha: str, mode: str) -> list[set[int]]:
    if mode == "blend":
        due = adakv_blend(tables, total, alpha)
    else:
        due = [adakv_floor(len(tables), total, window, alpha)] * len(tables)
    return best_of_all(tables, total, [best(table, n) for table, n in zip(tables, due, strict=True)])


def criticalkv(
    tables: list[Table], norms: list[Table], total: int, window: int, over: str, alpha: str, ratio: str, eps: float
) -> list[set[int]]:
    budgets, safe = [total // len(tables)] * len(tables), 0
    if over == "adakv":
        budgets = [len(kept) for kept in adakv(tables, total, window, alpha, "floor")]
        safe = adakv_floor(len(tables), total, window, alpha)
    kept = []
    for table, norm, budget in zip(tables, norms, budgets, strict=True):
        stage_1 = best(table, max(safe, int(Fraction(ratio) * (budget + window)) - window))
        kept.append(best({j: (s + eps) * norm[j] for j, s in table.items()}, budget, stage_1))
    return kept


def value_norms(values_SD: list[list[float]], weights_GDK: list[list[list[float]]]) -> list[float]:
    """Mean over query heads of the L1 norm of v W_O."""
    norms = []
    for v in values_SD:
        ones = []
        for weight in weights_GDK:
            out = [0.0] * len(weight[0])
            for x, row in zip(v, weight, strict=True):
                out = [o + x * w for o, w in zip(out, row, strict=True)]
            ones.append(sum(map(abs, out)))
        norms.append(sum(ones) / len(ones))
    return norms


def defensive_peaks(attention_GQS: Any, prompt_len: int, window: int, kernel: int) -> Table:
    """Largest pooled and rescaled attention of any query head and observed query."""
    prefix, half = prompt_len - window, kernel // 2
    peaks = dict.fromkeys(range(prefix), 0.0)
    for head in attention_GQS:
        for i in range(prefix, prompt_len):
            row = head[i][:prefix]
            pooled = [sum(row[max(0, j - half) : j + half + 1]) / kernel for j in range(prefix)]
            for j, x in enumerate(pooled):
                peaks[j] = max(peaks[j], x * sum(row) / sum(pooled))
    return peaks


def mean_attention(attention_GQS: Any, prompt_len: int, window: int) -> Table:
    """Sum over the observed queries of the mean over query heads, un-pooled, of every position."""
    rows = [head[i] for head in attention_GQS for i in range(prompt_len - window, prompt_len)]
    return {j: sum(row[j] for row in rows) / len(attention_GQS) for j in range(prompt_len)}


def defensive_bias(masses: list[Table], seen: int, window: int, kind: str) -> float:
    last = seen - (0 if kind == "as_intended" else window)
    total = sum(sum(mass.values()) for mass in masses)
    return sum(x for mass in masses for j, x in mass.items() if last - window <= j < last) / total


def stage_1(mass: Table, share: float, most: int) -> set[int]:
    """The largest tokens before the one at which they hold `share` of the mass."""
    found: set[int] = set()
    held = 0.0
    for j in sorted(mass, key=lambda j: (-mass[j], j)):
        held += mass[j] / sum(mass.values())
        if held >= share or len(found) == most:
            break
        found.add(j)
    return found


def defensive_scores(
    peaks: list[Table], masses: list[Table], norms: list[Table], share: float, most: int
) -> list[Table]:
    """Scores of one layer's heads; `norms` are already divided by their sum over the heads."""
    raised = []
    for peak, norm in zip(peaks, norms, strict=True):
        mean = sum(peak.values()) / len(peak)
        raised.append({j: max(m, mean) * norm[j] for j, m in peak.items()})
    top = max(max(table.values()) for table in raised)
    return [
        {j: top if j in stage_1(mass, share, most) else s for j, s in table.items()}
        for table, mass in zip(raised, masses, strict=True)
    ]


def pyramid_official(cap: int, window: int, layers: int, length: int, beta: int) -> list[int]:
    """Tokens per layer with the window."""
    base = cap - window
    if length < 2 * base or layers == 1:
        return [cap] * layers
    low = base // beta
    high = 2 * base - low
    if high >= length - window:
        high = length - window
        low = 2 * base - high
    return [high - layer * ((high - low) // (layers - 1)) + window for layer in range(layers)]


def pyramid_kvpress(tokens: float, window: int, layers: int, length: int, beta: int) -> list[int]:
    low = tokens / beta
    high = 2 * tokens - low
    if high >= length - window:
        high = length - window
        low = 2 * tokens - high
    if not length >= high >= low >= window:
        return [round(tokens)] * layers
    return [round(high - layer * (high - low) / (layers - 1)) for layer in range(layers)]


def spread(counts: list[int], available: list[int], total: int) -> list[int]:
    """One token at a time, layer after layer, until the sum is right."""
    counts = [min(max(n, 0), most) for n, most in zip(counts, available, strict=True)]
    total = min(total, sum(available))
    while sum(counts) != total:
        for layer in range(len(counts)):
            if sum(counts) < total and counts[layer] < available[layer]:
                counts[layer] += 1
            elif sum(counts) > total and counts[layer] > 0:
                counts[layer] -= 1
    return counts
