"""The unmodified transformers model: the reference of all checks and oracles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from microturn.model import latent_attention
from microturn.model import paged_attention as paged
from microturn.model.cpu.stored_weight import products_by_torch
from microturn.model.rotary import Rotary

# Transformers' own attention, as each family implements it.
IMPLEMENTATION = "eager"


@contextmanager
def untouched(model: PreTrainedModel, *, exact_angles: bool = False) -> Iterator[None]:
    """Restores the model as transformers loads it: its own modules with its own attention.

    Args:
        model: prepared by `runner.prepare_model`.
        exact_angles: whether its own rotary module, if `Rotary` had replaced it, computes in float64.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, Rotary)
    ]
    for parent, name, child in places:
        stock = child.stock[0]
        setattr(parent, name, _InFloat64(stock) if exact_angles else stock)
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        with products_by_torch(), latent_attention.expanded(model):
            yield
    finally:
        model.set_attn_implementation(paged.IMPLEMENTATION)
        for place in places:
            setattr(*place)


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, ids: Sequence[int], first: int = 0) -> Tensor:
    """Float32 logits [n, vocab_size] of one full forward pass of the untouched model.

    Args:
        model: prepared by `runner.prepare_model`.
        ids: of the tokens.
        first: position of the first one. If it is not 0, angles are computed in float64.
    """
    given = torch.tensor([list(ids)], device=model.device)
    with untouched(model, exact_angles=first > 0):
        if first == 0:
            logits: Tensor = model(input_ids=given, use_cache=False).logits[0]
        else:
            positions = torch.arange(first, first + len(ids), device=model.device)[None]
            logits = model(input_ids=given, position_ids=positions, use_cache=False).logits[0]
    return logits.float()


class _InFloat64(nn.Module):
    """Wraps a third-party module so that it computes in float64 instead of float32."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...] | Tensor:
        with _Float64():
            angles = self._module(x, *args, **kwargs)
        if isinstance(angles, Tensor):  # complex numbers
            return angles.to(torch.complex64)
        return tuple(part.to(x.dtype) for part in angles)


class _Float64(TorchFunctionMode):
    """Replaces float32 by float64 in torch calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wider = [torch.float64 if value is torch.float32 else value for value in args]
        return func(*wider, **{n: torch.float64 if v is torch.float32 else v for n, v in (kwargs or {}).items()})
