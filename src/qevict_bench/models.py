"""Which model, and how to load it: embedded in a package, from the Hub, from a folder, or tiny and random.

`ModelSpec` is the target of configs/model/*.yaml; `ModelSpec.load` gives the `LoadedModel` that the engine runs.
Models the cache cannot serve are refused here, by what their configuration says and never by their name.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from qevict_bench.tiny import tiny_model
from qevict_bench.weights import embedded_folder, hub_snapshot, identity_of, is_complete, quiet

SOURCES = ("embedded", "hub", "local", "tiny")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEVICES = ("auto", "cpu", "cuda")
CHATS = ("auto", "template", "plain")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, without gradients, with what the engine needs to know of it.

    `dtype` and `device` are the resolved ones ("bfloat16", "cpu"). `eos_ids` end a generation. `max_context` is in
    tokens. `compressible_layers` are the indices of the full-attention layers, of `num_layers` layers in all.
    `fingerprint` names configuration and weights, not dtype or device.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    fingerprint: str
    dtype: str
    device: str
    chat: bool
    eos_ids: tuple[int, ...]
    max_context: int
    compressible_layers: tuple[int, ...]
    num_layers: int


@dataclass(frozen=True)
class ModelSpec:
    """Where a model comes from and how it is to be run.

    `source` decides which of the other fields count: `package` (the distribution that holds the weights) and
    `install` (the command that installs it) for "embedded", `id` and `revision` for "hub", `path` for "local", none
    for "tiny". dtype "auto" is bfloat16, float32 for "tiny": byte budgets are stated for 16-bit caches. device "auto"
    takes a GPU where there is one. chat "auto" uses the tokenizer's chat template if it has one, "template" demands
    one, "plain" ignores it.
    """

    name: str
    source: str
    package: str = ""
    install: str = ""
    id: str = ""
    revision: str = "main"
    path: str = ""
    dtype: str = "auto"
    device: str = "auto"
    chat: str = "auto"

    def load(self, attn_implementation: str = "sdpa") -> LoadedModel:
        """Load weights and tokenizer; `attn_implementation` is a name that transformers knows or was given.

        Raises ValueError if a field is wrong, the weights are not to be had, or the cache cannot serve the model.
        """
        dtype, device = self.resolve()
        if self.source == "tiny":
            model, tokenizer, identity = tiny_model(attn_implementation, DTYPES[dtype], device)
        else:
            folder, identity = self.locate()
            model, tokenizer = _from_folder(folder, self.name, attn_implementation, DTYPES[dtype], device)
        if self.chat == "template" and not tokenizer.chat_template:
            raise ValueError(f"model.chat=template, but {self.name} has no chat template; use model.chat=plain")
        return around(model, tokenizer, self.name, identity=identity, chat=self.chat != "plain")

    def outline(self) -> LoadedModel:
        """The model without its weights: enough to make prompts and to count bytes. ValueError as in `load`."""
        if self.source == "tiny":
            return self.load()
        folder, identity = self.locate()
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[self.resolve()[0]])
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return around(model, tokenizer, self.name, identity=identity, chat=self.chat != "plain")

    def resolve(self) -> tuple[str, str]:
        """The resolved (dtype, device)."""
        choices = {"source": SOURCES, "dtype": ("auto", *DTYPES), "device": DEVICES, "chat": CHATS}
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"model.{field}={getattr(self, field)!r}: choose one of {', '.join(allowed)}")
        has_gpu = torch.cuda.is_available()
        if self.device == "cuda" and not has_gpu:
            raise ValueError("model.device=cuda, but torch sees no GPU here; use model.device=cpu or auto")
        default_dtype = "float32" if self.source == "tiny" else "bfloat16"
        default_device = "cuda" if has_gpu else "cpu"
        return (
            default_dtype if self.dtype == "auto" else self.dtype,
            default_device if self.device == "auto" else self.device,
        )

    def locate(self) -> tuple[Path, str]:
        """A folder in the transformers format, and a text that identifies its content."""
        if self.source == "embedded":
            folder = embedded_folder(self.name, self.package, self.install)
        elif self.source == "hub":
            folder = hub_snapshot(self.id, self.revision)
            return folder, f"hub:{self.id}:{folder.name}"
        else:
            folder = Path(self.path).expanduser()
            if not self.path or not is_complete(folder):
                raise ValueError(
                    f"model.path={self.path!r} is not a complete model folder: it needs config.json, tokenizer files "
                    "and all its *.safetensors"
                )
        return folder, identity_of(folder)


def around(
    model: PreTrainedModel, tokenizer: Any, name: str, *, identity: str = "in memory", chat: bool = True
) -> LoadedModel:
    """A `LoadedModel` around a model that is already in memory, loaded with the attention of `attention.register()`.

    `identity` names its weights for fingerprints. Raises ValueError if the cache cannot serve the model.
    """
    check_supported(model.config, name)
    model.eval().requires_grad_(False)
    text = model.config.get_text_config(decoder=True)
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        chat=chat and bool(tokenizer.chat_template),
        eos_ids=_eos_ids(model, tokenizer),
        max_context=int(text.max_position_embeddings),
        compressible_layers=compressible_layers(model.config),
        num_layers=int(text.num_hidden_layers),
    )


def check_supported(config: PretrainedConfig, name: str) -> None:
    """Raise ValueError, saying why, if the cache cannot serve a model of this configuration. Loads no weights."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    recurrent = ("mamba", "ssm_", "state_size", "block_types", "layers_block_type", "linear_attn", "linear_conv")
    reason = ""
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif text is not config:
        reason = "it is multimodal"
    elif kinds:
        reason = f"it has layers of the kinds {', '.join(sorted(kinds))}"
    elif not getattr(text, "num_attention_heads", None) or any(key.startswith(recurrent) for key in text.to_dict()):
        reason = "it has recurrent or linear-attention layers"
    elif getattr(text, "kv_lora_rank", None):
        reason = "it stores latent vectors (MLA), not keys and values"
    elif getattr(text, "attn_logit_softcapping", None):
        reason = "it caps its attention logits (attn_logit_softcapping)"
    elif getattr(text, "num_kv_shared_layers", None):
        reason = "some of its layers share one cache (num_kv_shared_layers)"
    elif getattr(text, "use_bidirectional_attention", None):
        reason = "its attention is bidirectional"
    else:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        if any("sink" in key.rsplit(".", 1)[-1] for key, _ in skeleton.named_parameters()):
            reason = "its attention has learned sinks"
        elif not skeleton._supports_attention_backend:
            reason = "its code in transformers takes no attention function from outside"
        elif not any(key.endswith("rotary_emb") for key, _ in skeleton.named_modules()):
            reason = "it has no rotary position embedding"
    if reason:
        raise ValueError(
            f"{name} (model type {config.model_type}) is not supported: {reason}. "
            "Use a decoder with rotary positions and full or sliding-window attention, such as Llama, Qwen or Gemma 3"
        )


