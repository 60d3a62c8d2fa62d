"""A decoder's forward pass over packed tokens in few, fused operations. Knows layers; knows no rows and no pages.

What transformers' own modules do in some thirty operations a layer is ten here. For a decode step of a small model that
is half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from microturn.attention import native
from microturn.layer_groups import LayerShape
from microturn.layers import kernels
from microturn.layers.linear import Linear, Product
from microturn.layers.weights import DecoderLayer, Products, RMSNorm, is_known

_Angles = tuple[NDArray[np.float32], NDArray[np.float32]]

# Torch cuts what has more elements among its threads wherever that falls, and computes the ends, which fill no vector,
# by other functions: a row would depend on its company. GELU is cut the earliest.
_MOST_UNCUT = 16384


class Attention(Protocol):
    """What a layer needs of the attention (see `PagedAttention`)."""

    def append_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor: ...


class FusedDecoder:
    """The layers, last norm and head of a transformers model.

    Args:
        model: a causal LM that `is_known`.
        shapes: what each layer keeps.
        products: `Linear` shares the model's weights, `Int8Linear` has its own.
    """

    def __init__(self, model: PreTrainedModel, shapes: Sequence[LayerShape], products: Products) -> None:
        self._rotary = model.model.rotary_emb
        kinds = self._rotary.kinds
        self._layers = [DecoderLayer.of(*of, products) for of in zip(model.model.layers, shapes, kinds, strict=True)]
        self._norm = RMSNorm.of(model.model.norm)
        self._head: Product = products.of(model.lm_head)

    @classmethod
    def of(cls, model: PreTrainedModel, shapes: Sequence[LayerShape], products: Products = Linear) -> Self | None:
        """A decoder of the model, or None for an architecture that we do not know or where Numba lacks."""
        if native.unavailable_reason() is not None or not is_known(model, shapes):
            return None
        return cls(model, shapes, products)

    def wrap_products(self, wrap: Callable[[Product], Product]) -> None:
        """Puts something around each matrix product, such as a stopwatch."""
        self._layers = [
            replace(
                layer,
                qkv=wrap(layer.qkv),
                output=wrap(layer.output),
                gate_up=wrap(layer.gate_up),
                down=wrap(layer.down),
            )
            for layer in self._layers
        ]
        self._head = wrap(self._head)

    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor, attention: Attention) -> Tensor:
        """Runs all layers.

        Args:
            hidden: float32 [tokens, hidden], the embedded tokens; overwritten.
            positions: int64 [tokens].
            wanted: int64 [n], the tokens whose logits are asked for.
            attention: of this step.

        Returns:
            float32 logits [n, vocab_size].
        """
        angles = {kind: self._angles(hidden, positions, kind) for kind in {layer.kind for layer in self._layers}}
        buffers = _Buffers.of(self._layers[0], hidden)
        for index, layer in enumerate(self._layers):
            hidden += _attend(index, layer, hidden, angles[layer.kind], attention, buffers)
            hidden += _feed_forward(layer, hidden, buffers)
        last = hidden[wanted]
        return self._head(self._norm(last, last), hidden.new_empty(len(wanted), self._head.num_out))

    @property
    def weight_bytes(self) -> int:
        """What one pass reads of weights at least."""
        products = [product for layer in self._layers for product in layer.products] + [self._head]
        return sum(product.num_bytes for product in products)

    def _angles(self, hidden: Tensor, positions: Tensor, kind: str | None) -> _Angles:
        """Cosines and sines [tokens, head_dim]."""
        cos, sin = self._rotary(hidden, positions, kind)
        head_dim = self._layers[0].shape.head_dim
        if cos.shape[-1] != head_dim:
            raise NotImplementedError(f"rotary angles for {cos.shape[-1]} of {head_dim} elements of a head")
        return cos.numpy(), sin.numpy()


@dataclass(frozen=True)
class _Buffers:
    """What the layers of one pass write into, one after the other. Fresh memory would be mapped page by page in each.

    Attributes:
        normed: [tokens, hidden].
        qkv: [tokens, heads + 2 * kv_heads, head_dim].
        q: [tokens, heads, head_dim].
        k: [tokens, kv_heads, head_dim]; `v` likewise.
        gate_up: [tokens, 2 * intermediate].
        gated: [tokens, intermediate].
        gates: some rows at a time, that torch does not cut: the gate, which is the first half of `gate_up`, what it
            multiplies, which is the second, and `gated`.
        added: [tokens, hidden], what a block adds to the hidden state.
    """

    normed: Tensor
    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    gate_up: Tensor
    gated: Tensor
    gates: Sequence[tuple[Tensor, Tensor, Tensor]]
    added: Tensor

    @classmethod
    def of(cls, layer: DecoderLayer, hidden: Tensor) -> Self:
        num_tokens, shape = len(hidden), layer.shape
        num_kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
        num_gated = layer.gate_up.num_out // 2
        gate_up = hidden.new_empty(num_tokens, 2 * num_gated)
        gated = hidden.new_empty(num_tokens, num_gated)
        num_rows = max(1, _MOST_UNCUT // num_gated)
        parts = (torch.split(part, num_rows) for part in (*gate_up.chunk(2, dim=-1), gated))
        return cls(
            normed=torch.empty_like(hidden),
            qkv=hidden.new_empty(num_tokens, layer.num_heads + 2 * num_kv_heads, head_dim),
            q=hidden.new_empty(num_tokens, layer.num_heads, head_dim),
            k=hidden.new_empty(num_tokens, num_kv_heads, head_dim),
            v=hidden.new_empty(num_tokens, num_kv_heads, head_dim),
            gate_up=gate_up,
            gated=gated,
            gates=list(zip(*parts, strict=True)),
            added=torch.empty_like(hidden),
        )


def _attend(
    index: int, layer: DecoderLayer, hidden: Tensor, angles: _Angles, attention: Attention, buffers: _Buffers
) -> Tensor:
    qkv, q, k, v = buffers.qkv, buffers.q, buffers.k, buffers.v
    layer.qkv(layer.input_norm(hidden, buffers.normed), qkv.flatten(1))
    kernels.split_heads(
        qkv.numpy(),
        None if layer.q_norm is None else layer.q_norm.gain,
        None if layer.k_norm is None else layer.k_norm.gain,
        np.float32(0) if layer.q_norm is None else layer.q_norm.eps,
        *angles,
        q.numpy(),
        k.numpy(),
        v.numpy(),
    )
    attended = attention.append_and_attend(index, q, k, v, layer.scale, layer.shape.window)
    added = layer.output(attended.flatten(1), buffers.added)
    return added if layer.attended_norm is None else layer.attended_norm(added, added)


def _feed_forward(layer: DecoderLayer, hidden: Tensor, buffers: _Buffers) -> Tensor:
    normed = layer.feed_forward_norm(hidden, buffers.normed)
    layer.gate_up(normed, buffers.gate_up)
    for gate, up, gated in buffers.gates:
        torch.mul(layer.activation(gate), up, out=gated)
    added = layer.down(buffers.gated, buffers.added)
    return added if layer.fed_forward_norm is None else layer.fed_forward_norm(added, added)
