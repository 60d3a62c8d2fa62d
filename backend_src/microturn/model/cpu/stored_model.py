"""Loads a model whose weights stay as their file has them, mapped from it where nothing had to be converted.

The checks at load need the numbers of float32: there a difference is an error and not rounding. In that type a model
takes twice the file of one in bfloat16, though what serves it afterwards may be half of the file: 8-bit integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, initialization

from microturn.model import runner
from microturn.model.cpu import attention as native
from microturn.model.cpu.stored_weight import StoredWeight, as_stored
from microturn.model.traits import Traits

# Narrower parameters are no weights of products, and small: they are float32.
_LEAST_WIDTH = 16
_NARROW = (torch.bfloat16, torch.float16)

# Larger models take seconds to load anyway, and a constructor may write what transformers then replaces.
_MOST_IN_MEMORY = 1 << 30


def read_model(model_dir: str | Path, traits: Traits | None = None) -> PreTrainedModel:
    """Loads a causal LM with our attention. Weights of narrow types are `StoredWeight`, all else is float32.

    What serves must be `make_resident`, since weights may be mapped from the file. Where Numba's threads cannot be
    used, nothing widens weights in a product, and all are float32.

    Args:
        model_dir: its directory.
        traits: see `runner.prepare_model`.

    Raises:
        InvalidArgument: transformers cannot load a causal LM from the directory.
    """
    num_bytes = sum(file.stat().st_size for file in Path(model_dir).glob("*.safetensors") if file.exists())
    with _as_stored(), _in_memory() if num_bytes <= _MOST_IN_MEMORY else nullcontext():
        model = runner.read_model(model_dir)
    narrow = _NARROW if native.unavailable_reason() is None else ()
    computed_with: dict[nn.Parameter, nn.Parameter] = {}  # those that are shared still are
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in computed_with:
                is_stored = parameter.dtype in narrow and _is_of_products(parameter)
                data = StoredWeight.of(parameter) if is_stored else parameter.float()
                computed_with[parameter] = nn.Parameter(data, requires_grad=False)
            setattr(module, name, computed_with[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dtype in _NARROW and name not in module._non_persistent_buffers_set:
                setattr(module, name, buffer.float())
    return runner.prepare_model(model, "cpu", traits)


def make_resident(model: PreTrainedModel) -> None:
    """Copies all weights into own memory, in the types that they are stored in.

    The kernel may drop pages that are mapped from a file and read them again during a turn, which made turns take many
    seconds after a pause.
    """
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data = as_stored(parameter).clone()


def _is_of_products(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1 and min(parameter.shape[-2:]) >= _LEAST_WIDTH


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


@contextmanager
def _in_memory() -> Iterator[None]:
    """Has transformers make models meanwhile in memory that is not initialised, so that most of it is never touched.

    By default they are made without memory, on a device for which torch computes in Python, and imports parts of its
    compiler: a third of a second.
    """
    original = vars(PreTrainedModel)["get_init_context"]

    def get_init_context(cls: type[PreTrainedModel], *given: Any, **named: Any) -> list[AbstractContextManager[Any]]:
        contexts = original.__func__(cls, *given, **named)
        return [initialization.no_init_weights() if of == torch.device("meta") else of for of in contexts]

    PreTrainedModel.get_init_context = classmethod(get_init_context)
    try:
        yield
    finally:
        PreTrainedModel.get_init_context = original
