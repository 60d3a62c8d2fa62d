"""Which rows and columns of a model's weights a rank has.

As in Megatron-LM (Shoeybi et al., 2019): the projections before the attention are cut by heads, those of the
feed-forward part by width, so that a rank attends and activates for itself; what follows them is cut along its inputs,
and the ranks add their results. The head is cut by words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerShape
from microturn.model.cpu.feed_forward import gate_and_up, has_experts
from microturn.model.cpu.layer_parts import has_head_norms, projections_of
from microturn.model.cpu.stored_weight import as_stored
from microturn.model.cpu.weights import unknown_reason


class Cut(Enum):
    """How the ranks make one result of their products."""

    INPUTS = "each has a part of the sum"
    WORDS = "each has some of the words"


@dataclass(frozen=True)
class Shard:
    """One rank's share of a model.

    Attributes:
        shapes: KV shape of each of its layers.
        cuts: its modules whose results are parts.
        vocab_size: of the whole model.
    """

    shapes: Sequence[LayerShape]
    cuts: Mapping[nn.Linear, Cut]
    vocab_size: int


def require_cuttable(model: PreTrainedModel, shapes: Sequence[LayerShape], size: int) -> None:
    """Looks at a model's modules only.

    Raises:
        InvalidArgument: so many ranks cannot share the model.
    """
    reason = unknown_reason(model, shapes) or next(_uncuttable(model, shapes, size), None)
    if reason is not None:
        raise InvalidArgument(f"setting 'tensor_parallel' cannot be {size} for {type(model).__name__}: {reason}")


def cut(model: PreTrainedModel, shapes: Sequence[LayerShape], rank: int, size: int) -> Shard:
    """Leaves a rank's share of a model in its modules, mostly as views; embeddings and norms stay whole.

    Its config speaks of the rank's query heads afterwards.

    Args:
        model: that can be cut (see `require_cuttable`).
        shapes: KV shape of each layer.
        rank: whose share it becomes, of `size`.
    """
    cuts: dict[nn.Linear, Cut] = {}
    for layer, shape in zip(model.model.layers, shapes, strict=True):
        attention = layer.self_attn
        kv_width = shape.num_kv_heads * shape.head_dim
        _keep_rows(projections_of(attention), [attention.o_proj.in_features, kv_width, kv_width], rank, size)
        width = layer.mlp.down_proj.in_features
        _keep_rows(gate_and_up(layer.mlp), [width, width], rank, size)
        for module in (attention.o_proj, layer.mlp.down_proj):
            _keep_columns(module, rank, size)
            cuts[module] = Cut.INPUTS
    vocab_size = model.lm_head.out_features
    _keep_rows([model.lm_head], [vocab_size], rank, size)
    cuts[model.lm_head] = Cut.WORDS
    own = [replace(shape, num_kv_heads=shape.num_kv_heads // size) for shape in shapes]
    model.config.get_text_config().num_attention_heads //= size
    return Shard(own, cuts, vocab_size)


def span_of(width: int, rank: int, size: int) -> range:
    """Which of so many rows or columns a rank has: all ranks have the same number of them, or one more or less."""
    return range(rank * width // size, (rank + 1) * width // size)


def _uncuttable(model: PreTrainedModel, shapes: Sequence[LayerShape], size: int) -> Iterator[str]:
    """Why so many ranks cannot share a model that is known; the first reason counts."""
    for layer, shape in zip(model.model.layers, shapes, strict=True):
        if shape.num_kv_heads % size:
            yield f"its {shape.num_kv_heads} key-value heads cannot be divided by that"
        if has_experts(layer.mlp):
            yield "it has experts"
        attention = layer.self_attn
        if has_head_norms(attention) and len(attention.q_norm.weight) != shape.head_dim:
            yield "its queries are normed over all heads"


def _keep_rows(modules: Sequence[nn.Linear], widths: Sequence[int], rank: int, size: int) -> None:
    """Leaves a rank's rows of outputs of these widths, which are one module's each, or all in one."""
    of_modules = [[width] for width in widths] if len(modules) > 1 else [widths]
    for module, of_module in zip(modules, of_modules, strict=True):
        spans, first = [], 0
        for width in of_module:
            span = span_of(width, rank, size)
            spans.append(slice(first + span.start, first + span.stop))
            first += width
        _set_weight(module, _rows_of(as_stored(module.weight), spans))
        if module.bias is not None:
            module.bias = _parameter(_rows_of(module.bias.detach(), spans))


def _keep_columns(module: nn.Linear, rank: int, size: int) -> None:
    """Leaves a rank's columns, and the bias at rank 0: it is added once."""
    span = span_of(module.in_features, rank, size)
    _set_weight(module, as_stored(module.weight)[:, span.start : span.stop].contiguous())
    if rank:
        module.register_parameter("bias", None)


def _rows_of(tensor: Tensor, spans: Sequence[slice]) -> Tensor:
    """Some rows, as a view where they are one span."""
    return tensor[spans[0]] if len(spans) == 1 else torch.cat([tensor[span] for span in spans])


def _set_weight(module: nn.Linear, weight: Tensor) -> None:
    module.weight = _parameter(weight)
    module.out_features, module.in_features = weight.shape


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
