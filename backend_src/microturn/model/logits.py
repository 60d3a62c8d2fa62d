"""What turns change in the logits of their next token: biases, and masks of the tokens that a grammar allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.transfer import upload


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
    vocab_size = logits.shape[-1]
    if logits.is_cpu:
        for row, mask in enumerate(masks):
            if mask is not None:
                bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").astype(np.float32)
                # Infinite where it is allowed, and negative where not: as fast for any mask, unlike a copy under one.
                bounds = torch.from_numpy(bits).sub_(0.5).mul_(torch.inf)
                torch.minimum(logits[row], bounds, out=logits[row])
    else:
        forbid_others_there(logits, masks)


def forbid_others_there(logits: Tensor, masks: Sequence[NDArray[np.uint32] | None]) -> None:
    """The same on a device, which is sent bits and not bytes."""
    vocab_size = logits.shape[-1]
    rows = [row for row, mask in enumerate(masks) if mask is not None]
    words = np.stack([mask for mask in masks if mask is not None]).view(np.int32)
    places = upload(torch.tensor(rows), logits.device)
    sent = upload(torch.from_numpy(words), logits.device).unsqueeze(-1)
    allowed = sent.bitwise_right_shift(torch.arange(32, device=logits.device)).bitwise_and(1)
    forbidden = allowed.flatten(1)[:, :vocab_size] == 0
    logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(forbidden, -torch.inf))
