"""What a format of quantized weights says of a weight, and the arithmetic that the formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microturn.errors import InvalidArgument

# A tensor in a file, not read yet: it has `get_shape()` and `get_dtype()`, and `[...]` reads it.
Stored = Any


@dataclass(frozen=True)
class Format:
    """How one method holds a weight.

    Attributes:
        markers: a module that has one of these parts is quantized.
        parts: all parts that make up a weight.
        shape: the weight's shape [out, in].
        values: the weight, float32 [out, in].
        block: rows and columns that have a scale in common, where a config says it; of float8 alone.
    """

    markers: frozenset[str]
    parts: frozenset[str]
    shape: Callable[[Mapping[str, Stored]], list[int]]
    values: Callable[[Mapping[str, Tensor]], Tensor]
    block: tuple[int, int] | None = None


def demand(is_supported: bool, what: str) -> None:
    """Refuses a variant of a format.

    Errors:
        InvalidArgument: it is not supported.
    """
    if not is_supported:
        raise InvalidArgument(f"weights quantized as {what} are not supported: give another checkpoint of the model")


def scaled(steps: Tensor, zeros: Tensor | None, scale: Tensor) -> Tensor:
    """(steps - zeros) * scale in float32."""
    values = steps.to(torch.float32, copy=True)
    if zeros is not None:
        values -= zeros
    return values.mul_(scale.float())


def spread(scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Scales (or zero points) of rows, groups, blocks or of all that broadcast over a weight.

    They divide a dimension evenly, or by `block`, whose last one may be cut off.
    """
    scale = scale.float() if scale.dim() == 2 else scale.float().reshape(-1, 1)
    for dim, size in enumerate(shape):
        num_blocks = scale.shape[dim]
        if num_blocks not in (1, size):
            block_len = block[dim] if block else size // num_blocks
            scale = scale.repeat_interleave(block_len, dim).narrow(dim, 0, size)
    return scale
