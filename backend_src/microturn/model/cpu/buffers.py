"""Buffers that the layers of a pass reuse: newly allocated memory would be mapped again in each layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from microturn.model.cpu.weights import DecoderLayer

_Floats = NDArray[np.float32]

# Cosines and sines [tokens, head_dim].
Angles = tuple[_Floats, _Floats]


@dataclass(frozen=True)
class Buffers:
    """The buffers of a pass, all float32 and contiguous.

    Attributes:
        hidden: [tokens, hidden], the hidden states between layers.
        normed: [tokens, hidden].
        qkv: [tokens, heads + 2 * kv_heads, head_dim].
        q: [tokens and moved ones, heads, head_dim]: those of moved sinks follow, rotated back.
        k: [tokens, kv_heads, head_dim]; `v` likewise.
        attended: [tokens, heads, head_dim], the attention's output.
        gate_up: [tokens, 2 * intermediate], the gate projection, then the up projection.
        gated: [tokens, intermediate].
        block: [tokens, hidden], the output of a block.
    """

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attended: Tensor
    gate_up: Tensor
    gated: Tensor
    block: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer, hidden: Tensor, num_moved: int = 0) -> Self:
        """Allocates buffers for a pass of embedded tokens [tokens, hidden] through layers of these sizes.

        Args:
            layer: any of them.
            hidden: float32 [tokens, hidden].
            num_moved: queries of rows with moved sinks.
        """
        num_tokens, num_kv_heads, head_dim = len(hidden), layer.shape.num_kv_heads, layer.shape.head_dim
        return cls(
            hidden=hidden,
            normed=hidden.new_empty(hidden.shape),
            qkv=hidden.new_empty(num_tokens, layer.num_heads + 2 * num_kv_heads, head_dim),
            q=hidden.new_empty(num_tokens + num_moved, layer.num_heads, head_dim),
            k=hidden.new_empty(num_tokens, num_kv_heads, head_dim),
            v=hidden.new_empty(num_tokens, num_kv_heads, head_dim),
            attended=hidden.new_empty(num_tokens, layer.num_heads, head_dim),
            gate_up=hidden.new_empty(num_tokens, layer.gate_up.num_out),
            gated=hidden.new_empty(num_tokens, layer.gate_up.num_out // 2),
            block=hidden.new_empty(hidden.shape),
        )

    @cached_property
    def arrays(self) -> list[_Floats]:
        """The buffers as arrays over the same memory, in the order of the attributes."""
        return [getattr(self, field.name).numpy() for field in fields(self)]
