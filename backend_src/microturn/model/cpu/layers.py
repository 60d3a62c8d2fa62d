"""A decoder's forward pass over packed tokens in few, fused operations.

Transformers' own modules need some thirty operations per layer; this needs ten, or one for all layers if they are
compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.model.cpu import attention as native
from microturn.model.cpu import soft_caps
from microturn.model.cpu.angles import Angles
from microturn.model.cpu.buffers import Buffers
from microturn.model.cpu.compiled import CompiledLayers
from microturn.model.cpu.factors import Factors
from microturn.model.cpu.linear import Linear
from microturn.model.cpu.stepwise import StepwiseLayer
from microturn.model.cpu.weights import DecoderLayer, NotKnown, RMSNorm, soft_cap_of_logits, unknown_reason
from microturn.model.paged_attention import PagedAttention
from microturn.model.products import Product, Products
from microturn.model.rotary import Turning
from microturn.model.step_attention import Attention


class FusedLayers:
    """The layers, last norm and head of a transformers model.

    Args:
        model: a causal LM that is known (see `unknown_reason`).
        shapes: KV shape of each layer.
        products: `Linear` shares the model's weights, `Int8Linear` copies them.
    """

    def __init__(self, model: PreTrainedModel, shapes: Sequence[LayerShape], products: Products) -> None:
        self._rotary = model.model.rotary_emb
        turnings = self._rotary.turnings
        self._known = [DecoderLayer.of(*of, products) for of in zip(model.model.layers, shapes, turnings, strict=True)]
        self._stepwise = [StepwiseLayer(known) for known in self._known]
        self._turnings = {known.turning for known in self._known}
        self._compiled = CompiledLayers.of(self._known)
        self._norm = RMSNorm.of(model.model.norm)
        self._head: Product = products.of(model.lm_head)
        self._factors = Factors.of(model)
        self._soft_cap = soft_cap_of_logits(model)

    @classmethod
    def of(cls, model: PreTrainedModel, shapes: Sequence[LayerShape], products: Products = Linear) -> Self:
        """The layers of a model.

        Raises:
            NotKnown: its architecture is not known, or Numba cannot be used.
        """
        reason = native.unavailable_reason() or unknown_reason(model, shapes)
        if reason is not None:
            raise NotKnown(reason)
        return cls(model, shapes, products)

    def multiply(self, num_tokens: int, num_wanted: int) -> None:
        """Computes only the products of a pass, of zeros, for benchmarks; all tokens choose the same experts."""
        buffers = Buffers.of(self._known, torch.zeros(num_tokens, len(self._norm.gain)))
        normed, attended = (part.zero_() for part in (buffers.normed, buffers.attended.flatten(1)))
        buffers.gated.zero_()
        for layer in self._known:
            layer.qkv(normed, buffers.qkv.flatten(1))
            layer.output(attended, buffers.block)
            for block in layer.feed_forward.blocks_of_token:
                gate_up, gated = buffers.of_block(block, num_tokens)
                block.gate_up(normed, gate_up)
                block.down(gated, buffers.block)
        self._head(normed[:num_wanted], normed.new_empty(num_wanted, self._head.num_out))

    def attend(self, num_tokens: int, attention: Attention) -> None:
        """Computes only the attention of a pass, of zeros, for benchmarks; they stay in the pages as its tokens' KV."""
        buffers = Buffers.of(self._known, torch.zeros(num_tokens, len(self._norm.gain)))
        q, k, v = (part.zero_() for part in (buffers.q, buffers.k, buffers.v))
        for index, known in enumerate(self._known):
            attention.append_and_attend(index, q, k, v, known.scores)

    def __call__(self, hidden: Tensor, positions: Tensor, wanted: Tensor, attention: Attention) -> Tensor:
        """Runs all layers.

        Args:
            hidden: float32 [tokens, hidden], the embedded tokens; overwritten.
            positions: int64 [tokens].
            wanted: int64 [n], indices of the tokens whose logits are wanted.
            attention: of this step.

        Returns:
            float32 logits [n, vocab_size].
        """
        if self._factors.embeddings != 1:
            hidden.mul_(self._factors.embeddings)
        angles = {turning: Angles.of(self._rotary, turning, positions) for turning in self._turnings}
        if self._compiled is not None and isinstance(attention, PagedAttention) and attention.is_native:
            self._compiled(hidden, angles, attention)
        else:
            self._run_stepwise(hidden, angles, attention)
        last = hidden if len(wanted) == len(hidden) else hidden[wanted]
        logits = self._head(self._norm(last, last), hidden.new_empty(len(wanted), self._head.num_out))
        if self._factors.logits != 1:
            logits.mul_(self._factors.logits)
        if self._soft_cap is not None:
            soft_caps.cap(logits.numpy(), np.float32(self._soft_cap))
        return logits

    def _run_stepwise(self, hidden: Tensor, angles: Mapping[Turning, Angles], attention: Attention) -> None:
        """One layer after another, some kernels each."""
        buffers = Buffers.of(self._known, hidden)
        q, k, v = buffers.q, buffers.k, buffers.v
        for index, (known, layer) in enumerate(zip(self._known, self._stepwise, strict=True)):
            layer.project(hidden, angles[known.turning], buffers)
            attended = attention.append_and_attend(index, q, k, v, known.scores)
            layer.finish(hidden, attended, buffers)

    @property
    def is_compiled(self) -> bool:
        """Whether all layers are one call where the attention is native."""
        return self._compiled is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads at least."""
        return sum(known.weight_bytes for known in self._known) + self._head.num_bytes
