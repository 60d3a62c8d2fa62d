"""A decoder layer with 8-bit weights as two compiled functions: before and after its attention.

For one or two tokens a layer takes some hundred microseconds. Ten kernel calls from Python took a third of that, and
each call released the GIL to other threads when the engine needed it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from microturn.model.cpu import gates, kernels
from microturn.model.cpu.buffers import Angles, Buffers
from microturn.model.cpu.int8_linear import Int8Linear, Int8Weight, amx_threads, multiply
from microturn.model.cpu.weights import DecoderLayer, RMSNorm

_Array = NDArray[Any]

# A norm's gain, empty if there is no norm, and its eps.
_Norm = tuple[_Array, np.float32]


@numba.njit(nogil=True, cache=True)
def _project(
    hidden: _Array,
    norm: _Norm,
    weight: Int8Weight,
    q_gain: _Array | None,
    k_gain: _Array | None,
    eps: np.float32,
    cos: _Array,
    sin: _Array,
    num_threads: int | None,
    normed: _Array,
    qkv: _Array,
    q: _Array,
    k: _Array,
    v: _Array,
) -> None:
    kernels.rms_norm(hidden, norm[0], norm[1], normed)
    multiply(normed, weight, qkv.reshape((qkv.shape[0], qkv.shape[1] * qkv.shape[2])), num_threads)
    kernels.split_heads(qkv, q_gain, k_gain, eps, cos, sin, q, k, v)


@numba.njit(nogil=True)
def _add(block: _Array, norm: _Norm, hidden: _Array) -> None:
    """Adds a block's output to the hidden states; with a norm the output is overwritten by the normed one."""
    if norm[0].shape[0] > 0:
        kernels.rms_norm(block, norm[0], norm[1], block)
    for row in range(hidden.shape[0]):
        for d in range(hidden.shape[1]):
            hidden[row, d] += block[row, d]


@numba.njit(nogil=True, cache=True)
def _finish(
    hidden: _Array,
    attended: _Array,
    output: Int8Weight,
    attended_norm: _Norm,
    feed_forward_norm: _Norm,
    gate_up: Int8Weight,
    gate: _Array,
    down: Int8Weight,
    fed_forward_norm: _Norm,
    num_threads: int | None,
    normed: _Array,
    gate_and_up: _Array,
    gated: _Array,
    block: _Array,
) -> None:
    multiply(attended.reshape((attended.shape[0], attended.shape[1] * attended.shape[2])), output, block, num_threads)
    _add(block, attended_norm, hidden)
    kernels.rms_norm(hidden, feed_forward_norm[0], feed_forward_norm[1], normed)
    multiply(normed, gate_up, gate_and_up, num_threads)
    gates.multiply(gate_and_up, gate, gated)
    multiply(gated, down, block, num_threads)
    _add(block, fed_forward_norm, hidden)


class CompiledLayer:
    """A `Layer` of 8-bit products.

    Args:
        layer: the layer to compute.
        weights: of its products, in order.
        gate: `gates.coefficients` of its activation.
    """

    def __init__(self, layer: DecoderLayer, weights: Sequence[Int8Weight], gate: NDArray[np.float32]) -> None:
        qkv, output, gate_up, down = weights
        self._before = (_norm(layer.input_norm), qkv, *layer.head_norms)
        self._behind = (
            output,
            _norm(layer.attended_norm),
            _norm(layer.feed_forward_norm),
            gate_up,
            gate,
            down,
            _norm(layer.fed_forward_norm),
        )

    @classmethod
    def of(cls, layer: DecoderLayer) -> Self | None:
        """The compiled layer, or None if a product or the activation is of another kind."""
        gate = gates.coefficients(layer.activation, layer.gate_up.num_out // 2)
        weights = [product.weight for product in layer.products if isinstance(product, Int8Linear)]
        if gate is None or len(weights) < len(layer.products):
            return None
        return cls(layer, weights, gate)

    def project(self, angles: Angles, buffers: Buffers) -> None:
        """See `Layer`."""
        hidden, normed, qkv, q, k, v, *_ = buffers.arrays
        _project(hidden, *self._before, *angles, amx_threads(), normed, qkv, q, k, v)

    def finish(self, attended: Tensor, buffers: Buffers) -> None:
        """See `Layer`."""
        hidden, normed, *_, gate_up, gated, block = buffers.arrays
        _finish(hidden, attended.numpy(), *self._behind, amx_threads(), normed, gate_up, gated, block)


def _norm(norm: RMSNorm | None) -> _Norm:
    return (np.empty(0, np.float32), np.float32(0)) if norm is None else norm.arrays
