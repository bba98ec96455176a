"""Time and peak memory of making RULER prompts: python scripts/bench_prompts.py --length 32768 --limit 500

Generates and tokenizes, one process, no model. First pass with an empty cache of haystack sizes, second pass with it.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from transformers import AutoTokenizer

from qevict_bench.task import Prompter
from tasks.ruler import Ruler
from tasks.ruler.structure import SUBSETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2_135m", help="a yaml of configs/model")
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--limit", type=int, default=20, help="examples per subset")
    parser.add_argument("--subsets", nargs="+", default=list(SUBSETS))
    arguments = parser.parse_args()
    with initialize_config_dir(str(Path(__file__).parents[1] / "configs"), version_base="1.3"):
        spec = instantiate(compose("run", [f"model={arguments.model}"]).model)
    tokenizer = AutoTokenizer.from_pretrained(spec.locate()[0])
    prompter = Prompter(tokenizer, chat=bool(tokenizer.chat_template))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["QEVICT_BENCH_CACHE"] = cache
        for label in ("sizes searched", "sizes known"):
            total = 0.0
            for subset in arguments.subsets:
                task = Ruler(context_length=arguments.length, subsets=(subset,))
                start, fills = time.perf_counter(), []
                for example in task.examples(prompter, arguments.limit, 0, "test"):
                    prompt = prompter.encode(example)
                    fills.append((len(prompt.ids) + example.max_new_tokens) / arguments.length)
                spent = time.perf_counter() - start
                total += spent
                each = spent / len(fills)
                print(f"{label}: {subset:16} {each:.3f} s each, fill {min(fills):.3f} .. {max(fills):.3f}", flush=True)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
            print(f"{label}: {len(arguments.subsets)} x {arguments.limit} in {total:.1f} s, peak memory {peak:.2f} GB")


if __name__ == "__main__":
    main()
