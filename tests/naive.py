"""Slow and obvious versions of the formulas, one number at a time: the oracles of the tests. Nothing here is fast."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction

import torch

FIELDS = {2: 4, 3: 8, 4: 2, 8: 1}  # codes per packed word


def fp32(value: float) -> float:
    """The nearest fp32 number. Sums, products and quotients of fp32 numbers become exact fp32 arithmetic this way."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def stored(value: float, dtype: torch.dtype) -> float:
    """An fp32 number after a round trip through the storage dtype."""
    return torch.tensor(value, dtype=torch.float32).to(dtype).item()


def min_max(values: list[float], bits: int, dtype: torch.dtype) -> tuple[float, float]:
    """Scale and zero of one parameter group."""
    scale = fp32(fp32(max(values) - min(values)) / (2**bits - 1))
    return stored(scale, dtype), stored(min(values), dtype)


def quantize(value: float, scale: float, zero: float, bits: int) -> int:
    """Code of one value; Python rounds halves to even."""
    if scale == 0:
        return 0
    return min(max(round(fp32(fp32(value - zero) / scale)), 0), (1 << bits) - 1)


def dequantize(code: int, scale: float, zero: float, dtype: torch.dtype) -> float:
    """Value of one code."""
    value = fp32(fp32(code * scale) + zero)
    if dtype == torch.float16:
        value = min(max(value, -65504.0), 65504.0)
    return stored(value, dtype)


def lower_byte(low: float, step: float, origin: float) -> int:
    """m: the largest byte whose zero is not above `low`."""
    if step == 0:
        return 0
    return max((m for m in range(256) if relative(0, m, step, origin, 2)[1] <= low), default=0)


def range_byte(high: float, m: int, step: float, origin: float, bits: int) -> int:
    """r: the smallest byte whose top code decodes to no less than `high`."""
    if step == 0:
        return 0
    for r in range(256):
        scale, zero = relative(r, m, step, origin, bits)
        if fp32(fp32((2**bits - 1) * scale) + zero) >= high:
            return r
    return 255


def relative(r: int, m: int, step: float, origin: float, bits: int) -> tuple[float, float]:
    """Scale and zero of one parameter group from its two bytes."""
    return fp32(fp32(step * r) / (2**bits - 1)), fp32(origin + fp32(step * m))


def pack(codes: list[int], bits: int) -> list[int]:
    """Word w takes channel w + k * words as its k-th field, lowest bits first; its byte p goes to w + p * words."""
    words = len(codes) // FIELDS[bits]
    word_bytes = FIELDS[bits] * bits // 8
    packed = [0] * (words * word_bytes)
    for w in range(words):
        word = sum(codes[w + k * words] << (bits * k) for k in range(FIELDS[bits]))
        for p, byte in enumerate(word.to_bytes(word_bytes, "little")):
            packed[w + p * words] = byte
    return packed


def per_channel(
    x: list[list[float]], bits: int, dtype: torch.dtype
) -> tuple[list[list[int]], list[float], list[float]]:
    """One group of T tokens x D channels: codes [T][D], scale [D], zero [D]."""
    channels = range(len(x[0]))
    scale, zero = zip(*(min_max([token[d] for token in x], bits, dtype) for d in channels), strict=True)
    return [[quantize(token[d], scale[d], zero[d], bits) for d in channels] for token in x], list(scale), list(zero)


def per_token(
    token: list[float], bits: int, size: int, dtype: torch.dtype
) -> tuple[list[int], list[float], list[float]]:
    """One token of D channels in groups of `size`: codes [D], scale and zero [D / size]."""
    codes, scale, zero = [], [], []
    for start in range(0, len(token), size):
        part = token[start : start + size]
        part_scale, part_zero = min_max(part, bits, dtype)
        codes += [quantize(value, part_scale, part_zero, bits) for value in part]
        scale.append(part_scale)
        zero.append(part_zero)
    return codes, scale, zero


# ---- QEvict (arXiv 2608.05326), one layer, one row ----


def window_of(position: int, window: int, sink: int) -> int:
    """First position of the window a token belongs to: the sink tokens are one, then tiles of `window` tokens."""
    if position < sink:
        return 0
    start = sink
    while start + window <= position:
        start += window
    return start


def window_scores(
    attention_HQS: list[list[list[float]]], queries: list[int], window: int, sink: int
) -> dict[int, float]:
    """One interval of Eq. 1: (1/H_q) sum over query heads, over the interval's queries, over the window's positions."""
    home = [window_of(position, window, sink) for position in range(max(queries) + 1)]
    scores = dict.fromkeys(home, 0.0)
    for head in attention_HQS:
        for query in queries:
            for position in range(query + 1):
                scores[home[position]] += head[query][position] / len(attention_HQS)
    return scores


