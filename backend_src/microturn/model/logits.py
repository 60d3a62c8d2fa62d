"""What turns change in the logits of their next token: biases, and masks of the tokens that a grammar allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.upload import upload


def add_biases(logits: Tensor, biases: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Adds each row's biases, pairs of a token id and a number.

    Args:
        logits: float32 [rows, vocab_size]; changed in place.
        biases: as many; ids from vocab_size on count for nothing.
    """
    vocab_size = logits.shape[-1]
    cells = [
        (row * vocab_size + token_id, bias)
        for row, of_row in enumerate(biases)
        for token_id, bias in of_row
        if token_id < vocab_size
    ]
    if not cells:
        return
    places, values = (upload(torch.tensor(part), logits.device) for part in zip(*cells, strict=True))
    logits.view(-1).index_add_(0, places, values.to(logits.dtype))


def forbid_others(logits: Tensor, masks: Sequence[NDArray[np.uint32] | None]) -> None:
    """Makes all logits infinitely small but those that each row's mask allows.

    Args:
        logits: [rows, vocab_size] without infinities, so that what is allowed stays above; changed in place.
        masks: as many; a bit for each token, the lowest first. None allows all.
    """
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    words = np.stack([mask for mask in masks if mask is not None])
    places = upload(torch.tensor(rows), logits.device)
    allowed = _bits(words, logits)
    logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(~allowed, -torch.inf))


def _bits(words: NDArray[np.uint32], logits: Tensor) -> Tensor:
    """Bits as bool [rows, vocab_size], where the logits lie."""
    vocab_size = logits.shape[-1]
    if logits.is_cpu:
        unpacked = np.unpackbits(words.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
        return torch.from_numpy(unpacked).bool()
    # A GPU is sent the bits and not the bytes.
    sent = upload(torch.from_numpy(words.view(np.int32)), logits.device)
    bits = sent.unsqueeze(-1).bitwise_right_shift(torch.arange(32, device=logits.device)).bitwise_and(1)
    return bits.flatten(1)[:, :vocab_size].bool()
