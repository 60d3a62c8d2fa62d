"""Loads a model whose weights stay as their file has them, mapped from it where nothing had to be converted.

The checks at load need the numbers of float32: there a difference is an error and not rounding. In that type a model
takes twice the file of one in bfloat16, though what serves it afterwards may be half of the file: 8-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.model import runner
from microturn.model.cpu.stored_weight import StoredWeight, as_stored

# Narrower parameters are no weights of products, and small: they are float32.
_LEAST_WIDTH = 16
_NARROW = (torch.bfloat16, torch.float16)


def read_model(model_dir: str | Path) -> PreTrainedModel:
    """Loads a causal LM with our attention. Weights of narrow types are `StoredWeight`, all else is float32.

    What serves must be `make_resident`, since weights may be mapped from the file.

    Raises:
        InvalidArgument: transformers cannot load a causal LM from the directory.
    """
    with _as_stored():
        model = runner.read_model(model_dir)
    _replace(model, _as_computed_with)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dtype in _NARROW and name not in module._non_persistent_buffers_set:
                setattr(module, name, buffer.float())
    return runner.prepare_model(model, "cpu")


def make_resident(model: PreTrainedModel) -> None:
    """Copies all weights into own memory, in the types that they are stored in.

    The kernel may drop pages that are mapped from a file and read them again during a turn, which made turns take many
    seconds after a pause.
    """
    _replace(model, lambda parameter: parameter if parameter.is_meta else _copy(parameter))


def _as_computed_with(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in _NARROW and parameter.dim() > 1 and min(parameter.shape[-2:]) >= _LEAST_WIDTH:
        return StoredWeight.of(parameter)
    return parameter.float()


def _copy(parameter: nn.Parameter) -> Tensor:
    copy = as_stored(parameter).clone()
    return StoredWeight.of(copy) if isinstance(parameter, StoredWeight) else copy


def _replace(model: PreTrainedModel, replacement: Callable[[nn.Parameter], Tensor]) -> None:
    """Replaces all parameters; those that are shared still are."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(replacement(parameter), requires_grad=False)
            setattr(module, name, made[parameter])


@contextmanager
def _as_stored() -> Iterator[None]:
    """Lets transformers leave what it loads meanwhile in the types of the file.

    It has no option for that: one type is that of all, and of what is computed when the model is made. But a model may
    name exceptions.
    """
    plan_of = PreTrainedModel._get_dtype_plan
    PreTrainedModel._get_dtype_plan = lambda *_: {"^.": None}  # of parameters with these names
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = plan_of
