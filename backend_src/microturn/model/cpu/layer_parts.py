"""What families call the parts of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from microturn.model.cpu.module_parts import children_of, other_parts

# A transformers module, whose attributes are untyped.
_Module = Any


class NormNames(NamedTuple):
    """The names of a layer's norms; None for those that it does not have.

    Attributes:
        input: before the attention.
        attended: of the attention's output.
        feed_forward: before the feed-forward part.
        fed_forward: of its output.
    """

    input: str | None
    attended: str | None
    feed_forward: str | None
    fed_forward: str | None

    @property
    def parts(self) -> set[str]:
        """The names of all parts of a layer with these norms."""
        return {"self_attn", "mlp"} | {name for name in self if name is not None}


# The same name stands for another place in another family.
_NORMS = (
    NormNames("input_layernorm", None, "post_attention_layernorm", None),
    # Gemma 2 and 3.
    NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    # GLM-4.
    NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    # VaultGemma.
    NormNames("input_layernorm", None, "pre_feedforward_layernorm", None),
    # OLMo 2 and 3, EXAONE 4.
    NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_FUSED_ATTENTION = {"qkv_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


def norms_of(layer: _Module) -> NormNames:
    """The norms of a layer that has no `other_layer_parts`."""
    return next(norms for norms in _NORMS if norms.parts == children_of(layer))


def has_head_norms(attention: _Module) -> bool:
    """Whether queries and keys are normed."""
    return children_of(attention) >= _HEAD_NORMS


def projections_of(attention: _Module) -> list[nn.Linear]:
    """What computes the query heads, then the key heads, then the value heads: three modules or one."""
    names = ["qkv_proj"] if "qkv_proj" in children_of(attention) else ["q_proj", "k_proj", "v_proj"]
    return [getattr(attention, name) for name in names]


def other_layer_parts(layer: _Module) -> Iterator[str]:
    """How the parts of a layer and its attention differ from those of all families known; the first reason counts."""
    yield from other_parts("a layer of it", layer, *(norms.parts for norms in _NORMS))
    yield from other_parts("its attention", layer.self_attn, _ATTENTION, _ATTENTION | _HEAD_NORMS, _FUSED_ATTENTION)