def eq3(hist: Fraction, q: str, full_bytes: Fraction, low_bytes: Fraction) -> tuple[int, int]:
    """K_f = floor((1 - q) B_hist / M_f), K_q = floor(q B_hist / M_q)."""
    hist = max(hist, Fraction(0))
    return math.floor((1 - Fraction(q)) * hist / full_bytes), math.floor(Fraction(q) * hist / low_bytes)


def fill_up(
    hist: Fraction, k_full: int, k_low: int, full_bytes: Fraction, low_bytes: Fraction, num: int, eligible: int
) -> tuple[int, int]:
    """`fill`: bytes that one tier cannot use go to the other."""
    k_full = min(k_full, eligible)
    if num <= k_full + k_low:
        while k_full < eligible and (k_full + 1) * full_bytes + (num - k_full - 1) * low_bytes <= hist:
            k_full += 1
    k_low = 0
    while k_full * full_bytes + (k_low + 1) * low_bytes <= hist:
        k_low += 1
    return k_full, k_low


@dataclass
class Router:
    """Algorithm 1: the state of one layer. Windows are named by their first position; ties go to the earlier one."""

    full: set[int]
    low: set[int]
    gone: set[int]
    ledger: set[int]
    """Windows whose codes are kept: quantized once, at their first demotion (line 10, read as "not in the ledger")."""

    def candidates(self, seq_len: int, recent: int, window: int, sink: int) -> list[int]:
        """Previous Full, previous Quantized, and the windows whose last position has left the recent region."""
        aged = range(sink, seq_len, window)
        return [w for w in aged if w + window - 1 < seq_len - recent and w not in self.gone]

    def split(
        self, score: dict[int, float], eligible: list[int], candidates: list[int], k_full: int, k_low: int
    ) -> tuple[list[int], list[int]]:
        """Eq. 4-5: Full = top K_f by score, Quantized = the next K_q."""
        best = sorted(eligible, key=lambda w: (-score[w], w))[:k_full]
        rest = sorted((w for w in candidates if w not in best), key=lambda w: (-score[w], w))
        return best, rest[:k_low]

    def move(self, candidates: list[int], full: list[int], low: list[int]) -> tuple[int, int, int]:
        """Eq. 6: carry a decision out; (promotions, demotions, evictions)."""
        promotions = demotions = evictions = 0
        for w in candidates:
            if w in full:
                promotions += w in self.low
                self.low.discard(w)
                self.full.add(w)
            elif w in low:
                demotions += w not in self.low
                self.full.discard(w)
                self.low.add(w)
                self.ledger.add(w)
            else:
                evictions += 1
                for held in (self.full, self.low, self.ledger):
                    held.discard(w)
                self.gone.add(w)
        return promotions, demotions, evictions


# ---- baselines ----


