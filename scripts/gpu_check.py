"""Does the engine do on this GPU what it does on the CPU? Needs torch, transformers and a clone of the project.

    python scripts/gpu_check.py                        # CUDA against CPU
    python scripts/gpu_check.py --device cpu           # CPU against CPU: tests this script
    python scripts/gpu_check.py --only codecs,speed

Random tiny fp32 models (Llama with grouped queries, Qwen3, Gemma 3 with sliding layers), teacher-forced with the
tokens the CPU chose, so that one different choice is one difference. A token may differ where the CPU's two best logits
are all but equal (said as `near tie`). At the end a speed summary: random bf16 weights in the geometry of Llama-3.1-8B
with few layers.

One line per check: pass or FAIL and what was measured. Exit code 0 if all pass, 1 if one fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

from methods.full_kv import FullKV  # noqa: E402
from methods.qevict import QEvict  # noqa: E402
from methods.snapkv import SnapKV  # noqa: E402
from methods.streaming_llm import StreamingLLM  # noqa: E402
from qevict_bench.attention import register  # noqa: E402
from qevict_bench.budget import Budget  # noqa: E402
from qevict_bench.codecs import Codec, PerChannel, PerToken  # noqa: E402
from qevict_bench.models import LoadedModel, compressible_layers  # noqa: E402
from qevict_bench.policy import KVPolicy  # noqa: E402
from qevict_bench.session import KVSession, geometry_of  # noqa: E402

PROMPT, NEW, VOCAB = 250, 25, 128
FULL_KV_GAP = 1e-3  # largest accepted difference of fp32 logits; codes may flip at a rounding edge, hence the second
PACKED_GAP = 5e-2
NEAR_TIE = 2e-3  # logits this close may change places
Outcome = tuple[bool, str]


@dataclass(frozen=True)
class Run:
    """Teacher-forced logits [B, steps, V] on the CPU, and the tiers of all units after every step."""

    logits: Tensor
    tiers: list[list[Tensor]]


def tiny(family: str, device: str) -> LoadedModel:
    """The same weights on every device."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 4096, "initializer_range": 0.15}
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention", "full_attention"]
        config: Any = Gemma3TextConfig(**sizes, sliding_window=48, layer_types=kinds, query_pre_attn_scalar=16)
    else:
        config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](**sizes)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=register())
    return wrapped(model.to(device), family, device)


def wrapped(model: Any, name: str, device: str) -> LoadedModel:
    model.eval().requires_grad_(False)
    config = model.config
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens=True: " ".join(map(str, ids)))
    layers, length = compressible_layers(config), config.max_position_embeddings
    dtype = str(model.dtype).removeprefix("torch.")
    return LoadedModel(name, model, tokenizer, name, dtype, device, False, (), length, layers, config.num_hidden_layers)


def prompts(*lengths: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in lengths]


def session(loaded: LoadedModel, policy: KVPolicy, spec: str, rows: list[list[int]], new: int) -> KVSession:
    budget = Budget(spec)
    fitted = policy.fit(budget, geometry_of(loaded), min(map(len, rows)), new)
    return KVSession(loaded, fitted, budget, len(rows), max_new=new)


def tiers(live: KVSession) -> list[Tensor]:
    """Per layer: position and tier of every live unit, on the CPU."""
    return [torch.stack((x.table.pos.long(), x.table.tier.long())).cpu() for x in live.layers.values()]


def greedy(live: KVSession, rows: list[list[int]], chunk: int, forced: Tensor | None) -> Run:
    """Prefill and decode NEW tokens: the best ones, or those of `forced` [B, NEW]."""
    logits = [live.prefill(rows, chunk)]
    kept = [tiers(live)]
    for step in range(NEW):
        tokens = logits[-1].argmax(-1) if forced is None else forced[:, step]
        logits.append(live.decode(tokens.tolist()))
        kept.append(tiers(live))
    return Run(torch.stack(logits, dim=1).float().cpu(), kept)


