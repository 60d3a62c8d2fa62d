"""The weights of a decoder's layers, read from a transformers model.

The Llama family and its relatives differ in few places: norms of query and key heads, norms behind a block, biases, the
activation. A model is recognised by its modules, not by its name. The probe finds what they do not show, such as a
factor in a forward method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.model.cpu import kernels
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.linear import Product, TorchLinear
from microturn.model.rotary import Layout, Rotary
from microturn.model.scores import Scores

# A transformers module, whose attributes are untyped.
_Module = Any

# Creates products from linear modules.
Products = type[TorchLinear] | type[Int8Linear]

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_SANDWICH_LAYER = _LAYER | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMED_ATTENTION = _ATTENTION | {"q_norm", "k_norm"}
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class RMSNorm:
    """A root mean square norm.

    Args:
        gain: float32 [width], the factor of each normed element.
        eps: added to the mean square.
    """

    def __init__(self, gain: Tensor, eps: float) -> None:
        self.gain = gain
        self.eps = eps

    @classmethod
    @torch.no_grad()
    def of(cls, module: _Module) -> Self:
        """Reads a module's gain as it is applied: some families store the gain minus 1."""
        eps = float(getattr(module, "variance_epsilon", None) or module.eps)
        gain: Tensor = module(torch.ones(module.weight.shape, device=module.weight.device)) * (1 + eps) ** 0.5
        return cls(gain, eps)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes the normed rows of x [rows, width] into out, which may be x itself; float32, contiguous, on a CPU."""
        kernels.rms_norm(x.numpy(), *arrays_of(self), out.numpy())
        return out


def arrays_of(norm: RMSNorm | None) -> tuple[NDArray[np.float32], np.float32]:
    """Gain and eps, as kernels take them; the gain is empty without a norm."""
    return (np.empty(0, np.float32), np.float32(0)) if norm is None else (norm.gain.numpy(), np.float32(norm.eps))


@dataclass(frozen=True)
class DecoderLayer:
    """One layer.

    Attributes:
        input_norm: before the attention.
        qkv: all query heads, then all key heads, then all value heads.
        q_norm: of each query head, or None; `k_norm` likewise.
        output: of the attention.
        attended_norm: of the attention's output, or None.
        feed_forward_norm: before the gated block.
        gate_up: the gate projection, then the up projection.
        activation: of the gate.
        down: back to the hidden size.
        fed_forward_norm: of the gated block's output, or None.
        num_heads: query heads.
        shape: of its keys and values.
        scores: of its attention, which has no sink logits.
        kind: name of its angles in the rotary embedding; None if all layers have the same.
    """

    input_norm: RMSNorm
    qkv: Product
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Product
    attended_norm: RMSNorm | None
    feed_forward_norm: RMSNorm
    gate_up: Product
    activation: nn.Module
    down: Product
    fed_forward_norm: RMSNorm | None
    num_heads: int
    shape: LayerShape
    scores: Scores
    kind: str | None

    @property
    def products(self) -> tuple[Product, ...]:
        """All products, in order."""
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def head_norms(self) -> tuple[NDArray[np.float32], NDArray[np.float32], np.float32]:
        """Gains of query and key heads, empty without a norm, and the norms' eps, for kernels."""
        (q_gain, eps), (k_gain, _) = arrays_of(self.q_norm), arrays_of(self.k_norm)
        return q_gain, k_gain, eps

    @classmethod
    def of(cls, module: _Module, shape: LayerShape, kind: str | None, products: Products) -> Self:
        """Fuses a layer that `is_known`; the module still works, and shares the memory if the products do."""
        attention, feed_forward = module.self_attn, module.mlp
        is_sandwich = _children(module) == _SANDWICH_LAYER
        is_normed = _children(attention) == _NORMED_ATTENTION
        before = module.pre_feedforward_layernorm if is_sandwich else module.post_attention_layernorm
        return cls(
            input_norm=RMSNorm.of(module.input_layernorm),
            qkv=products.fused([attention.q_proj, attention.k_proj, attention.v_proj]),
            q_norm=RMSNorm.of(attention.q_norm) if is_normed else None,
            k_norm=RMSNorm.of(attention.k_norm) if is_normed else None,
            output=products.of(attention.o_proj),
            attended_norm=RMSNorm.of(module.post_attention_layernorm) if is_sandwich else None,
            feed_forward_norm=RMSNorm.of(before),
            gate_up=products.fused([feed_forward.gate_proj, feed_forward.up_proj]),
            activation=feed_forward.act_fn,
            down=products.of(feed_forward.down_proj),
            fed_forward_norm=RMSNorm.of(module.post_feedforward_layernorm) if is_sandwich else None,
            num_heads=attention.q_proj.out_features // shape.head_dim,
            shape=shape,
            scores=Scores(float(attention.scaling), shape.window, getattr(attention, "attn_logit_softcapping", None)),
            kind=kind,
        )


def is_known(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> bool:
    """Whether a causal LM consists only of modules that can be read here."""
    if _children(model) != {"model", "lm_head"} or len({tensor.dtype for tensor in model.parameters()}) > 1:
        return False
    decoder = model.model
    return (
        _children(decoder) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        and type(decoder.rotary_emb) is Rotary
        and decoder.rotary_emb.layout is Layout.HALVES
        and [turning.pairs for turning in decoder.rotary_emb.turnings] == [Layout.HALVES] * len(shapes)
        and type(model.lm_head) is nn.Linear
        and _is_rms_norm(decoder.norm)
        and len(decoder.layers) == len(shapes)
        and all(_is_known_layer(layer, shape) for layer, shape in zip(decoder.layers, shapes, strict=True))
        and len({_sizes(layer) for layer in decoder.layers}) == 1
    )


def soft_cap_of_logits(model: PreTrainedModel) -> float | None:
    """The cap of a model's logits (see `scores.soft_capped`); None without."""
    soft_cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return soft_cap


def release_linears(model: PreTrainedModel) -> None:
    """Frees the weights of a model's linear modules, except those shared with embeddings; it cannot run any more."""
    shared = {parameter.data_ptr() for parameter in model.get_input_embeddings().parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.data_ptr() not in shared:
            module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)


def _sizes(layer: _Module) -> tuple[int, ...]:
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj, layer.mlp.gate_proj)
    return tuple(linear.out_features for linear in parts)


def _is_known_layer(layer: _Module, shape: LayerShape) -> bool:
    if _children(layer) not in (_LAYER, _SANDWICH_LAYER):
        return False
    attention, feed_forward = layer.self_attn, layer.mlp
    if _children(attention) not in (_ATTENTION, _NORMED_ATTENTION) or _children(feed_forward) != _FEED_FORWARD:
        return False
    norms = [child for name, child in layer.named_children() if name.endswith("norm")]
    head_norms = [child for name, child in attention.named_children() if name.endswith("norm")]
    linears = [child for part in (attention, feed_forward) for name, child in part.named_children() if "_proj" in name]
    return (
        all(map(_is_rms_norm, norms + head_norms))
        and all(len(norm.weight) == shape.head_dim for norm in head_norms)
        and all(type(linear) is nn.Linear for linear in linears)
        and hasattr(attention, "scaling")
    )


def _is_rms_norm(module: _Module) -> bool:
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return has_eps and [name for name, _ in module.named_parameters()] == ["weight"]


def _children(module: _Module) -> set[str]:
    return {name for name, _ in module.named_children()}
