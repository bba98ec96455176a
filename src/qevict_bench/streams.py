"""Predictions along a token stream, in few enough numbers to keep: FullKV's are stored once, for all methods.

A distribution over the vocabulary is kept as the log-probabilities of FullKV's `TOP` most probable tokens and of one
bucket with all others. Merging tokens never raises a KL divergence, so what comes of it is a lower bound.

Shapes: N tokens, V vocabulary, K = min(TOP, V) kept tokens. Logarithms are natural ones.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

TOP = 1024
LONGEST_PERIOD = 8
SHORTEST_LOOPING = 2 * LONGEST_PERIOD

log = logging.getLogger(__name__)


class Predictions(NamedTuple):
    """What a model predicts for each token of a stream from all tokens before it. Tensors lie on the CPU.

    token_N the stream's ids, argmax_N the predicted ones, token_log_prob_N of the stream's (int64, int64, fp32); top_NK
    FullKV's most probable ids, log_prob_NK of those, rest_N of all others together (int32, fp32, fp32; -inf if there
    are none).
    """

    token_N: Tensor
    argmax_N: Tensor
    token_log_prob_N: Tensor
    top_NK: Tensor
    log_prob_NK: Tensor
    rest_N: Tensor


def most_probable(logits_NV: Tensor) -> Tensor:
    """Ids [N, K] of the most probable tokens."""
    return logits_NV.topk(min(TOP, logits_NV.shape[-1]), dim=-1).indices.int()


def predict(logits_NV: Tensor, token_N: Tensor, top_NK: Tensor) -> Predictions:
    """The predictions in `logits_NV`, on the partition into `top_NK` and the rest.

    Raises ArithmeticError if a logit is not a number.
    """
    log_prob_NV = logits_NV.float().log_softmax(dim=-1)
    if bool(log_prob_NV.isnan().any()):
        raise ArithmeticError("the model's logits are not numbers, so there is nothing to compare")
    at_NK = top_NK.to(logits_NV.device, torch.int64)
    token_log_prob_N = log_prob_NV.gather(1, token_N.to(logits_NV.device)[:, None])[:, 0]
    rest_N = log_prob_NV.double().scatter(1, at_NK, -torch.inf).logsumexp(dim=-1).float()
    parts = (logits_NV.argmax(dim=-1), token_log_prob_N, top_NK, log_prob_NV.gather(1, at_NK), rest_N)
    return Predictions(token_N.cpu(), *(part.cpu() for part in parts))


def joined(parts: Sequence[Predictions]) -> Predictions:
    """Predictions of consecutive tokens."""
    return Predictions(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def kl_divergence(full: Predictions, method: Predictions) -> Tensor:
    """KL(p_full || p_method) per token [N], fp64, in nats, on FullKV's partition; exactly 0 where both are equal.

    What fp32 rounded away is put right by normalizing both sides in fp64.
    """
    p_NK, q_NK = (
        torch.cat((each.log_prob_NK, each.rest_N[:, None]), dim=1).double().log_softmax(dim=-1)
        for each in (full, method)
    )
    terms_NK = torch.where(p_NK > -torch.inf, p_NK.exp() * (p_NK - q_NK), 0.0)
    return terms_NK.sum(dim=-1).clamp(min=0)


def looping(tokens: Sequence[int]) -> bool:
    """Whether the second half of a stream repeats itself with a period of at most 8 tokens, at least twice.

    Never of streams under 16 tokens, too short to tell.
    """
    half = tokens[len(tokens) // 2 :]
    periods = range(1, min(LONGEST_PERIOD, len(half) // 2) + 1)
    return len(tokens) >= SHORTEST_LOOPING and any(half[period:] == half[:-period] for period in periods)


# ---- files ----


def path_of(folder: Path, key: str) -> Path:
    """Where the predictions lie that `key` describes; `key` is a text of everything that can change them."""
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"


def load(folder: Path, key: str) -> Predictions | None:
    """The stored predictions; None if there are none, or the file is damaged or of another key."""
    path = path_of(folder, key)
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata() or {}
            found = Predictions(*(file.get_tensor(name) for name in Predictions._fields))
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        log.warning("%s cannot be read (%s); FullKV runs again", path, error)
        return None
    if notes != {"key": key, "sha256": _digest(found)}:
        log.warning("%s is damaged, or not what its name says; FullKV runs again", path)
        return None
    return found


def save(folder: Path, key: str, predictions: Predictions) -> None:
    """Store predictions in one step, so that readers and other writers never meet half a file.

    Raises ValueError if the folder cannot be written.
    """
    path = path_of(folder, key)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    data = to_bytes(predictions._asdict(), {"key": key, "sha256": _digest(predictions)})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(scratch, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise ValueError(f"{folder}, for FullKV's predictions, cannot be written ({error.strerror})") from error


def _digest(predictions: Predictions) -> str:
    content = hashlib.sha256()
    for tensor in predictions:
        content.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        content.update(tensor.contiguous().numpy().tobytes())
    return content.hexdigest()
