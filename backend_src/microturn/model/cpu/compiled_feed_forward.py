"""The feed-forward part of layers in 8 bits, for the one call that computes all layers (see `compiled`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numba
from numpy.typing import NDArray

from microturn.model.cpu import experts, float_products, gates
from microturn.model.cpu.arrays import LayerArrays, Unlike, array_of
from microturn.model.cpu.buffers import ExpertBuffers
from microturn.model.cpu.feed_forward import FeedForward, GatedBlock, Router
from microturn.model.cpu.int8_linear import Int8Linear, Int8Weight, multiply
from microturn.model.products import Product

_Array = NDArray[Any]


class Weights(NamedTuple):
    """Weights of one product in each layer (see `Int8Weight`), or in each block."""

    panels: LayerArrays
    scales: LayerArrays
    biases: LayerArrays

    @classmethod
    def of(cls, products: Sequence[Product]) -> Self:
        """The weights of products of the same sizes.

        Raises:
            Unlike: the sizes differ, or a product is of another kind.
        """
        weights = [product.weight for product in products if isinstance(product, Int8Linear)]
        if len(weights) < len(products):
            raise Unlike("a product is of another kind")
        return cls(*(LayerArrays.of(arrays) for arrays in zip(*weights, strict=True)))


@numba.njit(nogil=True)
def weight_of(weights: Weights, layer: int) -> Int8Weight:
    """The weight of one layer, or block."""
    return array_of(weights.panels, layer), array_of(weights.scales, layer), array_of(weights.biases, layer)


class _Blocks(NamedTuple):
    """The attributes of each `GatedBlock`; `gate` has the coefficients of its activation (see `gates`)."""

    width: int
    gate_up: Weights
    gate: LayerArrays
    down: Weights

    @classmethod
    def of(cls, blocks: Sequence[GatedBlock]) -> Self:
        """Raises `Unlike` if they cannot be computed by one kernel."""
        factors = [gates.coefficients(block.activation, block.width) for block in blocks]
        known = [of_block for of_block in factors if of_block is not None]
        if len(known) < len(blocks):
            raise Unlike("an activation is of another kind")
        gate_up, down = [block.gate_up for block in blocks], [block.down for block in blocks]
        return cls(blocks[0].width, Weights.of(gate_up), LayerArrays.of(known), Weights.of(down))


class _Routers(NamedTuple):
    """The attributes of each layer's `Router`.

    Attributes:
        num_experts: of a layer.
        shared: None without; then its code is not compiled.
    """

    weights: LayerArrays
    num_experts: int
    num_chosen: int
    is_normalised: bool
    shared: _Blocks | None

    @classmethod
    def of(cls, routers: Sequence[Router], num_experts: int) -> Self:
        """Raises `Unlike` if they cannot be computed by one kernel."""
        forms = {(router.num_chosen, router.is_normalised, router.shared is None) for router in routers}
        if len(forms) > 1 or not all(router.product.is_native for router in routers):
            raise Unlike("routers choose in several ways, or have weights that do not fit")
        ((num_chosen, is_normalised, _),) = forms
        shared = [router.shared for router in routers if router.shared is not None]
        weights = LayerArrays.of([router.product.weights[0] for router in routers])
        return cls(weights, num_experts, num_chosen, is_normalised, _Blocks.of(shared) if shared else None)


class FeedForwards(NamedTuple):
    """The feed-forward parts of all layers.

    Attributes:
        blocks: those of the first layer, then those of the next ones.
        routers: None if each layer has one block; then no code for experts is compiled.
    """

    blocks: _Blocks
    routers: _Routers | None

    @classmethod
    def of(cls, parts: Sequence[FeedForward]) -> Self:
        """Raises `Unlike` if they cannot be computed by one kernel."""
        blocks = _Blocks.of([block for part in parts for block in part.blocks])
        routers = [part.router for part in parts if part.router is not None]
        if not routers:
            return cls(blocks, None)
        numbers = {len(part.blocks) for part in parts}
        if len(routers) < len(parts) or len(numbers) > 1:
            raise Unlike("layers with experts and without, or with several numbers of them")
        return cls(blocks, _Routers.of(routers, *numbers))


# What can be None is an argument by itself: Numba then leaves out the code for what is not.
@numba.njit(nogil=True)
def feed(
    blocks: _Blocks,
    routers: _Routers | None,
    layer: int,
    x: _Array,
    gate_up: _Array,
    gated: _Array,
    buffers: ExpertBuffers | None,
    num_threads: int | None,
    out: _Array,
) -> None:
    """Computes one layer's.

    Args:
        blocks: see `FeedForwards`; `routers` likewise.
        layer: its number.
        x: float32 [rows, hidden].
        gate_up: see `Buffers`; `gated` likewise.
        buffers: of experts.
        num_threads: see `int8_linear.multiply`.
        out: float32 [rows, hidden], written.
    """
    if routers is None:
        _feed_block(blocks, layer, x, gate_up, gated, num_threads, out)
    elif buffers is not None:
        has_shared = routers.shared is not None
        float_products.multiply(x, array_of(routers.weights, layer), buffers.factors, 0)
        experts.choose(buffers.factors, routers.num_experts, routers.num_chosen, routers.is_normalised, has_shared)
        out[:] = 0
        of_rows = x, gate_up, gated, buffers, num_threads, out
        for expert in range(routers.num_experts):
            _feed_expert(blocks, layer * routers.num_experts + expert, expert, *of_rows)
        _feed_shared(routers.shared, layer, routers.num_experts, *of_rows)


@numba.njit(nogil=True)
def _feed_shared(
    blocks: _Blocks | None,
    layer: int,
    expert: int,
    x: _Array,
    gate_up: _Array,
    gated: _Array,
    buffers: ExpertBuffers,
    num_threads: int | None,
    out: _Array,
) -> None:
    if blocks is not None:
        _feed_expert(blocks, layer, expert, x, gate_up, gated, buffers, num_threads, out)


@numba.njit(nogil=True)
def _feed_expert(
    blocks: _Blocks,
    number: int,
    expert: int,
    x: _Array,
    gate_up: _Array,
    gated: _Array,
    buffers: ExpertBuffers,
    num_threads: int | None,
    out: _Array,
) -> None:
    """Adds what an expert, whose number among all blocks is given too, makes of the rows that chose it."""
    factors, rows, given, result = buffers
    count = experts.gather(x, factors, expert, rows, given)
    if count > 0:
        _feed_block(blocks, number, given[:count], gate_up, gated, num_threads, result[:count])
        experts.add(result[:count], factors, expert, rows, out)


@numba.njit(nogil=True)
def _feed_block(
    blocks: _Blocks, number: int, x: _Array, gate_up: _Array, gated: _Array, num_threads: int | None, out: _Array
) -> None:
    of_block, inner = _rows(gate_up, x.shape[0], 2 * blocks.width), _rows(gated, x.shape[0], blocks.width)
    multiply(x, weight_of(blocks.gate_up, number), of_block, num_threads)
    gates.multiply(of_block, array_of(blocks.gate, number), inner)
    multiply(inner, weight_of(blocks.down, number), out, num_threads)


@numba.njit(nogil=True)
def _rows(buffer: _Array, num_rows: int, width: int) -> _Array:
    """So many contiguous rows in the memory of a buffer of wider ones."""
    return buffer.reshape(-1)[: num_rows * width].reshape((num_rows, width))
