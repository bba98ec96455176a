"""Calibrate KVQuant for one model: python scripts/calibrate_kvquant.py model=smollm2_135m

Runs `samples` texts of `length` tokens forward and backward. Per full-attention layer it notes, of keys before RoPE and
of values, the numbers themselves and their squared gradients of the next-token loss (the Fisher weights), and writes:
0.5 and 99.5 % quantiles per key channel, and codebooks of 2, 3 and 4 bits for keys and for values by weighted k-means
over what is no outlier (Hooper et al., arXiv 2401.18079). The first `KVQuant.sinks` tokens of a sample do not count.
The file lies in the cache folder under the model's fingerprint; another calibration replaces it once it is complete.
Fields are in configs/calibrate_kvquant.yaml. Minutes on a CPU for the embedded models. Exit codes: 0 done, 2 a mistake
in the input (one line on stderr), 130 interrupted.

Deviations from the authors' code: k-means starts from quantiles, without a random seed; gradients are taken at what the
attention sees and turned back, so any supported model is calibrated, with norms on its keys or a fused projection too.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random

import hydra
import torch
import torch.nn.functional as F
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # runs from a clone where nothing of ours is installed

import run as cli  # noqa: E402
from methods.full_kv import FullKV  # noqa: E402
from methods.kvquant import KVQuant  # noqa: E402
from qevict_bench.attention import attend_sliding, register  # noqa: E402
from qevict_bench.budget import Budget  # noqa: E402
from qevict_bench.models import LoadedModel, ModelSpec  # noqa: E402
from qevict_bench.nuq import BITS, Codebooks, Sparse, normalized, static_params, token_params  # noqa: E402
from qevict_bench.session import KVSession  # noqa: E402
from qevict_bench.settings import MAX_SEED, build  # noqa: E402
from tasks.ruler.prose import sentences  # noqa: E402

log = logging.getLogger(__name__)
TAIL = 0.005  # of a key channel's values lies beyond either bound
LOSS_TOKENS = 256  # logits are made for so many tokens at a time
SHORTEST = 64  # tokens of a sample


@dataclass(frozen=True)
class Calibration:
    """The fields of configs/calibrate_kvquant.yaml. Raises ValueError, naming field, value and remedy."""

    model: ModelSpec
    text: str
    hub_id: str
    hub_config: str
    hub_split: str
    hub_field: str
    samples: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("length", SHORTEST)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} is too small; give an integer of at least {least}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed={self.seed} is out of range; give an integer from 0 to {MAX_SEED}")
        for name in ("hub_id", "hub_config", "hub_split", "hub_field"):
            if self.text == "hub" and not getattr(self, name).strip():
                raise ValueError(f"{name} is empty; text=hub needs one, as in hub_id=OWNER/NAME hub_field=text")


@dataclass
class Sample:
    """What one text leaves: per layer post-RoPE keys and values [H, T, D], gradients after the backward pass."""

    layers: frozenset[int]
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self, module: nn.Module, q_BHQD: Tensor, k_BHQD: Tensor, v_BHQD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Plain causal attention, called by the model in place of a session."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if index not in self.layers:
            held = k_BHQD.shape[2]
            return attend_sliding(q_BHQD[0], k_BHQD[0], v_BHQD[0], window or held, scale)[None]
        for x in (k_BHQD, v_BHQD):
            x.requires_grad_()
            x.retain_grad()
        self.kept[index] = (k_BHQD, v_BHQD)
        gqa = q_BHQD.shape[1] != k_BHQD.shape[1]
        return F.scaled_dot_product_attention(q_BHQD, k_BHQD, v_BHQD, is_causal=True, scale=scale, enable_gqa=gqa)


def observe(loaded: LoadedModel, ids: list[int]) -> Sample:
    """One text forward and backward."""
    sample = Sample(frozenset(loaded.compressible_layers))
    batch = torch.tensor([ids], device=loaded.model.device)
    with torch.enable_grad():
        hidden = loaded.model.model(batch, use_cache=False, kv=sample).last_hidden_state
        cut = hidden.detach().requires_grad_()
        head = loaded.model.get_output_embeddings()
        for begin in range(0, len(ids) - 1, LOSS_TOKENS):
            end = min(begin + LOSS_TOKENS, len(ids) - 1)
            logits = head(cut[0, begin:end]).float()
            F.cross_entropy(logits, batch[0, begin + 1 : end + 1], reduction="sum").backward()
        hidden.backward(cut.grad)
    return sample


def calibrate(loaded: LoadedModel, texts: list[list[int]]) -> Codebooks:
    """Tables of one model from samples of token ids."""
    sinks, sparse = KVQuant().sinks, Sparse(KVQuant().outliers, KVQuant().block)
    rope = next(iter(KVSession(loaded, FullKV(), Budget("1.0"), 1).layers.values())).rope
    seen: dict[int, list[tuple[Tensor, ...]]] = {index: [] for index in loaded.compressible_layers}
    for number, ids in enumerate(texts, 1):
        positions = torch.arange(len(ids), device=loaded.model.device)
        for index, (keys, values) in observe(loaded, ids).kept.items():
            with torch.inference_mode():
                turned = [rope.unrotate(x[0], positions, index, len(ids)) for x in (keys, keys.grad)]
                parts = (turned[0], turned[1].abs(), values[0], values.grad[0].abs())
                seen[index].append(tuple(part.detach()[:, sinks:].to(keys.dtype).cpu() for part in parts))
        log.info("%d of %d samples", number, len(texts))
    tables: dict[str, Tensor] = {}
    for index, parts in seen.items():
        keys, key_grads = (torch.cat([part[i] for part in parts], dim=1).float() for i in (0, 1))
        tables.update({f"{index}.{name}": table for name, table in key_tables(keys, key_grads).items()})
        tables.update({f"{index}.{name}": table for name, table in value_tables(parts, sparse).items()})
        seen[index] = []
    return Codebooks.of(tables)


def key_tables(keys_HSD: Tensor, grads_HSD: Tensor) -> dict[str, Tensor]:
    """Bounds per channel, and the codebooks of what lies within them."""
    tails = torch.tensor([TAIL, 1 - TAIL])
    low_HD, high_HD = (torch.stack(x) for x in zip(*(torch.quantile(k, tails, dim=0) for k in keys_HSD), strict=True))
    offset_HD, range_HD = static_params(low_HD, high_HD)
    scaled = normalized(keys_HSD, offset_HD[:, None], range_HD[:, None])
    inside = scaled.abs() <= 1
    books = codebooks(scaled[inside], grads_HSD[inside] ** 2)
    return {"key.low": low_HD, "key.high": high_HD, **{f"key.nuq{bits}": book for bits, book in books.items()}}


def value_tables(parts: list[tuple[Tensor, ...]], sparse: Sparse) -> dict[str, Tensor]:
    """Codebooks of values, normalized per token as the codec does; outliers are left out."""
    scaled, weights = [], []
    for part in parts:
        x_NTD, grad_NTD = (
            x[:, : x.shape[1] // sparse.tokens * sparse.tokens].unflatten(1, (-1, sparse.tokens)).flatten(0, 1).float()
            for x in part[2:]
        )
        chosen, offset, scale = token_params(x_NTD, sparse, part[2].dtype)
        scaled.append(normalized(x_NTD, offset, scale)[~chosen])
        weights.append(grad_NTD[~chosen] ** 2)
    return {f"value.nuq{bits}": book for bits, book in codebooks(torch.cat(scaled), torch.cat(weights)).items()}


def codebooks(values: Tensor, weights: Tensor) -> dict[int, Tensor]:
    """2^bits centroids of fp32 values, ascending, for every number of bits."""
    order = torch.argsort(values)
    values, weights = values[order].double(), weights[order].double()
    if not bool(weights.sum() > 0):
        weights = torch.ones_like(weights)
    return {bits: k_means(values, weights, 1 << bits).float() for bits in BITS}


def k_means(values_N: Tensor, weights_N: Tensor, num: int, rounds: int = 300) -> Tensor:
    """Lloyd's algorithm on ascending numbers, from quantiles of them; clusters without weight keep their centroid."""
    zero = values_N.new_zeros(1)
    mass, moment = (torch.cat((zero, x.cumsum(0))) for x in (weights_N, weights_N * values_N))
    centers = values_N[((torch.arange(num) + 0.5) / num * len(values_N)).long()]
    for _ in range(rounds):
        cuts = torch.searchsorted(values_N, (centers[1:] + centers[:-1]) / 2, right=True)
        edges = torch.cat((torch.tensor([0]), cuts, torch.tensor([len(values_N)])))
        inside, total = mass[edges].diff(), moment[edges].diff()
        moved = torch.where(inside > 0, total / torch.where(inside > 0, inside, 1.0), centers).sort().values
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers


