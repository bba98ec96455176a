"""A tiny random Llama with grouped queries and a byte tokenizer: no download, the same weights on every machine."""

from __future__ import annotations

import hashlib
import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

TINY = {
    "vocab_size": 259,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 131072,
    "initializer_range": 0.15,  # wide enough that attention is not uniform
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
TINY_CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def tiny_model(
    attn_implementation: str, dtype: torch.dtype, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, str]:
    """(model, tokenizer, text that identifies them). The weights are drawn in float32, whatever `dtype` is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = AutoModelForCausalLM.from_config(LlamaConfig(**TINY), dtype=torch.float32).state_dict()
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(**TINY), dtype=dtype, attn_implementation=attn_implementation
        )
    model.load_state_dict(drawn)
    weights = hashlib.sha256()
    for name, tensor in sorted(drawn.items()):
        weights.update(name.encode())
        weights.update(tensor.numpy().tobytes())
    return model.to(device), byte_tokenizer(), json.dumps([TINY, TINY_CHAT, weights.hexdigest()])


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, its id the byte; <s> 256 opens every text, </s> 257, <pad> 258. Gives offsets."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}  # the byte-level alphabet of GPT-2
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte if byte in printable else 256 + others.index(byte)): byte for byte in range(256)}
    special = {"<s>": 256, "</s>": 257, "<pad>": 258}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **special}, merges=[]))
    tokenizer.add_special_tokens(list(special))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=TINY_CHAT,
        clean_up_tokenization_spaces=False,
    )
