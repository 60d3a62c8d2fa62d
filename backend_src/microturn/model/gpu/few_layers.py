"""The first layers of a model, which stand for all of them where it is checked.

The layers of a model are of few kinds: with a window or without, with experts, recurrent, rotated by these angles or
those. A check of one layer of each kind finds what a check of all would, since it looks at what is computed and not at
the weights. So a large model is checked in float32 without having all of its weights in that type.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from microturn.errors import reason_of
from microturn.kv.layer_groups import LayerShape
from microturn.model import rotary_fit, runner, tracing
from microturn.model.gpu.layers import TorchLayers
from microturn.model.gpu.runner import GpuRunner
from microturn.model.probe import TOLERANCE, Checked, check_runner
from microturn.model.probe_pages import new_pages
from microturn.model.scores import Scores
from microturn.model.stock import untouched

log = logging.getLogger(__name__)

# So many are taken in any case: results of a layer are to reach others, and a small model is checked as a whole.
LEAST_LAYERS = 4

# Attributes that number a layer, and others that say nothing of what it computes.
_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number", "attention_layer"}
_OTHERS = {"training"}
_PLAIN = (bool, int, float, str, list, tuple, type(None))


@dataclass(frozen=True)
class Kinds:
    """Which of a model's layers are alike.

    Attributes:
        num_layers: how many of the first layers have one of each kind among them, `LEAST_LAYERS` at least.
        is_whole: whether those are all layers of the model.
        counterparts: of each layer with attention the first one with attention of its kind, counted like it.
    """

    num_layers: int
    is_whole: bool
    counterparts: Sequence[int]

    @classmethod
    def of(cls, model: PreTrainedModel, shapes: Sequence[LayerShape], scores: Sequence[Scores]) -> Self:
        """Compares the modules of all layers, what the config says of each, and how they call the attention.

        Args:
            model: prepared for us, and traced.
            shapes: KV shape of each layer with attention; `scores` likewise.
        """
        config = model.config.get_text_config()
        num_layers = int(config.num_hidden_layers)
        place = _place_of_layers(model, num_layers)
        if place is None:
            return cls(num_layers, True, range(len(shapes)))
        layers = list(getattr(*place))
        lists = [(name, of) for name, of in sorted(vars(config).items()) if _is_per_layer(of, num_layers)]
        firsts: dict[object, int] = {}
        first_of: list[int] = []
        # Of layers with attention: which layer of the model it is.
        with_attention = []
        for index, layer in enumerate(layers):
            number = _number_of(layer)
            told = [repr(of[index]) for _, of in lists]
            called: object = None
            if number is not None:
                with_attention.append(index)
                of = scores[number]
                called = shapes[number], of.scale, of.window, of.soft_cap, of.sink_logits is None
            first_of.append(firsts.setdefault((tuple(told), called, tuple(_parts_of(layer))), index))
        if len(with_attention) != len(shapes):
            return cls(num_layers, True, range(len(shapes)))
        needed = min(num_layers, max(LEAST_LAYERS, 1 + max(firsts.values())))
        counterparts = [with_attention.index(first_of[index]) for index in with_attention]
        return cls(needed, needed == num_layers, counterparts)


@dataclass(frozen=True)
class FewLayers:
    """The first layers of a model, in float32.

    Attributes:
        model: of these layers.
        layers: KV shape of each layer with attention; `scores` likewise.
    """

    model: PreTrainedModel
    layers: Sequence[LayerShape]
    scores: Sequence[Scores]

    @classmethod
    def of(cls, model: PreTrainedModel, num_layers: int) -> Self:
        few = few_layers(model, num_layers, torch.float32)
        return cls(few, *tracing.trace(few))

    def in_type_of(self, model: PreTrainedModel) -> PreTrainedModel:
        """The same layers of the model in its own type, over its weights."""
        served = few_layers(model, int(self.model.config.get_text_config().num_hidden_layers), model.dtype)
        rotary_fit.adopt(served, self.model, range(len(self.layers)))
        return served


def check_few_layers(
    model: PreTrainedModel, layers: Sequence[LayerShape], scores: Sequence[Scores], max_tokens: int
) -> tuple[Checked[TorchLayers], FewLayers]:
    """Checks float32 copies of a model's first layers (see `check_runner`), and makes the model's angles exact.

    Args:
        model: prepared for us, in its serving type.
        layers: KV shape of each layer with attention; `scores` likewise.
        max_tokens: of a step.

    Returns:
        What holds for the whole model, with a decoder of the layers that were checked; and these layers.

    Raises:
        InvalidArgument: the model cannot be served.
    """
    few = _stand_ins(model, layers, scores)

    def new_decoder() -> TorchLayers:
        TorchLayers.require_known(model, layers)  # its later layers have the same modules, but see for yourself
        return TorchLayers.of(few.model, few.layers)

    def new_runner(decoder: TorchLayers | None) -> GpuRunner:
        pages = new_pages(few.model, few.layers, device=model.device)
        return GpuRunner(
            few.model, pages, few.layers, few.scores, decoder=decoder, has_flashinfer=False, max_tokens=max_tokens
        )

    return check_runner(few.model, few.layers, new_runner, new_decoder, TOLERANCE), few


def _stand_ins(model: PreTrainedModel, layers: Sequence[LayerShape], scores: Sequence[Scores]) -> FewLayers:
    """The layers to check: the first ones, or all where these do not run by themselves or are unlike others."""
    kinds = Kinds.of(model, layers, scores)
    if not kinds.is_whole:
        try:
            few = FewLayers.of(model, kinds.num_layers)
            if list(few.layers) == list(layers[: len(few.layers)]) and rotary_fit.adopt(
                model, few.model, kinds.counterparts
            ):
                log.info("checking %d of %s layers", kinds.num_layers, type(model).__name__)
                return few
            reason = "layers are unlike the first ones"
        except Exception as error:  # a model may raise anything without its other layers
            reason = reason_of(error)
        log.warning("all layers of %s are checked, in float32: %s", type(model).__name__, reason)
    few = FewLayers.of(model, int(model.config.get_text_config().num_hidden_layers))
    rotary_fit.adopt(model, few.model, range(len(layers)))
    return few


def few_layers(model: PreTrainedModel, num_layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the first layers of another one, prepared for us like that.

    Its weights are copies in this type; those that are of the type already are shared with the model.

    Args:
        model: prepared for us; unchanged afterwards.
        num_layers: how many.
        dtype: of the weights.
    """
    config = model.config.get_text_config()
    num_all = int(config.num_hidden_layers)
    place = _place_of_layers(model, num_all)
    with untouched(model):
        try:
            if place is not None:
                whole = getattr(*place)
                setattr(*place, nn.ModuleList(list(whole)[:num_layers]))
            # What is said to be copied already, is not copied by `deepcopy`.
            copies: dict[int, Any] = {
                id(parameter): nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                for parameter in model.parameters()
            }
            few = copy.deepcopy(model, copies)
        finally:
            if place is not None:
                setattr(*place, whole)
    for module in few.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point() and buffer.dtype == model.dtype:
                setattr(module, name, buffer.to(dtype))
    _shorten(few.config.get_text_config(), num_all, num_layers)
    return runner.prepare_model(few, model.device)


