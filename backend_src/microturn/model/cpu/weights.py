"""The weights of a decoder's layers, read from a transformers model.

The Llama family and its relatives differ in few places: which norms there are, what is rotated, fused projections,
factors, biases, the activation. A model is recognised by its modules, not by its name. The probe finds what they do
not show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.model.cpu import feed_forward
from microturn.model.cpu.factors import residual_factor_of
from microturn.model.cpu.feed_forward import FeedForward
from microturn.model.cpu.layer_parts import has_head_norms, norms_of, other_layer_parts, projections_of
from microturn.model.cpu.module_parts import other_parts
from microturn.model.cpu.stored_weight import as_stored
from microturn.model.products import Product, Products
from microturn.model.rotary import Rotary, Turning
from microturn.model.scores import Scores

# A transformers module, whose attributes are untyped.
_Module = Any


class NotKnown(Exception):
    """The layers of a model cannot be ours; the argument is the reason."""


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
        from microturn.model.cpu import kernels  # what only a CPU needs: Numba

        kernels.rms_norm(x.numpy(), *arrays_of(self), out.numpy())
        return out


def arrays_of(norm: RMSNorm | None) -> tuple[NDArray[np.float32], np.float32]:
    """Gain and eps, as kernels take them; the gain is empty without a norm."""
    return (np.empty(0, np.float32), np.float32(0)) if norm is None else (norm.gain.numpy(), np.float32(norm.eps))


@dataclass(frozen=True)
class DecoderLayer:
    """One layer.

    Attributes:
        input_norm: before the attention, or None.
        qkv: all query heads, then all key heads, then all value heads.
        q_norm: of each query head or of all as one vector, as long as its gain is, or None; `k_norm` likewise.
        output: of the attention.
        attended_norm: of the attention's output, or None.
        feed_forward_norm: before the feed-forward part, or None.
        feed_forward: behind the attention.
        fed_forward_norm: of the feed-forward part's output, or None.
        residual_factor: with which both outputs are added to the hidden states.
        num_heads: query heads.
        shape: of its keys and values.
        scores: of its attention, which has no sink logits.
        turning: how it rotates queries and keys.
    """

    input_norm: RMSNorm | None
    qkv: Product
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: Product
    attended_norm: RMSNorm | None
    feed_forward_norm: RMSNorm | None
    feed_forward: FeedForward
    fed_forward_norm: RMSNorm | None
    residual_factor: float
    num_heads: int
    shape: LayerShape
    scores: Scores
    turning: Turning

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return self.qkv.num_bytes + self.output.num_bytes + self.feed_forward.weight_bytes

    @property
    def head_norms(self) -> tuple[NDArray[np.float32], NDArray[np.float32], np.float32]:
        """Gains of query and key heads, empty without a norm, and the norms' eps, for kernels."""
        (q_gain, eps), (k_gain, _) = arrays_of(self.q_norm), arrays_of(self.k_norm)
        return q_gain, k_gain, eps

    @classmethod
    def of(cls, module: _Module, shape: LayerShape, turning: Turning, products: Products) -> Self:
        """Fuses a known layer; the module still works, and shares the memory if the products do."""
        attention, norms = module.self_attn, norms_of(module)
        is_normed = has_head_norms(attention)
        return cls(
            input_norm=_norm(module, norms.input),
            qkv=products.fused(projections_of(attention)),
            q_norm=_norm(attention, "q_norm" if is_normed else None),
            k_norm=_norm(attention, "k_norm" if is_normed else None),
            output=products.of(attention.o_proj),
            attended_norm=_norm(module, norms.attended),
            feed_forward_norm=_norm(module, norms.feed_forward),
            feed_forward=FeedForward.of(module.mlp, products),
            fed_forward_norm=_norm(module, norms.fed_forward),
            residual_factor=residual_factor_of(module),
            num_heads=attention.o_proj.in_features // shape.head_dim,
            shape=shape,
            scores=Scores(float(attention.scaling), shape.window, getattr(attention, "attn_logit_softcapping", None)),
            turning=turning,
        )


