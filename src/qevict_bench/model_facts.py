"""What can be said of a model without loading its weights: enough to check a command and to find its finished run."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qevict_bench.models import ModelSpec


@dataclass(frozen=True)
class ModelFacts:
    """As in models.LoadedModel; `weight_bytes` is the size of the weight files, 0 for a model without any."""

    name: str
    fingerprint: str
    dtype: str
    device: str
    max_context: int
    num_layers: int
    num_compressible: int
    weight_bytes: int


def describe(spec: ModelSpec) -> ModelFacts:
    """Facts about the model of `spec`, downloaded or converted first if need be. ValueError as in ModelSpec.load."""
    from transformers import AutoConfig

    from qevict_bench.models import compressible_layers

    dtype, device = spec.resolve()
    if spec.source == "tiny":
        loaded = spec.load()
        layers = len(loaded.compressible_layers)
        return ModelFacts(
            spec.name, loaded.fingerprint, dtype, device, loaded.max_context, loaded.num_layers, layers, 0
        )
    folder, identity = spec.locate()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{spec.name}: {folder}/config.json cannot be read: {error}") from error
    text = config.get_text_config(decoder=True)
    return ModelFacts(
        name=spec.name,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        dtype=dtype,
        device=device,
        max_context=int(text.max_position_embeddings),
        num_layers=int(text.num_hidden_layers),
        num_compressible=len(compressible_layers(config)),
        weight_bytes=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    )
