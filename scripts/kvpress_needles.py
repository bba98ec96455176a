"""Our needle prompts through kvpress' own SnapKV: is a surprising score ours, or the method's on this model?

Runs in the environment of scripts/golden_kvpress.py (kvpress 0.5.5, transformers below 5.3) with wonderwords beside it:

    PYTHONPATH=src:. PYTHON scripts/kvpress_needles.py MODEL_FOLDER --limit 8 --budget 0.2

MODEL_FOLDER holds weights and tokenizer (the folder of converted weights in the cache, for an embedded model). The
whole prompt is prefilled under the press, as with protocol=query_aware first_token=full enforce=prefill; decoding is
greedy on the compressed cache. Prints the prediction of every example and the share that holds the answer.
"""

from __future__ import annotations

import argparse

import torch
from kvpress import SnapKVPress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from qevict_bench.task import Prompter
from tasks.ruler import Ruler

SETTINGS = ((64, 5), (32, 7))
"""Window and kernel: kvpress' own, and the authors'."""


def predict(model: torch.nn.Module, press: SnapKVPress, ids: tuple[int, ...], eos: int, max_new: int) -> list[int]:
    """Greedy ids after a prompt that was prefilled under the press."""
    cache, new = DynamicCache(), list[int]()
    with torch.inference_mode():
        with press(model):
            logits = model(torch.tensor([ids]), past_key_values=cache).logits
        while len(new) < max_new and (token := int(logits[0, -1].argmax())) != eos:
            position = torch.tensor([[len(ids) + len(new)]])
            new.append(token)
            logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=position).logits
    return new


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--budget", type=float, default=0.2)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16).eval()
    prompter = Prompter(tokenizer, tokenizer.chat_template is not None)
    task = Ruler(context_length=1024, subsets=("niah_single_1",))
    for window, kernel in SETTINGS:
        scores = []
        for example in task.examples(prompter, args.limit, 0, "test"):
            press = SnapKVPress(compression_ratio=1 - args.budget, window_size=window, kernel_size=kernel)
            new = predict(model, press, prompter.encode(example).ids, tokenizer.eos_token_id, example.max_new_tokens)
            text = tokenizer.decode(new, skip_special_tokens=True).split("\n")[0]
            scores.append(task.score(text, example))
            print(f"{example.id}: {example.answers[0]} -> {text!r}")
        print(f"SnapKVPress window {window}, kernel {kernel}: {100 * sum(scores) / len(scores):.1f}", flush=True)


if __name__ == "__main__":
    main()
