"""A decoder layer as a dozen Python calls, with products of any kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from microturn.model.cpu import experts, gates, kernels
from microturn.model.cpu.angles import Angles
from microturn.model.cpu.buffers import Buffers
from microturn.model.cpu.feed_forward import FeedForward, GatedBlock, Router
from microturn.model.cpu.weights import DecoderLayer, RMSNorm

# Torch splits larger tensors among its threads at any element, and computes the ends, which fill no vector, by other
# functions. GELU is split at the smallest size.
_MOST_UNCUT = 8192


class StepwiseLayer:
    """One layer of a pass, around its attention.

    Args:
        layer: the layer to compute.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        self._layer = layer

    def project(self, hidden: Tensor, angles: Angles, buffers: Buffers) -> None:
        """Computes queries and keys, normed and rotated, and values from the hidden states."""
        layer = self._layer
        layer.qkv(_normed(hidden, layer.input_norm, buffers), buffers.qkv.flatten(1))
        _, qkv, q, k, v, *_ = buffers.arrays
        kernels.split_heads(qkv, *layer.head_norms, angles, q, k, v)

    def finish(self, hidden: Tensor, attended: Tensor, buffers: Buffers) -> None:
        """Adds the attention's output [tokens, heads, head_dim], projected, then the feed-forward part's."""
        layer = self._layer
        self._add(hidden, layer.output(attended.flatten(1), buffers.block), layer.attended_norm)
        fed = feed(layer.feed_forward, _normed(hidden, layer.feed_forward_norm, buffers), buffers)
        self._add(hidden, fed, layer.fed_forward_norm)

    def _add(self, hidden: Tensor, block: Tensor, norm: RMSNorm | None) -> None:
        """Adds a block's output, which is overwritten, to the hidden states."""
        if norm is not None:
            norm(block, block)
        # Not in one operation: torch would fuse product and sum, but for the last elements, which fill no vector.
        if self._layer.residual_factor != 1:
            block.mul_(self._layer.residual_factor)
        hidden.add_(block)


def _normed(hidden: Tensor, norm: RMSNorm | None, buffers: Buffers) -> Tensor:
    """The hidden states, normed if there is a norm."""
    return hidden if norm is None else norm(hidden, buffers.normed)


def feed(part: FeedForward, x: Tensor, buffers: Buffers) -> Tensor:
    """Computes a feed-forward part for rows x [rows, hidden], into the block's output, which it returns."""
    if part.router is None:
        _feed_block(part.blocks[0], x, buffers, buffers.block)
    else:
        _feed_experts(part.router, part.blocks, x, buffers)
    return buffers.block


def _feed_block(block: GatedBlock, x: Tensor, buffers: Buffers, out: Tensor) -> None:
    """Computes a gated block for rows x [rows, hidden]; out likewise, written."""
    gate_up, gated = buffers.of_block(block, len(x))
    block.gate_up(x, gate_up)
    _gate(block.activation, gate_up, gated)
    block.down(gated, out)


def _gate(activation: nn.Module, gate_up: Tensor, out: Tensor) -> None:
    """Computes ``activation(gate) * up`` for rows gate_up [rows, 2 * width], into out [rows, width]."""
    width = out.shape[1]
    factors = gates.coefficients(activation, width)
    if factors is not None:
        gates.multiply(gate_up.numpy(), factors, out.numpy())
        return
    # Torch computes several rows, or a row that is cut elsewhere, by other functions: each row alone, in equal parts.
    for given, result in zip(gate_up, out, strict=True):
        parts = (of_row.split(_MOST_UNCUT) for of_row in (given[:width], given[width:], result))
        for gate, up, part in zip(*parts, strict=True):
            torch.mul(activation(gate), up, out=part)


def _feed_experts(router: Router, blocks: Sequence[GatedBlock], x: Tensor, buffers: Buffers) -> None:
    """Computes the chosen experts of all rows."""
    assert buffers.experts is not None
    factors, rows, given, result = buffers.experts
    out, of_shared = buffers.block.zero_(), router.shared
    router.product(x, torch.from_numpy(factors))
    experts.choose(factors, len(blocks), router.num_chosen, router.is_normalised, of_shared is not None)
    for expert, block in enumerate(blocks if of_shared is None else [*blocks, of_shared]):
        count = experts.gather(x.numpy(), factors, expert, rows, given)
        if count:
            _feed_block(block, torch.from_numpy(given[:count]), buffers, torch.from_numpy(result[:count]))
            experts.add(result[:count], factors, expert, rows, out.numpy())
