"""Finds what each attention layer of a model is like, from one pass that our attention records."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument, reason_of
from microturn.kv.layer_groups import LayerShape
from microturn.model import paged_attention as paged
from microturn.model import recurrent
from microturn.model.scores import Scores


class _Recorder:
    """Replaces PagedAttention in one forward pass and records the shape and the scores of each layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[LayerShape, Scores]] = {}

    def append_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        if k.shape != v.shape:
            raise NotImplementedError(f"keys {list(k.shape)} and values {list(v.shape)} of different shapes")
        self.layers[layer] = LayerShape(k.shape[1], k.shape[2], scores.window), scores
        return torch.zeros_like(q)


def trace_layers(model: PreTrainedModel) -> list[LayerShape]:
    """The shapes alone of what `trace` finds."""
    return trace(model)[0]


@torch.inference_mode()
def trace(model: PreTrainedModel) -> tuple[list[LayerShape], list[Scores]]:
    """The shape of each attention layer's KV, and its scores, recorded in one forward pass of a token.

    The model's layers are numbered by it.

    Raises:
        InvalidArgument: the model does not call our attention in every layer that is not recurrent, or needs what it
            cannot do.
    """
    recorder = _Recorder()
    paged.number_layers(model, None)
    try:
        zero = torch.tensor([[0]], device=model.device)
        with paged.attending(recorder):
            model(input_ids=zero, position_ids=zero, use_cache=False)
    except NotImplementedError as error:
        raise InvalidArgument(f"{type(model).__name__} cannot be served: it uses {error}") from error
    except Exception as error:  # a model may raise anything for a packed batch
        raise InvalidArgument(
            f"{type(model).__name__} cannot be served: its pass over a packed batch fails with {reason_of(error)}"
        ) from error
    num_layers = int(model.config.get_text_config().num_hidden_layers)
    numbers = sorted(recorder.layers)
    if numbers != list(range(num_layers)) and not (numbers and recurrent.installed(model)):
        raise InvalidArgument(
            f"{type(model).__name__} cannot be served: {len(numbers)} of its {num_layers} layers call transformers' "
            "attention interface, in which ours takes the place of their own; the others look at earlier tokens in "
            f"another way ({_classes_of_others(model, numbers, num_layers)})"
        )
    paged.number_layers(model, numbers)
    traced = [recorder.layers[layer] for layer in numbers]
    return [shape for shape, _ in traced], [scores for _, scores in traced]


def _classes_of_others(model: PreTrainedModel, numbers: Sequence[int], num_layers: int) -> str:
    """What layers have instead of attention that calls ours, where only those with these numbers call it."""
    layers = next((part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == num_layers), ())
    others = [layer for number, layer in enumerate(layers) if number not in numbers]
    # Of a layer the first part that has parts itself: not a norm, but what brings tokens together.
    parts = (next((part for part in layer.children() if any(part.children())), layer) for layer in others)
    return ", ".join(sorted({type(part).__name__ for part in parts})) or "unknown"