def _shorten(config: Any, num_all: int, num_layers: int) -> None:
    """Has a config speak of the first layers only."""
    for name, of in list(vars(config).items()):
        if _is_per_layer(of, num_all):
            setattr(config, name, of[:num_layers])
    config.num_hidden_layers = num_layers


def _place_of_layers(model: PreTrainedModel, num_layers: int) -> tuple[nn.Module, str] | None:
    """The module that has the list of all layers, and the list's name there; None if several lists may be that."""
    places: list[tuple[nn.Module, str]] = []
    within: set[nn.Module] = set()
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers and child not in within:
                places.append((parent, name))
                within.update(child.modules())
    return places[0] if len(places) == 1 else None


def _is_per_layer(of: object, num_layers: int) -> bool:
    return isinstance(of, list | tuple) and len(of) == num_layers


def _number_of(layer: nn.Module) -> int | None:
    """The number of a layer among those with attention (see `paged_attention.number_layers`); None without."""
    numbers = (part.__dict__.get("attention_layer") for part in layer.modules())
    return next((number for number in numbers if number is not None), None)


def _parts_of(layer: nn.Module) -> Iterator[object]:
    """What a layer consists of: the classes of its modules, their plain attributes, and the shapes of their tensors."""
    for name, part in layer.named_modules():
        yield name, type(part)
        for attribute, of in sorted(vars(part).items()):
            if attribute not in _NUMBERS | _OTHERS and isinstance(of, _PLAIN):
                yield attribute, repr(of)
        for tensors in (part.named_parameters(recurse=False), part.named_buffers(recurse=False)):
            yield from ((of_tensor, tensor.shape, tensor.dtype) for of_tensor, tensor in tensors)
