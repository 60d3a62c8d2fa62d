"""A decoder layer as a dozen Python calls, with products of any kind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from microturn.model.cpu import kernels
from microturn.model.cpu.buffers import Angles, Buffers
from microturn.model.cpu.weights import DecoderLayer, RMSNorm

# Torch splits larger tensors among its threads at any element, and computes the ends, which fill no vector, by other
# functions: a row would depend on the rest of the batch. GELU is split at the smallest size.
_MOST_UNCUT = 16384


class StepwiseLayer:
    """One layer of a pass, around its attention.

    Args:
        layer: the layer to compute.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        self._layer = layer

    def project(self, angles: Angles, buffers: Buffers) -> None:
        """Computes queries and keys, normed and rotated, and values from the hidden states."""
        layer = self._layer
        layer.qkv(layer.input_norm(buffers.hidden, buffers.normed), buffers.qkv.flatten(1))
        _, _, qkv, q, k, v, *_ = buffers.arrays
        kernels.split_heads(qkv, *layer.head_norms, *angles, q, k, v)

    def finish(self, attended: Tensor, buffers: Buffers) -> None:
        """Adds the attention's output [tokens, heads, head_dim], projected, then the feed-forward block."""
        layer = self._layer
        _add(layer.output(attended.flatten(1), buffers.block), layer.attended_norm, buffers)
        layer.gate_up(layer.feed_forward_norm(buffers.hidden, buffers.normed), buffers.gate_up)
        for gate, up, gated in _uncut(*buffers.gate_up.chunk(2, dim=-1), buffers.gated):
            torch.mul(layer.activation(gate), up, out=gated)
        _add(layer.down(buffers.gated, buffers.block), layer.fed_forward_norm, buffers)


def _add(block: Tensor, norm: RMSNorm | None, buffers: Buffers) -> None:
    buffers.hidden.add_(block if norm is None else norm(block, block))


def _uncut(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Slices of tensors [rows, width] with so few rows that torch does not split them."""
    num_rows = max(1, _MOST_UNCUT // tensors[0].shape[1])
    return zip(*(torch.split(tensor, num_rows) for tensor in tensors), strict=True)