def compressible_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """Indices of the full-attention layers: only their caches grow with the context. ValueError if there is none."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) or 0
    if window >= text.max_position_embeddings:  # Phi-3: a window that never closes
        return tuple(range(text.num_hidden_layers))
    if kinds is None:
        sliding = window and getattr(text, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * text.num_hidden_layers
    full = tuple(index for index, kind in enumerate(kinds) if kind == "full_attention")
    if not full:
        raise ValueError(
            f"Nothing is compressible: all {text.num_hidden_layers} layers attend to a sliding window of "
            f"{text.sliding_window} tokens. Use a model with full-attention layers"
        )
    return full


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = set(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def _from_folder(
    folder: Path, name: str, attn_implementation: str, dtype: torch.dtype, device: str
) -> tuple[PreTrainedModel, Any]:
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            check_supported(config, name)
            compressible_layers(config)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                output_loading_info=True,
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                local_files_only=True,
                **({} if device == "cpu" else {"device_map": {"": device}}),
            )
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{name}: {folder} is not a complete model folder: {error}") from error
    absent = sorted(report["missing_keys"])  # transformers fills them with random numbers
    if absent:
        raise ValueError(
            f"{name}: {folder} is not a complete model folder: it lacks {len(absent)} weights: {absent[:3]}"
        )
    return model, tokenizer
