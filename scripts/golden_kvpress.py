"""Which tokens kvpress keeps on a small random Llama: makes tests/golden/kvpress.json, which our presets must equal.

kvpress 0.5.5 needs transformers below 5.3, so it runs in an environment of its own, outside the checkout:

    python3 -m venv ENV
    ENV/bin/pip install torch==2.13.0 'transformers<5.3' requests 'cachetools<6' datasets fire
    ENV/bin/pip install --no-deps kvpress==0.5.5
    ENV/bin/python scripts/golden_kvpress.py tests/golden/kvpress.json

Per case the file has the number of tokens that every layer and KV head keeps, and which (`unpacked`). The model's
weights and the prompt come from integer arithmetic (`drawn`), so that every version of torch makes the same ones; the
tests import `llama`, `prompt` and `unpacked` from here. kvpress compresses a context once, right after it has been
read: a prompt alone through its presses is that. Where a press only masks keys (AdaKV and what is built on it), the
keys it does not mask are the kept ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 600
VOCAB = 128
LAYERS, KV_HEADS, GROUP, HEAD_DIM = 4, 3, 2, 16
SCALE = 0.35  # wide enough that attention is uneven


class Case(NamedTuple):
    """One press of kvpress, by name, its keyword arguments, and the fraction it removes."""

    name: str
    press: str
    options: dict[str, Any]
    ratio: float


PRESSES: dict[str, tuple[str, dict[str, Any]]] = {
    "streaming_llm": ("StreamingLLMPress", {}),
    "snapkv": ("SnapKVPress", {}),
    "tova": ("TOVAPress", {}),
    "pyramidkv": ("PyramidKVPress", {}),
    "pyramidkv_window_4": ("PyramidKVPress", {"window_size": 4}),
    "adakv": ("AdaKVPress", {}),
    "criticalkv": ("CriticalKVPress", {"window_size": 32}),
    "criticalkv_adakv": ("CriticalAdaKVPress", {"window_size": 32}),
}
CASES = [Case(name, *press, ratio) for name, press in PRESSES.items() for ratio in (0.8, 0.5)]


def drawn(num: int, seed: int) -> Tensor:
    """`num` pseudo-random integers in [0, 2^32): a hash of seed and index in 64-bit integer arithmetic."""
    x = torch.arange(num, dtype=torch.int64) + (seed << 24)
    for _ in range(3):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x


def prompt() -> list[int]:
    ids: list[int] = (drawn(LENGTH, 99) % VOCAB).tolist()
    return ids


def llama(attn_implementation: str) -> LlamaForCausalLM:
    """4 layers, 6 query heads on 3 KV heads, head dim 16, fp32."""
    hidden = KV_HEADS * GROUP * HEAD_DIM
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation=attn_implementation,
    )
    model = LlamaForCausalLM(config).float().eval().requires_grad_(False)
    for seed, (_, weight) in enumerate(sorted(model.named_parameters())):
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.copy_((drawn(weight.numel(), seed).float() / 2**31 - 1).mul(SCALE).view(weight.shape))
    return model


def packed(positions: list[int]) -> str:
    """Positions as the bits of a hexadecimal number."""
    return f"{sum(1 << position for position in positions):x}"


def unpacked(text: str) -> set[int]:
    bits = int(text, 16)
    return {position for position in range(LENGTH) if bits >> position & 1}


def kept(model: LlamaForCausalLM, case: Case) -> list[list[list[int]]]:
    """Positions a press keeps, ascending, per layer and KV head."""
    import kvpress
    from transformers import DynamicCache

    press = getattr(kvpress, case.press)
    if case.press in ("AdaKVPress", "CriticalKVPress", "CriticalAdaKVPress"):
        press = press(kvpress.SnapKVPress(compression_ratio=case.ratio, **case.options))
    else:
        press = press(compression_ratio=case.ratio, **case.options)
    cache, ids = DynamicCache(), torch.tensor([prompt()])
    plain = DynamicCache()
    with torch.inference_mode():
        model.model(input_ids=ids, past_key_values=plain)
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
    found = []
    for layer, decoder in enumerate(model.model.layers):
        masked = getattr(decoder.self_attn, "masked_key_indices", None)
        if masked is not None:
            alive = torch.ones((KV_HEADS, LENGTH), dtype=torch.bool)
            alive[masked[1], masked[2]] = False
            found.append([row.nonzero()[:, 0].tolist() for row in alive])
            decoder.self_attn.masked_key_indices = None
            continue
        whole, left = plain.layers[layer].keys[0], cache.layers[layer].keys[0]
        same = (left[:, :, None] == whole[:, None]).all(-1)  # [H, kept, LENGTH]: keys are copied bit by bit
        assert bool((same.sum(-1) == 1).all()), "every kept key is one of the prompt's"
        found.append([sorted(head.int().argmax(-1).tolist()) for head in same])
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: golden_kvpress.py FILE.json", file=sys.stderr)
        return 2
    model = llama("sdpa")
    cases = []
    for case in CASES:
        found = kept(model, case)
        counts = [[len(head) for head in layer] for layer in found]
        masks = [[packed(head) for head in layer] for layer in found]
        cases.append(case._asdict() | {"counts": counts, "kept": masks})
    versions = {name: __import__(name).__version__ for name in ("torch", "transformers")} | {"kvpress": "0.5.5"}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    Path(arguments[0]).write_text(f'{{"versions":{json.dumps(versions)},"cases":[\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
