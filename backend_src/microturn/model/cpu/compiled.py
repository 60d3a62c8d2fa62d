"""A decoder's layers with 8-bit weights and native attention as one compiled call.

For one or two tokens a layer takes some hundred microseconds. A third of that were ten kernel calls from Python, and
each call released the GIL to other threads when the engine needed it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.tensors import KVTensors
from microturn.model.cpu import kernels
from microturn.model.cpu.angles import Angles
from microturn.model.cpu.arrays import LayerArrays, Unlike, array_of
from microturn.model.cpu.attention_kernels import append_and_attend
from microturn.model.cpu.attention_scores import KernelScores
from microturn.model.cpu.attention_work import LayerStep
from microturn.model.cpu.buffers import Buffers, ExpertBuffers
from microturn.model.cpu.compiled_feed_forward import FeedForwards, Weights, feed, weight_of
from microturn.model.cpu.int8_linear import amx_threads, multiply
from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.weights import DecoderLayer, RMSNorm, arrays_of
from microturn.model.paged_attention import PagedAttention
from microturn.model.rotary import Turning

_Array = NDArray[Any]


class _Norms(NamedTuple):
    """A norm of each layer: gains [width], empty if there is no norm, and float32 eps [layers]."""

    gains: LayerArrays
    eps: NDArray[np.float32]

    @classmethod
    def of(cls, norms: Sequence[RMSNorm | None]) -> Self:
        gains, eps = zip(*map(arrays_of, norms), strict=True)
        return cls(LayerArrays.of(gains), np.array(eps, np.float32))


class _Layers(NamedTuple):
    """The attributes of each `DecoderLayer`, for the kernel; `residual_factors` is float32 [layers]."""

    input_norm: _Norms
    qkv: Weights
    q_norm: _Norms
    k_norm: _Norms
    output: Weights
    attended_norm: _Norms
    feed_forward_norm: _Norms
    feed_forward: FeedForwards
    fed_forward_norm: _Norms
    residual_factors: NDArray[np.float32]


class _Pages(NamedTuple):
    """The pages of each layer.

    Attributes:
        elements: see `LayerPages.arrays`; `scales` likewise.
        steps: int64 [layers], which of the steps and angles is the layer's.
        groups: int64 [layers], the layer's group.
    """

    elements: LayerArrays
    scales: LayerArrays
    steps: NDArray[np.int64]
    groups: NDArray[np.int64]


@numba.njit(nogil=True)
def _norm(x: _Array, norms: _Norms, layer: int, out: _Array) -> None:
    kernels.rms_norm(x, array_of(norms.gains, layer), norms.eps[layer], out)


@numba.njit(nogil=True)
def _normed(x: _Array, norms: _Norms, layer: int, out: _Array) -> _Array:
    """The rows of x, normed into out if there is a norm."""
    if norms.gains.first.shape[0] == 0:
        return x
    _norm(x, norms, layer, out)
    return out


@numba.njit(nogil=True)
def _rows(x: _Array) -> _Array:
    """Heads [tokens, heads, head_dim] one behind another."""
    return x.reshape((x.shape[0], x.shape[1] * x.shape[2]))


@numba.njit(nogil=True)
def _add(block: _Array, norms: _Norms, factors: _Array, layer: int, hidden: _Array) -> None:
    """Adds a block's output to the hidden states; with a norm the output is overwritten by the normed one."""
    factor = factors[layer]
    if norms.gains.first.shape[0] > 0:
        _norm(block, norms, layer, block)
    for row in range(hidden.shape[0]):
        for d in range(hidden.shape[1]):
            hidden[row, d] += factor * block[row, d]


@kernel()
def _run(
    layers: _Layers,
    pages: _Pages,
    steps: tuple[LayerStep, ...],
    angles: tuple[Angles, ...],
    num_threads: int | None,
    hidden: _Array,
    normed: _Array,
    qkv: _Array,
    q: _Array,
    k: _Array,
    v: _Array,
    attended: _Array,
    gate_up: _Array,
    gated: _Array,
    block: _Array,
    of_experts: ExpertBuffers | None,
) -> None:
    """All layers; the arrays behind `hidden` are those of `Buffers`."""
    for layer in range(pages.steps.shape[0]):
        step, of_tokens = steps[pages.steps[layer]], angles[pages.steps[layer]]
        given = _normed(hidden, layers.input_norm, layer, normed)
        multiply(given, weight_of(layers.qkv, layer), _rows(qkv), num_threads)
        q_gain, k_gain = array_of(layers.q_norm.gains, layer), array_of(layers.k_norm.gains, layer)
        kernels.split_heads(qkv, q_gain, k_gain, layers.q_norm.eps[layer], of_tokens, q, k, v)

        kernels.turn_back(q, hidden.shape[0], step.moved, step.back)
        kv, scales = array_of(pages.elements, layer), array_of(pages.scales, layer)
        of_step = step.scores, step.tables, pages.groups[layer], step.work
        append_and_attend(q, k, v, attended, kv, scales, *of_step)

        multiply(_rows(attended), weight_of(layers.output, layer), block, num_threads)
        _add(block, layers.attended_norm, layers.residual_factors, layer, hidden)
        given = _normed(hidden, layers.feed_forward_norm, layer, normed)
        blocks, routers = layers.feed_forward.blocks, layers.feed_forward.routers
        feed(blocks, routers, layer, given, gate_up, gated, of_experts, num_threads, block)
        _add(block, layers.fed_forward_norm, layers.residual_factors, layer, hidden)


