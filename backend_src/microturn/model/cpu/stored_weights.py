"""A model whose layers keep their weights as the file has them, and are widened to float32 while they run.

The checks at load need float32: there a difference is an error and not rounding. transformers loads a model in one
type, which takes twice the file of a model in bfloat16, though what serves it afterwards may be half of the file: 8-bit
integers. Here a layer's weights stay what the file has, mapped from it where nothing had to be converted. A layer is
widened before it runs and given up behind that, so that only one is in float32 at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from microturn.model import runner


class StoredWeights:
    """Keeps the layers of a model as they are stored.

    Attributes:
        model: loaded with our attention; its other weights are float32, in memory of their own.

    Args:
        model_dir: of it.

    Raises:
        InvalidArgument: transformers cannot load a causal LM from the directory.
    """

    def __init__(self, model_dir: str | Path) -> None:
        with _as_stored():
            self.model = runner.read_model(model_dir)
        self._hooks: list[RemovableHandle] = []
        resident = set(self.model.parameters())
        for layer in _layers_of(self.model).values():
            stored = [parameter for parameter in layer.parameters() if parameter.dim() > 1]
            resident -= set(stored)  # gains and biases are read by themselves
            narrow = [parameter for parameter in stored if parameter.dtype != torch.float32]
            if narrow:
                self._hooks += _while_running(layer, narrow)
        _keep_resident(resident)
        runner.prepare_model(self.model, "cpu")

    def widen(self) -> None:
        """Makes the whole model float32 for good: it can serve."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _keep_resident(self.model.parameters())


def _keep_resident(parameters: Iterable[nn.Parameter]) -> None:
    """Copies weights into own memory, in float32.

    The kernel may drop pages that are mapped from a file and read them again during a turn, which made turns take many
    seconds after a pause.
    """
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.float32, copy=True)


def _layers_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers by their names in the model; none where they are not found."""
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and len(part) == num_layers:
            return {f"{name}.{index}": layer for index, layer in enumerate(part)}
    return {}


@contextmanager
def _as_stored() -> Iterator[None]:
    """Lets transformers leave the layers of a model that is loaded meanwhile in the types of their file.

    It has no option for that: one type is that of all, and of what is computed when the model is made. But a model may
    name exceptions.
    """
    plan_of = PreTrainedModel._get_dtype_plan

    def plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
        return {**plan_of(model, dtype), **{f"^{re.escape(name)}[.]": None for name in _layers_of(model)}}

    PreTrainedModel._get_dtype_plan = plan
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = plan_of


def _while_running(layer: nn.Module, narrow: list[nn.Parameter]) -> list[RemovableHandle]:
    """Has parameters of a layer widened while it runs."""
    stored: list[Tensor] = []

    def widen(*_: Any) -> None:
        stored.extend(parameter.data for parameter in narrow)
        for parameter in narrow:
            parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        for parameter, data in zip(narrow, stored, strict=True):
            parameter.data = data
        stored.clear()

    return [layer.register_forward_pre_hook(widen), layer.register_forward_hook(restore, always_call=True)]
