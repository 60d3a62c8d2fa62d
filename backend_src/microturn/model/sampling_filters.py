"""Draws tokens: temperature, top_k, top_p and min_p give exact integer weights, by which a token is drawn.

In torch, for a CPU; `gpu.sampling` does the same on a GPU, to the bit but for the rounding of exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from microturn.model.sampling_columns import SamplingColumns
from microturn.model.sampling_row import SamplingRow

# Weight of the likeliest token. Tokens less than 2**-44 as likely get 0; the sum of half a million stays below 2**63.
UNIT = 2.0**44

# The nucleus is usually among this many likeliest tokens.
_NUM_LIKELY = 256


def draw_filtered(logits: Tensor, greatest: Tensor, rows: Sequence[SamplingRow], columns: SamplingColumns) -> Tensor:
    """Ids, int64 [rows, 1], of a temperature above 0; of other rows anything.

    Args:
        logits: [rows, vocab_size], without NaN.
        greatest: [rows, 1], the greatest of each row.
        rows: with the options.
        columns: the same options on the device.
    """
    # A smaller temperature than the smallest float would overflow the division; sampling is greedy there anyway.
    relative = (logits - greatest).div_(columns.temperature.clamp(min=1e-5).float())
    if any(row.allowed is not None for row in rows):
        relative.clamp_(min=-80)  # weighs nothing either, and the exponential of infinities is slow
    relative.exp_()
    # Inverse transform sampling in the order of the vocabulary: a rounding error in one probability, as with another
    # batch, moves the bounds slightly and cannot swap two tokens.
    cumulative = _filtered(relative, rows, columns).cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum((columns.dice * total).long(), total - 1)
    return torch.searchsorted(cumulative, target, right=True)


def _weights(relative: Tensor) -> Tensor:
    """Probabilities as int64, so that their sum does not depend on the order of addition on a device or in a batch.

    Args:
        relative: probabilities relative to the likeliest token.
    """
    return (relative * UNIT).long()


def _filtered(relative: Tensor, rows: Sequence[SamplingRow], columns: SamplingColumns) -> Tensor:
    """Weights of tokens, [rows, vocab_size], set to zero by top_k, top_p and min_p, in this order.

    Holtzman et al. (2020) made top_p, Nguyen et al. (2024) min_p. Tokens that are equally likely stay or go together.

    Args:
        relative: [rows, vocab_size], probabilities relative to the likeliest token.
        rows: with the options.
        columns: the same options on the device.
    """
    vocab_size = relative.shape[-1]
    limits = [row.options.top_k for row in rows if 0 < row.options.top_k < vocab_size]
    if limits:
        last = columns.top_k.clamp(max=max(limits)).long() - 1
        least = relative.topk(max(limits)).values.gather(-1, last)
        relative = relative * (relative >= least * (columns.top_k < torch.inf))
    weights = _weights(relative)
    if any(row.options.top_p < 1 for row in rows):
        enough = columns.top_p * weights.sum(-1, keepdim=True)
        descending = _descending(relative, enough, min(_NUM_LIKELY, vocab_size, *limits))
        weights = weights * (relative >= _least_in_nucleus(descending, enough))
    if any(row.options.min_p > 0 for row in rows):
        weights = weights * (relative >= columns.min_p.float())
    return weights


def _least_in_nucleus(descending: Tensor, enough: Tensor) -> Tensor:
    """The lowest probability in the nucleus, [rows, 1]: a token stays if the likelier ones weigh less than `enough`."""
    weights = _weights(descending)
    before = weights.cumsum(-1) - weights
    return descending.gather(-1, (before < enough).sum(-1, keepdim=True) - 1)


def _descending(relative: Tensor, enough: Tensor, num_likely: int) -> Tensor:
    """Probabilities of the likeliest tokens, descending, [rows, enough of them to reach `enough`]."""
    if not relative.is_cpu:  # of a GPU this is the reference of its kernels only: 4 to 8 ms for 64 rows of 128k words
        return relative.sort(descending=True).values
    # NumPy's sort is vectorized and torch's is not: 0.25 instead of 5 ms.
    likely = relative.topk(num_likely).values
    if bool((_weights(likely).sum(-1, keepdim=True) >= enough).all()):
        return likely
    return torch.from_numpy(np.sort(relative.numpy())).flip(-1)