@dataclass(frozen=True)
class _Places:
    """Where the layers find their pages, for one KV cache.

    Attributes:
        kv: the cache.
        pages: of each layer.
        firsts: index of the first layer of each step: layers with the same tables, scores and angles share one.
    """

    kv: KVTensors
    pages: _Pages
    firsts: Sequence[int]

    @classmethod
    def of(cls, kv: KVTensors, layers: Sequence[DecoderLayer]) -> Self:
        groups = kv.groups.places
        steps = [
            (place.kind, layer.scores.window, KernelScores.of(layer.scores), layer.turning)
            for place, layer in zip(groups, layers, strict=True)
        ]
        distinct = list(dict.fromkeys(steps))
        elements, scales = zip(*(pages.arrays for pages in kv.layers), strict=True)
        pages = _Pages(
            LayerArrays.of(elements),
            LayerArrays.of(scales),
            np.array([distinct.index(step) for step in steps], np.int64),
            np.array([place.group for place in groups], np.int64),
        )
        return cls(kv, pages, [steps.index(step) for step in distinct])


class CompiledLayers:
    """Layers of 8-bit products, of the same sizes.

    Args:
        layers: the layers; they keep the arrays alive that kernels find by their addresses.
        arguments: their weights, for the kernel.
    """

    def __init__(self, layers: Sequence[DecoderLayer], arguments: _Layers) -> None:
        self._layers = tuple(layers)
        self._arguments = arguments
        self._places: _Places | None = None
        self._buffers: Buffers | None = None

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer]) -> Self | None:
        """The compiled layers, or None if a product or an activation is of another kind, or layers differ in form."""
        forms = {(of.num_heads, of.shape.num_kv_heads, of.shape.head_dim, of.scores.soft_cap is None) for of in layers}
        if len(forms) > 1:
            return None
        try:
            arguments = _Layers(
                input_norm=_Norms.of([layer.input_norm for layer in layers]),
                qkv=Weights.of([layer.qkv for layer in layers]),
                q_norm=_Norms.of([layer.q_norm for layer in layers]),
                k_norm=_Norms.of([layer.k_norm for layer in layers]),
                output=Weights.of([layer.output for layer in layers]),
                attended_norm=_Norms.of([layer.attended_norm for layer in layers]),
                feed_forward_norm=_Norms.of([layer.feed_forward_norm for layer in layers]),
                feed_forward=FeedForwards.of([layer.feed_forward for layer in layers]),
                fed_forward_norm=_Norms.of([layer.fed_forward_norm for layer in layers]),
                residual_factors=np.array([layer.residual_factor for layer in layers], np.float32),
            )
        except Unlike:
            return None
        return cls(layers, arguments)

    def __call__(self, hidden: Tensor, angles: Mapping[Turning, Angles], attention: PagedAttention) -> None:
        """Runs all layers.

        Args:
            hidden: float32 [tokens, hidden]; overwritten.
            angles: of the tokens' positions.
            attention: of this step, native.
        """
        places = self._places
        if places is None or places.kv is not attention.kv:
            places = self._places = _Places.of(attention.kv, self._layers)
        firsts = [(index, self._layers[index]) for index in places.firsts]
        steps = tuple(attention.layer_step(index, of.num_heads, of.scores) for index, of in firsts)
        buffers = self._buffers_for(hidden, num_moved=max(len(step.moved) for step in steps))
        _run(
            self._arguments,
            places.pages,
            steps,
            tuple(angles[of.turning] for _, of in firsts),
            amx_threads(),
            hidden.numpy(),
            *buffers.arrays,
            buffers.experts,
        )

    def _buffers_for(self, hidden: Tensor, num_moved: int) -> Buffers:
        """Buffers for a pass: those of the last one where it was as large, as most are while sessions generate."""
        kept = self._buffers
        if kept is None or (len(kept.normed), len(kept.q)) != (len(hidden), len(hidden) + num_moved):
            kept = self._buffers = Buffers.of(self._layers, hidden, num_moved)
        return kept