def same_units(a: Run, b: Run) -> int:
    """First step after which kept units or tiers differ, or -1."""
    for step, (x, y) in enumerate(zip(a.tiers, b.tiers, strict=True)):
        if any(p.shape != q.shape or not torch.equal(p, q) for p, q in zip(x, y, strict=True)):
            return step
    return -1


def compare(reference: Run, other: Run, limit: float, units: bool) -> Outcome:
    """Logits within `limit`, the same best token at every step (near ties apart), the same units if asked."""
    gap = (reference.logits - other.logits).abs().amax((0, 2))
    said = f"logit gap {float(gap.max()):.1e} (at most {limit:.0e})"
    good = bool(gap.max() <= limit)
    differs = reference.logits.argmax(-1) != other.logits.argmax(-1)
    if bool(differs.any()):
        step, best = int(differs.any(0).nonzero()[0]), reference.logits.topk(2).values[differs]
        margin = float((best[:, 0] - best[:, 1]).max())
        said += f", {'near tie' if margin <= NEAR_TIE else 'tokens differ'} from step {step} (margin {margin:.1e})"
        good &= margin <= NEAR_TIE
    else:
        said += ", tokens equal"
    step = same_units(reference, other) if units else -1
    if step >= 0:
        said += f", kept units differ from step {step} (logit gap there {float(gap[step]):.1e})"
    elif units:
        said += ", kept units equal"
    return good and step < 0, said


def held_bytes(live: KVSession) -> int:
    """Bytes of the storages that the layers really hold, found by walking them."""
    found = {}
    for layer in live.layers.values():
        for tensor in layer.stored_tensors():
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())


POLICIES: dict[str, KVPolicy] = {
    "qevict": QEvict(sink=4, recent=16, observation=16, window=8, q=0.7),
    "qevict per head": QEvict(
        sink=4, recent=16, observation=16, window=8, key_params="group:4", head_scope="kv_head", q=0.4, decay=0.25
    ),
    "snapkv": SnapKV(window=16),
    "streaming_llm": StreamingLLM(),
}


