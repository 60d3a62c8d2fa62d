"""Imports transformers without torch's compiler and its distributed tensors, which take a second of a start.

transformers imports both with any model: the compiler to mark functions for it, the tensors for ranks of its own. On a
CPU torch compiles nothing here, and ranks are `parallel`'s.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from transformers.utils import import_utils

_COMPILER = "torch._dynamo"
_TRACED = f"{_COMPILER}._trace_wrapped_higher_order_op"


def import_transformers() -> None:
    """Imports what all of transformers' models need.

    To be called before anything else imports a model; without effect where there is a GPU. Behind it torch's compiler
    can be imported as ever, but what transformers would have marked for it is not.
    """
    if torch.cuda.is_available() or _COMPILER in sys.modules:
        return
    _say_that_torch_is_not_distributed()
    compiler, traced = ModuleType(_COMPILER), ModuleType(_TRACED)
    vars(compiler).update(allow_in_graph=_unmarked, assume_constant_result=_unmarked, disable=_unmarked)
    vars(traced).update(TransformGetItemToIndex=_index_transform)
    sys.modules |= {_COMPILER: compiler, _TRACED: traced}
    try:
        from transformers import GenerationMixin, PreTrainedModel  # noqa: F401
    finally:
        del sys.modules[_COMPILER], sys.modules[_TRACED]


def _unmarked(function: Any = None, *_: object, **__: object) -> Any:
    """A decorator, with and without arguments, that does nothing."""
    return (lambda decorated: decorated) if function is None else function


def _index_transform() -> Any:
    """What the compiler has for masks that are functions, imported when it is used."""
    return importlib.import_module(_TRACED).TransformGetItemToIndex()


def _say_that_torch_is_not_distributed() -> None:
    """Has transformers ask torch while it says no; the answer is cached."""
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        import_utils.is_torch_distributed_available()
    finally:
        torch.distributed.is_available = is_available
