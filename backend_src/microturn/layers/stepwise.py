"""A decoder layer as a dozen calls from Python, over products of any kind."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from microturn.layers import kernels
from microturn.layers.buffers import Angles, Buffers
from microturn.layers.weights import DecoderLayer, RMSNorm

# Torch cuts what has more elements among its threads wherever that falls, and computes the ends, which fill no vector,
# by other functions: a row would depend on its company. GELU is cut the earliest.
_MOST_UNCUT = 16384


class StepwiseLayer:
    """A `Layer`.

    Args:
        layer: what it computes.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        self._layer = layer

    def project(self, angles: Angles, buffers: Buffers) -> None:
        """See `Layer`."""
        layer = self._layer
        layer.qkv(layer.input_norm(buffers.hidden, buffers.normed), buffers.qkv.flatten(1))
        kernels.split_heads(
            buffers.arrays.qkv,
            *layer.head_norms,
            *angles,
            buffers.arrays.q,
            buffers.arrays.k,
            buffers.arrays.v,
        )

    def finish(self, attended: Tensor, buffers: Buffers) -> None:
        """See `Layer`."""
        layer = self._layer
        _add(layer.output(attended.flatten(1), buffers.block), layer.attended_norm, buffers)
        layer.gate_up(layer.feed_forward_norm(buffers.hidden, buffers.normed), buffers.gate_up)
        for gate, up, gated in _uncut(*buffers.gate_up.chunk(2, dim=-1), buffers.gated):
            torch.mul(layer.activation(gate), up, out=gated)
        _add(layer.down(buffers.gated, buffers.block), layer.fed_forward_norm, buffers)


def _add(block: Tensor, norm: RMSNorm | None, buffers: Buffers) -> None:
    buffers.hidden.add_(block if norm is None else norm(block, block))


def _uncut(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows at a time of tensors [rows, width], so few that torch does not cut them."""
    num_rows = max(1, _MOST_UNCUT // tensors[0].shape[1])
    return zip(*(torch.split(tensor, num_rows) for tensor in tensors), strict=True)