def check_model(family: str, device: str) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Checks of one family on `device` against the CPU."""
    on_cpu, on_device = tiny(family, "cpu"), tiny(family, device)
    [row] = prompts(PROMPT)

    def on_both(policy: KVPolicy, spec: str, limit: float) -> Outcome:
        reference = greedy(session(on_cpu, policy, spec, [row], NEW), [row], 4096, None)
        live = session(on_device, policy, spec, [row], NEW)
        forced = reference.logits.argmax(-1)
        good, said = compare(reference, greedy(live, [row], 4096, forced), limit, units=True)
        if spec != "1.0":
            allowed, held = live.trace[0].decode[-1][2], held_bytes(live)
            peak = max(used / bound for used, _, bound in live.trace[0].decode)
            moves = live.trace[0]
            said += f", {held} bytes held of {allowed} allowed (peak {peak:.3f}), {moves.promotions} promoted, "
            said += f"{moves.demotions} demoted, {moves.evictions} evicted"
            good &= held <= allowed and peak <= 1
        return good, said

    yield f"{family}: full_kv", lambda: on_both(FullKV(), "1.0", FULL_KV_GAP)
    for name, policy in POLICIES.items():
        yield f"{family}: {name} 0.2", lambda policy=policy: on_both(policy, "0.2", PACKED_GAP)  # type: ignore[misc]


def check_session(device: str) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """What must hold on the device alone."""
    loaded = tiny("llama", device)
    [row] = prompts(PROMPT)

    def chunked(policy: KVPolicy) -> Outcome:
        whole = greedy(session(loaded, policy, "0.2", [row], NEW), [row], 4096, None)
        forced = whole.logits.argmax(-1)
        return compare(whole, greedy(session(loaded, policy, "0.2", [row], NEW), [row], 37, forced), PACKED_GAP, True)

    def batched(policy: KVPolicy) -> Outcome:
        rows = prompts(PROMPT, PROMPT - 77)
        fitted = policy.fit(Budget("0.2"), geometry_of(loaded), min(map(len, rows)), NEW)
        alone = [greedy(KVSession(loaded, fitted, Budget("0.2"), 1, max_new=NEW), [r], 4096, None) for r in rows]
        forced = torch.cat([run.logits for run in alone]).argmax(-1)
        together = greedy(KVSession(loaded, fitted, Budget("0.2"), 2, max_new=NEW), rows, 4096, forced)
        joined = [
            [torch.cat(layers, dim=1) for layers in zip(*steps, strict=True)]
            for steps in zip(*(run.tiers for run in alone), strict=True)
        ]
        return compare(Run(torch.cat([run.logits for run in alone]), joined), together, PACKED_GAP, True)

    def forked(policy: KVPolicy) -> Outcome:
        live = session(loaded, policy, "0.2", [row], NEW)
        live.prefill([row])
        twin, before = live.fork(), tiers(live)
        first = torch.stack([twin.decode([token]) for token in row[:NEW]])
        untouched = all(torch.equal(x, y) for x, y in zip(before, tiers(live), strict=True))
        second = torch.stack([live.decode([token]) for token in row[:NEW]])
        gap = float((first - second).abs().max())
        return untouched and gap <= PACKED_GAP, f"original untouched: {untouched}, logit gap to the fork {gap:.1e}"

    for name, policy in POLICIES.items():
        for what, run in (("chunked = one shot", chunked), ("batch = alone", batched), ("fork", forked)):
            yield f"{what}: {name}", lambda run=run, policy=policy: run(policy)  # type: ignore[misc]


def check_codecs(device: str) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Codes, parameters and decoded values, byte by byte."""
    codecs: list[tuple[str, Codec]] = [
        (f"{params} int{bits}", PerChannel(bits=bits, params=params))
        for params in ("window", "group", "static", "relative8")
        for bits in (2, 3, 4, 8)
    ]
    codecs += [(f"per token int{bits}", PerToken(bits=bits)) for bits in (2, 3, 4, 8)]

    def same(codec: Codec, dtype: torch.dtype) -> Outcome:
        rng = torch.Generator().manual_seed(3)
        x, prompt = (
            torch.randn((96, 8, 64), generator=rng).to(dtype),
            torch.randn((2, 200, 64), generator=rng).to(dtype),
        )
        stored = []
        for where in ("cpu", device):
            reference = tuple(r.repeat_interleave(48, 0) for r in codec.reference(prompt.to(where)))
            encoded = codec.encode(x.to(where), reference)
            decoded = codec.decode(encoded.slot, encoded.group, reference, dtype)
            stored.append(
                [part.cpu().contiguous().view(torch.uint8) for part in (*encoded.slot, *encoded.group, decoded)]
            )
        wrong = sum(int((a != b).sum()) for a, b in zip(*stored, strict=True))
        return wrong == 0, f"{wrong} of {sum(part.numel() for part in stored[0])} bytes differ"

    for name, codec in codecs:
        for dtype in (torch.float32, torch.bfloat16):
            title = f"codec {name}, {str(dtype).removeprefix('torch.')}"
            yield title, lambda codec=codec, dtype=dtype: same(codec, dtype)  # type: ignore[misc]


