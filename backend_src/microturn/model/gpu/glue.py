"""The operations of a decoder layer between its products and its attention; compiled, each is one pass over memory.

Plain torch functions for any type and device. On a GPU torch.compile makes one kernel of each (`Glue.compiled`); on a
CPU they run uncompiled, so that the same code is tested there. Sums and angles are float32 for any type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

# A norm: its gain, float32 [width], and its eps.
Norm = tuple[Tensor, float]

# Cosines and sines, float32 [tokens, pairs], contiguous, and whether neighbours are a pair (see `cpu.angles.Angles`).
Angles = tuple[Tensor, Tensor, bool]


@dataclass(frozen=True)
class Projection:
    """The fused projection of a layer, and what makes its queries, keys and values of it.

    Attributes:
        qkv: [tokens, heads + 2 * kv_heads, head_dim], the query heads first, then those of keys.
        q_norm: of each query head, or of all as one vector, as long as its gain is; `k_norm` likewise.
        angles: of the tokens.
        num_heads: query heads.
        num_kv_heads: key heads, and value heads.
    """

    qkv: Tensor
    q_norm: Norm | None
    k_norm: Norm | None
    angles: Angles
    num_heads: int
    num_kv_heads: int


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last axis."""
    gain, eps = norm
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


def add_and_norm(
    hidden: Tensor, block: Tensor, block_norm: Norm | None, factor: float, next_norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """Adds a block's output [tokens, hidden], normed if there is a norm, and scaled.

    Returns:
        The sum, and what the next product is of: the sum normed, if there is a norm.
    """
    block = block if block_norm is None else rms_norm(block, block_norm)
    hidden = hidden + (block if factor == 1 else block * factor)
    return hidden, hidden if next_norm is None else rms_norm(hidden, next_norm)


def split_heads(projection: Projection) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the fused projection into heads; queries and keys are normed, where there are norms, and rotated.

    Returns:
        Queries [tokens, heads, head_dim], and keys and values [tokens, kv_heads, head_dim]. The values are a view.
    """
    num_heads, num_kv_heads = projection.num_heads, projection.num_kv_heads
    q, k, v = torch.split(projection.qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k = _norm_heads(q, projection.q_norm), _norm_heads(k, projection.k_norm)
    return _rotate(q, projection.angles), _rotate(k, projection.angles), v


def _norm_heads(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    is_of_all = len(norm[0]) > x.shape[-1]
    return rms_norm(x.flatten(1), norm).view(x.shape) if is_of_all else rms_norm(x, norm)


def _rotate(x: Tensor, angles: Angles) -> Tensor:
    (cos, sin), is_interleaved = (part[:, None] for part in angles[:2]), angles[2]
    num_turned = 2 * cos.shape[-1]
    if num_turned == 0:
        return x.contiguous()
    given, rest = x.float().tensor_split([num_turned], dim=-1)
    # What `Layout` does, in functions that torch compiles.
    first, second = (given[..., ::2], given[..., 1::2]) if is_interleaved else given.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    parts = (torch.stack(turned, dim=-1).flatten(-2),) if is_interleaved else turned
    return torch.cat((*parts, rest), dim=-1).to(x.dtype)


def gate(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """The activated gate projection [tokens, width] times the up projection behind it."""
    given, up = gate_up.chunk(2, dim=-1)
    return activation(given) * up


@dataclass(frozen=True)
class Glue:
    """The functions, compiled or not."""

    rms_norm: Callable[[Tensor, Norm], Tensor] = rms_norm
    add_and_norm: Callable[[Tensor, Tensor, Norm | None, float, Norm | None], tuple[Tensor, Tensor]] = add_and_norm
    split_heads: Callable[[Projection], tuple[Tensor, Tensor, Tensor]] = split_heads
    gate: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor] = gate

    @classmethod
    def compiled(cls) -> Self:
        """Compiles one kernel each at the first calls: for the first number of tokens, for one token, and for any."""
        torch._dynamo.reset()  # widths of an earlier model would make those of this one dynamic
        functions: list[Any] = [torch.compile(plain) for plain in (rms_norm, add_and_norm, split_heads, gate)]
        return cls(*functions)
