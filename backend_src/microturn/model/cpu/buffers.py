"""Buffers that the layers of a pass reuse: newly allocated memory would be mapped again in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from microturn.model.cpu.feed_forward import FeedForward, GatedBlock
from microturn.model.cpu.weights import DecoderLayer

_Floats = NDArray[np.float32]


class ExpertBuffers(NamedTuple):
    """Buffers of experts, one after another (see `experts`).

    Attributes:
        factors: float32 [tokens, outputs of the router], its logits, then the factors of experts.
        rows: int64 [tokens], an expert's.
        given: float32 [tokens, hidden], what they are given.
        result: float32 [tokens, hidden], what it makes of them.
    """

    factors: _Floats
    rows: NDArray[np.int64]
    given: _Floats
    result: _Floats

    @classmethod
    def of(cls, parts: Sequence[FeedForward], hidden: Tensor) -> Self | None:
        """Allocates them for hidden states [tokens, hidden]; None if no layer has experts."""
        num_logits = {part.router.product.num_out for part in parts if part.router is not None}
        if not num_logits:
            return None
        (num_out,) = num_logits
        shape = tuple(hidden.shape)
        return cls(
            np.empty((len(hidden), num_out), np.float32),
            np.empty(len(hidden), np.int64),
            np.empty(shape, np.float32),
            np.empty(shape, np.float32),
        )


@dataclass(frozen=True)
class Buffers:
    """The buffers of a pass, all contiguous, and float32 but for some of experts.

    Attributes:
        normed: [tokens, hidden].
        qkv: [tokens, heads + 2 * kv_heads, head_dim].
        q: [tokens and moved ones, heads, head_dim]: those of moved sinks follow, rotated back.
        k: [tokens, kv_heads, head_dim]; `v` likewise.
        attended: [tokens, heads, head_dim], the attention's output.
        gate_up: [tokens, 2 * width] of the widest block, the gate projection, then the up projection.
        gated: [tokens, width] likewise.
        block: [tokens, hidden], the output of attention or feed-forward part.
        experts: None without.
    """

    normed: Tensor
    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attended: Tensor
    gate_up: Tensor
    gated: Tensor
    block: Tensor
    experts: ExpertBuffers | None

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer], hidden: Tensor, num_moved: int = 0) -> Self:
        """Allocates buffers for a pass of embedded tokens [tokens, hidden].

        Args:
            layers: with attention of the same sizes.
            hidden: float32 [tokens, hidden].
            num_moved: queries of rows with moved sinks.
        """
        layer, parts = layers[0], [layer.feed_forward for layer in layers]
        width = max(block.width for part in parts for block in part.blocks_of_token)
        num_tokens, num_kv_heads, head_dim = len(hidden), layer.shape.num_kv_heads, layer.shape.head_dim
        return cls(
            normed=hidden.new_empty(hidden.shape),
            qkv=hidden.new_empty(num_tokens, layer.num_heads + 2 * num_kv_heads, head_dim),
            q=hidden.new_empty(num_tokens + num_moved, layer.num_heads, head_dim),
            k=hidden.new_empty(num_tokens, num_kv_heads, head_dim),
            v=hidden.new_empty(num_tokens, num_kv_heads, head_dim),
            attended=hidden.new_empty(num_tokens, layer.num_heads, head_dim),
            gate_up=hidden.new_empty(num_tokens, 2 * width),
            gated=hidden.new_empty(num_tokens, width),
            block=hidden.new_empty(hidden.shape),
            experts=ExpertBuffers.of(parts, hidden),
        )

    @cached_property
    def arrays(self) -> list[_Floats]:
        """The tensors as arrays over the same memory, in the order of the attributes."""
        return [part.numpy() for part in vars(self).values() if isinstance(part, Tensor)]

    def of_block(self, block: GatedBlock, num_rows: int) -> tuple[Tensor, Tensor]:
        """`gate_up` and `gated` for so many rows of a block, in the same memory."""
        num = num_rows * block.width
        gate_up, gated = self.gate_up.flatten()[: 2 * num], self.gated.flatten()[:num]
        return gate_up.view(num_rows, -1), gated.view(num_rows, -1)