def _norm(module: _Module, name: str | None) -> RMSNorm | None:
    return None if name is None else RMSNorm.of(getattr(module, name))


def unknown_reason(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> str | None:
    """Why a causal LM cannot be read here; None if it consists only of modules that can be."""
    return next(_unlike(model, shapes), None)


def soft_cap_of_logits(model: PreTrainedModel) -> float | None:
    """The cap of a model's logits (see `scores.soft_capped`); None without."""
    soft_cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return soft_cap


def release_linears(model: PreTrainedModel) -> None:
    """Frees the weights of linear modules and experts, except those shared with embeddings; it cannot run any more."""
    shared = {parameter.data_ptr() for parameter in model.get_input_embeddings().parameters()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.data_ptr() not in shared:
            module.weight = _without_memory(module.weight)
        for name, stack in feed_forward.stacks_of(module).items():
            setattr(module, name, _without_memory(stack))


def _without_memory(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(as_stored(weight).to("meta"), requires_grad=False)


def _unlike(model: PreTrainedModel, shapes: Sequence[LayerShape]) -> Iterator[str]:
    """How a model differs from what is known. Only the first reason counts: those behind it rely on what is before."""
    yield from other_parts("it", model, {"model", "lm_head"})
    decoder = model.model
    yield from other_parts("its decoder", decoder, {"embed_tokens", "layers", "norm", "rotary_emb"})
    if len(decoder.layers) != len(shapes):
        yield f"{len(shapes)} of its {len(decoder.layers)} layers are attention"
    rotary = decoder.rotary_emb
    if type(rotary) is not Rotary or len(rotary.turnings) != len(shapes):
        yield "how its layers rotate queries and keys is not known"
    turned = [
        (rotary.num_turned(turning), shape.head_dim) for turning, shape in zip(rotary.turnings, shapes, strict=True)
    ]
    for num_turned, head_dim in turned:
        if num_turned > head_dim:  # kernels would read beyond a head
            yield f"it has rotary angles for {num_turned} of {head_dim} elements of a head"
    if type(model.lm_head) is not nn.Linear:
        yield f"its lm_head is a {type(model.lm_head).__name__}"
    if not _is_rms_norm(decoder.norm):
        yield f"its norm is a {type(decoder.norm).__name__}"
    for layer, shape in zip(decoder.layers, shapes, strict=True):
        yield from _unlike_layer(layer, shape)
    sizes = zip(decoder.layers, shapes, strict=True)
    if len({(layer.self_attn.o_proj.in_features, of.num_kv_heads, of.head_dim) for layer, of in sizes}) > 1:
        yield "its layers differ in their sizes"


def _unlike_layer(layer: _Module, shape: LayerShape) -> Iterator[str]:
    """See `_unlike`."""
    yield from other_layer_parts(layer)
    attention = layer.self_attn
    yield from feed_forward.unlike(layer.mlp)
    for part in (layer, attention):
        for name, child in part.named_children():
            if not _is_as_named(name, child):
                yield f"its {name} is a {type(child).__name__}"
    q_width, kv_width = attention.o_proj.in_features, shape.num_kv_heads * shape.head_dim
    if sum(linear.out_features for linear in projections_of(attention)) != q_width + 2 * kv_width:
        yield "its attention has projections that do not fit each other"
    widths = {"q_norm": q_width, "k_norm": kv_width} if has_head_norms(attention) else {}
    if any(len(getattr(attention, name).weight) not in (shape.head_dim, width) for name, width in widths.items()):
        yield "the norms of its queries and keys are neither of one head nor of all"
    if not hasattr(attention, "scaling"):
        yield "its attention does not tell the factor of its scores"


def _is_as_named(name: str, module: _Module) -> bool:
    """Whether a norm is a root mean square norm, and a projection a plain linear module."""
    if name.endswith("norm"):
        return _is_rms_norm(module)
    return type(module) is nn.Linear or "_proj" not in name


def _is_rms_norm(module: _Module) -> bool:
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return has_eps and [name for name, _ in module.named_parameters()] == ["weight"]