def speed(device: str, seconds: float, layers: int, prompt_len: int) -> None:
    """Decode times and memory of full_kv and qevict; `seconds` in all, at least 16 tokens each."""
    cuda = device.startswith("cuda")
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    narrow = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = (wide if cuda else narrow) | {"num_hidden_layers": layers, "vocab_size": 32000}
    config = LlamaConfig(**sizes, max_position_embeddings=131072)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=register())
    loaded = wrapped(model.to(device), "random", device)
    rows = prompts(prompt_len)
    cases = [("full_kv", FullKV(), "1.0", True), ("qevict", QEvict(), "0.2", True)]
    cases += [("qevict, no working copy", QEvict(), "0.2", False)]
    for name, policy, spec, working_copy in cases:
        base = _reset(cuda)
        live = KVSession(
            loaded,
            policy.fit(Budget(spec), geometry_of(loaded), prompt_len, 4096),
            Budget(spec),
            1,
            max_new=4096,
            working_copy=working_copy,
        )
        begin = time.perf_counter()
        token = live.prefill(rows).argmax(-1).tolist()
        prefill_s, prefill_gb = time.perf_counter() - begin, _peak(cuda, base)
        _reset(cuda)
        for _ in range(8):
            token = live.decode(token).argmax(-1).tolist()
        times: list[float] = []
        until = time.perf_counter() + seconds / len(cases)
        while len(times) < 16 or (time.perf_counter() < until and len(times) < 512):
            begin = time.perf_counter()
            token = live.decode(token).argmax(-1).tolist()
            times.append(1000 * (time.perf_counter() - begin))
        print(
            f"speed {name:24} prefill {prefill_s:6.2f} s, decode median {statistics.median(times):7.2f} ms "
            f"mean {statistics.fmean(times):7.2f} ms per token (n {len(times)}), peak above weights "
            f"{prefill_gb:.2f} GB prefill, {_peak(cuda, base):.2f} GB decode, cache {held_bytes(live) / 1e9:.3f} GB",
            flush=True,
        )
        del live


def _reset(cuda: bool) -> int:
    if not cuda:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(cuda: bool, base: int) -> float:
    """GB above `base`; nan on a CPU."""
    return (torch.cuda.max_memory_allocated() - base) / 1e9 if cuda else float("nan")


def run(title: str, check: Callable[[], Outcome]) -> bool:
    try:
        good, said = check()
    except Exception as error:
        traceback.print_exc()
        good, said = False, f"{type(error).__name__}: {error}"
    print(f"{'pass' if good else 'FAIL'}  {title}: {said}", flush=True)
    return good


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="", help="cuda, cuda:1, cpu ...; by default the GPU")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups of checks, separated by commas")
    parser.add_argument("--speed-seconds", type=float, default=60.0, help="decoding time of the speed summary")
    parser.add_argument("--layers", type=int, default=8, help="layers of the speed summary's model")
    parser.add_argument("--prompt", type=int, default=0, help="its prompt in tokens (16384 on a GPU, else 512)")
    args = parser.parse_args(argv)
    if unknown := set(args.only.split(",")) - set(GROUPS):
        parser.error(f"--only {args.only}: {', '.join(sorted(unknown))} is unknown; choose from {', '.join(GROUPS)}")
    if args.device[:4] in ("", "cuda") and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; --device cpu tests the script itself", file=sys.stderr)
        return 2
    device = args.device or "cuda"
    torch.set_float32_matmul_precision("highest")
    named = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {device}: {named}, against cpu")
    groups = args.only.split(",")
    outcomes = []
    for group in [group for group in GROUPS if group in groups and group != "speed"]:
        outcomes += [run(title, check) for title, check in GROUPS[group](device)]
    if "speed" in groups:
        speed(device, args.speed_seconds, args.layers, args.prompt or (16384 if device.startswith("cuda") else 512))
    print(f"{sum(outcomes)} of {len(outcomes)} checks pass")
    return 0 if all(outcomes) else 1


def _models(device: str) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    for family in ("llama", "qwen3", "gemma3"):
        yield from check_model(family, device)


GROUPS: dict[str, Callable[[str], Iterator[tuple[str, Callable[[], Outcome]]]]] = {
    "codecs": check_codecs,
    "models": _models,
    "session": check_session,
    "speed": lambda device: iter(()),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
