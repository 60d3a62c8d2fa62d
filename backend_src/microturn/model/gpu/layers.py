"""A decoder's forward pass over packed tokens in torch operations, for a GPU and any type of weights.

The counterpart of `FusedLayers`, with the same layers and attention. The operations between products and attention
are one kernel each (`projection_kernel` before attention, `glue` behind it), so that a layer has ten kernels. Nothing
synchronises with the device or reads a value, so that a pass can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

from torch import Tensor
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.model.cpu.factors import Factors
from microturn.model.cpu.feed_forward import has_experts
from microturn.model.cpu.weights import DecoderLayer, NotKnown, RMSNorm, soft_cap_of_logits, unknown_reason
from microturn.model.gpu.flashinfer_attention import FlashInferAttention
from microturn.model.gpu.glue import Angles, Glue, Norm, Projection
from microturn.model.products import Product, Products, TorchLinear
from microturn.model.rotary import Layout, Turning
from microturn.model.scores import Scores, soft_capped
from microturn.model.step_attention import Attention


class TorchLayers:
    """The layers, last norm and head of a transformers model, over the model's own weights.

    Attributes:
        glue: the operations between products and attention.

    Args:
        model: a causal LM that is known (see `unknown_reason`) and has no experts, on its device and in its type.
        shapes: KV shape of each layer.
        glue: see above.
        products: of the layers.
        head: the last product; None is torch's, whatever `products` are: its rounding would be that of the logits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape],
        glue: Glue,
        products: Products = TorchLinear,
        head: Product | None = None,
    ) -> None:
        self._rotary = model.model.rotary_emb
        layers = zip(model.model.layers, shapes, self._rotary.turnings, strict=True)
        self._layers = [DecoderLayer.of(*layer, products) for layer in layers]
        self._norm = RMSNorm.of(model.model.norm)
        self._head = head or TorchLinear.of(model.lm_head)
        self._factors = Factors.of(model)
        self._soft_cap = soft_cap_of_logits(model)
        self.glue = glue

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        shapes: Sequence[LayerShape],
        glue: Glue | None = None,
        products: Products = TorchLinear,
    ) -> Self:
        """The layers of the model; its own weights become views of theirs, layer by layer.

        Raises:
            NotKnown: see `require_known`.
        """
        cls.require_known(model, shapes)
        return cls(model, shapes, glue or Glue(), products)

    @staticmethod
    def require_known(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> None:
        """Looks at a model's modules only.

        Raises:
            NotKnown: its architecture is not known, or has experts: which are chosen would have to be read from the
                device, to compute these alone.
        """
        reason = unknown_reason(model, shapes)
        if reason is not None:
            raise NotKnown(reason)
        if len({parameter.dtype for parameter in model.parameters()}) > 1:
            raise NotKnown("its weights are of several types")
        if any(has_experts(layer.mlp) for layer in model.model.layers):
            raise NotKnown("its experts are chosen on the device")

    def first(self, num_layers: int, glue: Glue | None = None) -> Self:
        """The first layers, then the last norm and the head, over the same weights; with other glue if it is given."""
        few = copy(self)
        few._layers = self._layers[:num_layers]
        few.glue = glue or self.glue
        return few

    def __call__(
        self, hidden: Tensor, positions: Tensor, wanted: Tensor, attention: Attention, logits: Tensor | None = None
    ) -> Tensor:
        """Runs all layers.

        Args:
            hidden: [tokens, hidden], the embedded tokens.
            positions: int64 [tokens].
            wanted: int64 [n], indices of the tokens whose logits are wanted.
            attention: of this step.
            logits: float32 [n, vocab_size], written; None for new memory.

        Returns:
            The logits.
        """
        glue, layers = self.glue, self._layers
        angles = {turning: self._angles(turning, positions) for turning in {layer.turning for layer in layers}}
        following = [_norm_of(layer.input_norm) for layer in layers[1:]] + [_norm_of(self._norm)]
        if self._factors.embeddings != 1:
            hidden = hidden * self._factors.embeddings
        first_norm = _norm_of(layers[0].input_norm)
        normed = hidden if first_norm is None else glue.rms_norm(hidden, first_norm)
        for index, (layer, next_norm) in enumerate(zip(layers, following, strict=True)):
            shape = layer.shape
            qkv = _multiply(layer.qkv, normed).view(len(hidden), -1, shape.head_dim)
            norms = _norm_of(layer.q_norm), _norm_of(layer.k_norm)
            projection = Projection(qkv, *norms, angles[layer.turning], layer.num_heads, shape.num_kv_heads)
            attended = self._append_and_attend(index, projection, layer.scores, attention)
            hidden, normed = glue.add_and_norm(
                hidden,
                _multiply(layer.output, attended.flatten(1)),
                _norm_of(layer.attended_norm),
                layer.residual_factor,
                _norm_of(layer.feed_forward_norm),
            )
            (block,) = layer.feed_forward.blocks
            gated = glue.gate(_multiply(block.gate_up, normed), block.activation)
            hidden, normed = glue.add_and_norm(
                hidden,
                _multiply(block.down, gated),
                _norm_of(layer.fed_forward_norm),
                layer.residual_factor,
                next_norm,
            )
        product = _multiply(self._head, normed[wanted])
        logits = product.float() if logits is None else logits.copy_(product)
        if self._factors.logits != 1:
            logits *= self._factors.logits
        return logits if self._soft_cap is None else logits.copy_(soft_capped(logits, self._soft_cap))

    @property
    def is_compiled(self) -> bool:
        """Whether all layers are one call."""
        return False

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one pass reads at least."""
        return sum(layer.weight_bytes for layer in self._layers) + self._head.num_bytes

    def _append_and_attend(self, index: int, projection: Projection, scores: Scores, attention: Attention) -> Tensor:
        """The result of a layer's attention [tokens, heads, head_dim], by one kernel before it where there is one."""
        if isinstance(attention, FlashInferAttention):
            queries = attention.append_projection(index, projection)
            if queries is not None:
                return attention.attend(index, queries, scores)
        return attention.append_and_attend(index, *self.glue.split_heads(projection), scores)

    def _angles(self, turning: Turning, positions: Tensor) -> Angles:
        """Those of the tokens."""
        return *self._rotary.angles(turning, positions), turning.pairs is Layout.INTERLEAVED


def _multiply(product: Product, x: Tensor) -> Tensor:
    return product(x, x.new_empty(len(x), product.num_out))


def _norm_of(norm: RMSNorm | None) -> Norm | None:
    return None if norm is None else (norm.gain, norm.eps)
