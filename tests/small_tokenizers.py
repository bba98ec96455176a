"""Tokenizers built on the spot, so that tests need no model: one token per byte, and words with multi-token numbers."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# In the manner of Llama 3: the template itself writes BOS, and strips what the user says.
CHAT_TEMPLATE = (
    "<s>{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_SPECIAL = ["<s>", "</s>", "<|start|>", "<|end|>"]


def byte_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte; digits one by one."""
    alphabet = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return _wrap(Tokenizer(models.BPE(vocab=alphabet, merges=[])), chat)


def merging_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few sentences: about three to four characters a token, so tokens cross borders."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "The code of the old mill is on the table. What is the serial of the harbour? Rain taps on the glass."
    trainer = trainers.BpeTrainer(
        vocab_size=500, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([text, text.lower(), " ".join(map(str, range(100)))], trainer)
    return _wrap(tokenizer, chat)


def _wrap(tokenizer: Tokenizer, chat: bool) -> PreTrainedTokenizerFast:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE if chat else None
    return fast