def texts_of(asked: Calibration, loaded: LoadedModel) -> list[list[int]]:
    """`samples` pieces of `length` token ids, each opened as the tokenizer opens a text."""
    if asked.length > loaded.max_context:
        raise ValueError(
            f"length={asked.length} is longer than the context of {loaded.name}; give {SHORTEST} to "
            f"{loaded.max_context} tokens"
        )
    opening = list(loaded.tokenizer("")["input_ids"])
    size = asked.length - len(opening)
    ids: list[int] = []
    for passage in passages(asked):
        ids += loaded.tokenizer(passage, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= asked.samples * size:
            return [opening + ids[n * size : (n + 1) * size] for n in range(asked.samples)]
    raise ValueError(
        f"text={asked.text} has {len(ids)} tokens; {asked.samples} samples of {asked.length} need "
        f"{asked.samples * size}: give a longer text, or fewer samples"
    )


def passages(asked: Calibration) -> Iterator[str]:
    """Passages of the text that `asked` names."""
    if asked.text == "prose":
        stream = sentences(Random(asked.seed))
        while True:
            yield " ".join(next(stream) for _ in range(50)) + "\n\n"
    elif asked.text == "hub":
        yield from _of_hub(asked)
    else:
        try:
            yield Path(asked.text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
            raise ValueError(
                f"text={asked.text} cannot be read ({error}); give prose, hub or a text file in UTF-8"
            ) from error


def _of_hub(asked: Calibration) -> Iterator[str]:
    from datasets import load_dataset

    try:
        rows = load_dataset(asked.hub_id, asked.hub_config, split=asked.hub_split)
    except Exception as error:  # the library raises many kinds: missing, gated, offline, damaged
        raise ValueError(
            f"hub_id={asked.hub_id}, hub_config={asked.hub_config}, hub_split={asked.hub_split} cannot be loaded "
            f"({error}); check names and network"
        ) from error
    columns = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    if asked.hub_field not in columns:
        raise ValueError(
            f"hub_field={asked.hub_field} is no text field of {asked.hub_id}; choose one of "
            f"{', '.join(columns) or 'another data set'}"
        )
    yield from (row[asked.hub_field] or "" for row in rows)


@hydra.main(version_base="1.3", config_path=str(ROOT / "configs"), config_name="calibrate_kvquant")
def main(cfg: DictConfig) -> None:
    try:
        print(run(checked(cfg)), flush=True)
    except (ValueError, OmegaConfBaseException) as error:
        sys.exit(cli.report(error))


def checked(cfg: DictConfig) -> Calibration:
    """What the configuration asks for. Raises ValueError."""
    values, model = (
        dict(OmegaConf.to_container(node, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
        for node in (cfg, cfg.model)
    )
    spec = build(get_class(model.pop("_target_")), model, "model.")
    made: Calibration = build(Calibration, {**values, "model": spec}, "")
    return made


def run(asked: Calibration) -> str:
    """Calibrate and save; says what was made."""
    loaded = asked.model.load(register())
    texts = texts_of(asked, loaded)
    made = calibrate(loaded, texts)
    digest = hashlib.sha256(str(texts).encode()).hexdigest()[:16]
    notes = {field.name: str(getattr(asked, field.name)) for field in fields(asked) if field.name != "model"}
    path = made.save(loaded.fingerprint, {"model": loaded.name, "token_digest": digest, **notes})
    return f"{path}: codebooks {made.digest} of {loaded.name}, {asked.samples} samples of {asked.length} tokens"


def job() -> None:
    """`main`, unless a field is unknown: of those, `cli` would name the known ones of run.py."""
    known = [field.name for field in fields(Calibration)]
    for text in sys.argv[1:]:
        named = re.match(r"[+~]*(?!model\b|hydra\b)([\w./]+)=", text)
        if named and named[1] not in known:
            raise ValueError(f"{named[1]} is no field; fields: {', '.join(known)}")
    main()


if __name__ == "__main__":
    sys.exit(cli.command_line(sys.argv[1:], job))