def snapkv_votes(
    attention_GQS: list[list[list[float]]], prompt_len: int, window: int, kernel: int, pooling: str, reduce: str
) -> list[float]:
    """Votes of one KV head: over the last queries and its query heads, pooled on the prefix; the window has none."""
    heads = [
        [sum(head[i][j] for i in range(prompt_len - window, prompt_len)) for j in range(prompt_len)]
        for head in attention_GQS
    ]
    prefix = prompt_len - window
    votes = [max(v) if reduce == "max" else sum(v) / len(v) for v in zip(*heads, strict=True)][:prefix]
    pooled = []
    for j in range(prefix):
        near = [votes[i] if 0 <= i < prefix else None for i in range(j - kernel // 2, j + kernel // 2 + 1)]
        inside = [v for v in near if v is not None]
        pooled.append(max(inside) if pooling == "max" else sum(inside) / kernel)
    return pooled + [0.0] * window


def keep_top(score: dict[int, float], always: set[int], num_kept: int) -> set[int]:
    """`always`, and the best others up to `num_kept` in all; ties go to the earlier token."""
    others = sorted((j for j in score if j not in always), key=lambda j: (-score[j], j))
    return always | set(others[: max(0, num_kept - len(always))])


def streaming_kept(num_tokens: int, sink: int, recent: int) -> set[int]:
    """The first `sink` and the newest `recent` tokens."""
    return set(range(min(sink, num_tokens))) | set(range(max(0, num_tokens - recent), num_tokens))


def affine_channels(tokens: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 [T, D] after a round trip through per-channel min-max codes of this one group."""
    codes, scale, zero = per_channel(tokens.tolist(), bits, torch.float32)
    return _decoded(codes, [scale] * len(codes), [zero] * len(codes))


def affine_tokens(tokens: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 [T, D] after a round trip through per-token min-max codes."""
    size = tokens.shape[1]
    parts = [per_token(token, bits, size, torch.float32) for token in tokens.tolist()]
    return _decoded([p[0] for p in parts], [p[1] * size for p in parts], [p[2] * size for p in parts])


def static_channels(tokens: torch.Tensor, prompt: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 [T, D] after a round trip with the prompt's range per channel; values outside are clamped."""
    params = [min_max(prompt[:, d].tolist(), bits, torch.float32) for d in range(tokens.shape[1])]
    codes = [[quantize(x, *param, bits) for x, param in zip(token, params, strict=True)] for token in tokens.tolist()]
    scale, zero = zip(*params, strict=True)
    return _decoded(codes, [list(scale)] * len(codes), [list(zero)] * len(codes))


def relative_channels(tokens: torch.Tensor, prompt: torch.Tensor, bits: int) -> torch.Tensor:
    """fp32 [T, D] after a round trip with 8-bit parameters relative to the prompt's range per channel."""
    out = torch.empty_like(tokens)
    for d in range(tokens.shape[1]):
        origin, top = min(prompt[:, d].tolist()), max(prompt[:, d].tolist())
        step = fp32(fp32(top - origin) / 254.5)
        values = tokens[:, d].tolist()
        m = lower_byte(min(values), step, origin)
        scale, zero = relative(range_byte(max(values), m, step, origin, bits), m, step, origin, bits)
        for t, value in enumerate(values):
            out[t, d] = dequantize(quantize(value, scale, zero, bits), scale, zero, torch.float32)
    return out


def _decoded(codes: list[list[int]], scale: list[list[float]], zero: list[list[float]]) -> torch.Tensor:
    rows = zip(codes, scale, zero, strict=True)
    return torch.tensor([[dequantize(c, s, z, torch.float32) for c, s, z in zip(*row, strict=True)] for row in rows])


def turn(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """RoPE of x [..., S, D] at positions [..., S] as complex numbers: pair (i, i + D/2) turns by pos * base^(-2i/D)."""
    half = x.shape[-1] // 2
    speed = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = positions.double()[..., None] * speed
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


class DenseLlama:
    """A Llama written out by hand in float64, one row, that keeps every key it ever saw, un-rotated.

    Between calls of `run` a test may edit, per layer and KV head: `alive` (False = masked from the next step on),
    `keys` (un-rotated) and `values` [H, S, D], and `places` [H, S], the positions keys are rotated at.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps, self.base = config.rms_norm_eps, config.rope_parameters["rope_theta"]
        self.layers = range(config.num_hidden_layers)
        self.weights = {name: param.double() for name, param in model.state_dict().items()}
        self.keys = [torch.zeros(self.kv_heads, 0, self.dim, dtype=torch.float64) for _ in self.layers]
        self.values = [torch.zeros(self.kv_heads, 0, self.dim, dtype=torch.float64) for _ in self.layers]
        self.alive = [torch.ones(self.kv_heads, 0, dtype=torch.bool) for _ in self.layers]
        self.places = [torch.zeros(self.kv_heads, 0, dtype=torch.int64) for _ in self.layers]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[name + ".weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[name + ".weight"].T

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(len(x), heads, self.dim).transpose(0, 1)

    def run(self, ids: list[int], place: int) -> torch.Tensor:
        """Logits [len(ids), V] of new tokens at positions place, place + 1, ..., causal among themselves."""
        new = len(ids)
        at = torch.arange(place, place + new)
        x = self.weights["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in self.layers:
            name = f"model.layers.{layer}."
            h = self.norm(x, name + "input_layernorm")
            q = turn(self.split(self.linear(h, name + "self_attn.q_proj"), self.heads), at, self.base)
            k = self.split(self.linear(h, name + "self_attn.k_proj"), self.kv_heads)
            v = self.split(self.linear(h, name + "self_attn.v_proj"), self.kv_heads)
            self.keys[layer] = torch.cat((self.keys[layer], k), dim=1)
            self.values[layer] = torch.cat((self.values[layer], v), dim=1)
            self.alive[layer] = torch.cat((self.alive[layer], torch.ones(self.kv_heads, new, dtype=torch.bool)), dim=1)
            self.places[layer] = torch.cat((self.places[layer], at.expand(self.kv_heads, -1)), dim=1)
            mixed = []
            for head in range(self.heads):
                own = head * self.kv_heads // self.heads
                keys = turn(self.keys[layer][own], self.places[layer][own], self.base)
                score = q[head] @ keys.T / self.dim**0.5
                seen = self.alive[layer][own].expand(new, -1).clone()
                seen[:, -new:] &= torch.ones(new, new).tril().bool()
                mixed.append(score.masked_fill(~seen, -torch.inf).softmax(-1) @ self.values[layer][own])
            x = x + self.linear(torch.cat(mixed, dim=-1), name + "self_attn.o_proj")
            h = self.norm(x, name + "post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(h, name + "mlp.gate_proj"))
            x = x + self.linear(gate * self.linear(h, name + "mlp.up_proj"), name + "mlp.down_proj")
        return self.norm(x, "model.norm") @ self.weights["lm_head.weight"].T
