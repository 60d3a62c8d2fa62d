"""Imports transformers without what it does for others, over a second of a start on a CPU.

With any model transformers imports torch's compiler, to mark functions for it, and distributed tensors, for ranks of
its own; torch compiles nothing on a CPU here, and ranks are `parallel`'s. And it reads the sources of all its models
twice for the names in them, the second time for its package `models`, though models are found by those of the first.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from transformers.utils import import_utils

_COMPILER = "torch._dynamo"
_MARKS = frozenset({"allow_in_graph", "assume_constant_result", "disable"})
_TRACED = f"{_COMPILER}._trace_wrapped_higher_order_op"


def import_transformers() -> None:
    """Imports what all of transformers' models need.

    To be called before anything else imports a model; without effect where torch sees a GPU, whatever will serve.
    Behind it torch's compiler can be imported as ever, but what transformers would have marked for it is not; for
    transformers torch stays without its distributed part; and `transformers.models` names modules, but no classes.
    """
    if torch.cuda.is_available() or _COMPILER in sys.modules:
        return
    _say_that_torch_is_not_distributed()
    _leave_out_the_names_of_models()
    compiler, traced = _Compiler(_COMPILER), ModuleType(_TRACED)
    vars(traced).update(TransformGetItemToIndex=_index_transform)
    sys.modules |= {_COMPILER: compiler, _TRACED: traced}
    try:
        from transformers import GenerationMixin, PreTrainedModel  # noqa: F401
    finally:
        if sys.modules[_COMPILER] is compiler:
            del sys.modules[_COMPILER], sys.modules[_TRACED]


class _Compiler(ModuleType):
    """Instead of torch's compiler while transformers is imported, and as long as nothing but marks is wanted of it."""

    def __getattr__(self, name: str) -> Any:
        if name in _MARKS:
            return _unmarked
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # who looks through all modules asks for these
        if sys.modules[_COMPILER] is self:
            del sys.modules[_COMPILER], sys.modules[_TRACED]
        return getattr(importlib.import_module(_COMPILER), name)


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


def _leave_out_the_names_of_models() -> None:
    """Has `transformers.models` know only the modules in it."""
    define = import_utils.define_import_structure
    import_utils.define_import_structure = lambda *_: {}
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = define
