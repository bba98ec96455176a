"""The quantizing baselines in loops over lists, mostly one KV head at a time: the oracles of test_quantizers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from naive import dequantize, fp32, per_channel, per_token, stored

Rows = list[list[float]]  # [tokens][channels]


# ---- round trips ----


def channels_back(tokens: Rows, bits: int, dtype: torch.dtype) -> Rows:
    """One group of tokens, coded per channel and decoded."""
    codes, scale, zero = per_channel(tokens, bits, dtype)
    return [[dequantize(c, s, z, dtype) for c, s, z in zip(row, scale, zero, strict=True)] for row in codes]


def token_back(token: list[float], bits: int, size: int, dtype: torch.dtype) -> list[float]:
    """One token, coded in groups of `size` channels and decoded."""
    codes, scale, zero = per_token(token, bits, size, dtype)
    return [dequantize(c, scale[i // size], zero[i // size], dtype) for i, c in enumerate(codes)]


def balanced_back(tokens: Rows, bits: int) -> Rows:
    """fp32: channels divided by sqrt(max |x|) over all tokens, then coded per token."""
    peak = [max(abs(token[d]) for token in tokens) for d in range(len(tokens[0]))]
    c = [1.0 if p == 0 else torch.tensor(p).sqrt().item() for p in peak]
    out = []
    for token in tokens:
        divided = [fp32(x / c[d]) for d, x in enumerate(token)]
        back = token_back(divided, bits, len(token), torch.float32)
        out.append([fp32(x * c[d]) for d, x in enumerate(back)])
    return out


# ---- KIVI: the authors' schedule, token by token ----


def kivi_counts(prompt: int, steps: int, residual: int) -> tuple[int, int, int, int]:
    """(coded keys, exact keys, coded values, exact values) after a prompt and `steps` decoded tokens."""
    exact_k = prompt % residual
    coded_k, coded_v = prompt - exact_k, max(0, prompt - residual)
    exact_v = prompt - coded_v
    for _ in range(steps):
        exact_k, exact_v = exact_k + 1, exact_v + 1
        if exact_k == residual:
            coded_k, exact_k = coded_k + residual, 0
        if exact_v == residual + 1:
            coded_v, exact_v = coded_v + 1, residual
    return coded_k, exact_k, coded_v, exact_v


def kivi(
    keys: Rows, values: Rows, prompt: int, bits: int, group: int, residual: int, channels: int, dtype: torch.dtype
) -> tuple[Rows, Rows]:
    """What one head attends to after `prompt` tokens and the rest one by one."""
    coded_k, _, coded_v, _ = kivi_counts(prompt, len(keys) - prompt, residual)
    k_out: Rows = []
    for start in range(0, coded_k, group):
        k_out += channels_back(keys[start : start + group], bits, dtype)
    v_out = [token_back(value, bits, channels, dtype) for value in values[:coded_v]]
    return k_out + keys[coded_k:], v_out + values[coded_v:]


# ---- KVQuant ----


def furthest(distance: Rows, count: int) -> set[tuple[int, int]]:
    """(token, channel) of the largest distances; ties go to the earlier one."""
    flat = [(-x, t, d) for t, row in enumerate(distance) for d, x in enumerate(row)]
    return {(t, d) for _, t, d in sorted(flat)[:count]}


def nearest(x: float, centroids: Sequence[float]) -> int:
    return min(range(len(centroids)), key=lambda i: (abs(x - centroids[i]), i))


def nuq_keys(
    unit: Rows, low: list[float], high: list[float], centroids: list[float], count: int
) -> tuple[list[list[int]], Rows, set[tuple[int, int]]]:
    """fp32: codes, decoded unit, outliers. Offset and range come from the calibration."""
    offset = [fp32(fp32(b + a) / 2) for a, b in zip(low, high, strict=True)]
    scale = [fp32(fp32(b - a) / 2) for a, b in zip(low, high, strict=True)]
    scaled = [
        [fp32(fp32(x - offset[d]) / scale[d]) if scale[d] else 0.0 for d, x in enumerate(token)] for token in unit
    ]
    codes = [[nearest(x, centroids) for x in token] for token in scaled]
    out = furthest([[abs(x) for x in token] for token in scaled], count)
    back = [
        [x if (t, d) in out else fp32(fp32(centroids[codes[t][d]] * scale[d]) + offset[d]) for d, x in enumerate(token)]
        for t, token in enumerate(unit)
    ]
    return codes, back, out


def nuq_values(unit: Rows, centroids: list[float], count: int) -> tuple[Rows, set[tuple[int, int]]]:
    """Decoded unit (float64 arithmetic) and outliers. Offset and range come from each token without its outliers."""
    away = [[abs(x - sum(token) / len(token)) for x in token] for token in unit]
    spread = [sum(row) / len(row) for row in away]
    distance = [[x / s if s else 0.0 for x in row] for row, s in zip(away, spread, strict=True)]
    out = furthest(distance, count)
    back = []
    for t, token in enumerate(unit):
        rest = [x for d, x in enumerate(token) if (t, d) not in out] or [0.0]
        offset, scale = (max(rest) + min(rest)) / 2, (max(rest) - min(rest)) / 2
        codes = [nearest((x - offset) / scale, centroids) if scale else 0 for x in token]
        decoded = [centroids[c] * scale + offset for c in codes]
        back.append([x if (t, d) in out else decoded[d] for d, x in enumerate(token)])
    return back, out


def lloyd(values: list[float], weights: list[float], centers: list[float], rounds: int) -> list[float]:
    """Weighted k-means in one dimension, from given centers."""
    for _ in range(rounds):
        mass, moment = Counter[int](), Counter[int]()
        for x, w in zip(values, weights, strict=True):
            own = nearest(x, centers)
            mass[own] += w
            moment[own] += w * x
        centers = sorted(moment[i] / mass[i] if mass[i] else c for i, c in enumerate(centers))
    return centers


# ---- ZipCache, MiKV ----


def saliency(attention_GQS: list[Rows], probes: set[int]) -> list[float]:
    """Attention of the probed rows and the query heads of one KV head, divided by how many rows see a token."""
    num = len(attention_GQS[0])
    return [sum(head[k][i] for head in attention_GQS for k in sorted(probes) if k >= i) / (num - i) for i in range(num)]


def most_salient(score: list[float], num: int) -> set[int]:
    return set(sorted(range(len(score)), key=lambda i: (-score[i], i))[:num])


def zipcache(
    keys: list[Rows], values: list[Rows], high_tokens: list[set[int]], high: int, low: int
) -> tuple[list[Rows], list[Rows]]:
    """fp32, all KV heads of a layer: two sets of tokens per head, each with one scale and zero per key channel.

    The j-th values of every head's set are coded side by side under one scale and zero.
    """
    k_out, v_out = copy.deepcopy(keys), copy.deepcopy(values)
    every, dim = range(len(keys[0])), len(keys[0][0])
    for bits, is_high in ((high, True), (low, False)):
        members = [[i for i in every if (i in own) == is_high] for own in high_tokens]
        if not members[0]:
            continue
        for head, own in enumerate(members):
            for i, k in zip(own, channels_back([keys[head][i] for i in own], bits, torch.float32), strict=True):
                k_out[head][i] = k
        joined = [[x for head, i in enumerate(row) for x in values[head][i]] for row in zip(*members, strict=True)]
        for row, back in zip(zip(*members, strict=True), balanced_back(joined, bits), strict=True):
            for head, i in enumerate(row):
                v_out[head][i] = back[head * dim : (head + 1) * dim]
    return k_out, v_out


def gathered(attention_GQS: list[Rows]) -> list[float]:
    """H2O's importance: attention from all queries, over the query heads of one KV head."""
    num = len(attention_GQS[0])
    return [sum(head[i][j] for head in attention_GQS for i in range(j, num)) for j in range(num)]


def important(score: list[float], num: int, newest_share: float) -> set[int]:
    """The newest share of `num` tokens, and the best of the others."""
    newest = set(range(len(score) - int(num * newest_share), len(score)))
    others = sorted((j for j in range(len(score)) if j not in newest), key=lambda j: (-score[j], j))
    return newest | set(others[: num - len(newest)])


def mikv(keys: Rows, values: Rows, full: set[int], bits: int) -> tuple[Rows, Rows]:
    """fp32: unimportant tokens after a round trip per token."""
    dim = len(keys[0])
    k_out, v_out = (
        [row if i in full else token_back(row, bits, dim, torch.float32) for i, row in enumerate(rows)]
        for rows in (keys, values)
    )
    return k_out, v_out


def as_stored(rows: Rows, dtype: torch.dtype) -> Rows:
    return [[stored(x, dtype) for x in row] for row in rows]
