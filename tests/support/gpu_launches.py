"""What a pass launches on a GPU that need not be there: Inductor's generated kernels, our own, and calls of libraries.

Tensors have a device, a shape and a type, but no memory. Dynamo and Inductor do all that they do for a GPU, up to the
source of the kernels, which nothing compiles. Of FlashInfer's and our own kernels only the calls are counted.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import flashinfer
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _triton
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from microturn.model.gpu import projection_kernel
from microturn.model.gpu.glue import Glue

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch's compiler uses what it deprecates
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx, scheduler
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties

GPU = torch.device("cuda", 0)
_CAPABILITY = (9, 0)
_H100 = SimpleNamespace(
    name="an H100",
    gcnArchName="",
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
)
# A launch in the code that Inductor writes, and a call of a library or of an operation that it does not generate.
_LAUNCH = re.compile(r"^ +(?:(triton_\w+)\.run|(extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+))\(", re.MULTILINE)
_WITHOUT_KERNEL = {"prim::device", "aten::empty", "aten::empty_like", "aten::new_empty", "aten::detach"}


class Launches(TorchDispatchMode):
    """Counts, while it is entered, what torch's operations launch; compiled functions and stand-ins add theirs.

    Attributes:
        names: of the launches, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in _WITHOUT_KERNEL:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    @classmethod
    @contextmanager
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> Iterator[Self]:
        """Lets torch compile for a GPU, and counts the kernels of others where they are called."""
        _pretend(monkeypatch)
        launches = cls()
        launches._install(monkeypatch)
        yield launches
        torch._dynamo.reset()
        DeviceProperties.create.cache_clear()

    def _install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=self._compile))
        monkeypatch.setattr(projection_kernel, "_append_projection", self)
        names = self.names

        class Wrapper:
            """Stands for FlashInfer's; a captured pass has two kernels: its own, and one that merges split keys."""

            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def reset_workspace_buffer(self, *_: Tensor) -> None:
                pass

            def run(self, *_: Any, **__: Any) -> None:
                names.extend(("flashinfer: attention", "flashinfer: merge"))

        monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Wrapper)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Stands for our kernel, which is launched with a grid."""
        return lambda *_, **__: self.names.append("triton: _append_projection")

    def glue(self) -> Glue:
        """The compiled functions, for calls while this mode is entered: Dynamo refuses to compile under a mode."""
        compiled = Glue.compiled()
        return Glue(*(self._aside(getattr(compiled, name)) for name in Glue.__dataclass_fields__))

    @staticmethod
    def _aside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with _pop_mode_temporarily():
                return function(*args)

        return call

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return compile_fx.compile_fx(graph, inputs, inner_compile=self._generate)

    def _generate(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Callable[..., Any]:
        """Stands for Inductor's `compile_fx_inner`: what it returns computes shapes, and counts."""
        plain = torch.fx.GraphModule(graph, copy.deepcopy(graph.graph))
        with pytest.raises(_Written) as written:
            compile_fx.compile_fx_inner(graph, inputs, **options)
        (code,) = written.value.args
        launched = ["inductor: " + (kernel or call) for kernel, call in _LAUNCH.findall(code)]

        def run(*args: Any) -> Any:
            self.names.extend(launched)
            return plain(*args)

        return make_boxed_func(run)


class _Written(BaseException):
    """Inductor has written its code, which is the argument. What it catches is an `Exception`."""


def _stop(graph: GraphLowering) -> None:
    raise _Written(graph.codegen()[0].value)


def on_gpu(module: Any, mode: FakeTensorMode) -> Any:
    """A copy of an object with all of its tensors on the GPU, without memory."""

    def moved(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)
        memo[id(tensor)] = fake
        return fake

    with pytest.MonkeyPatch.context() as patches:
        for of in (Tensor, nn.Parameter):
            patches.setattr(of, "__deepcopy__", moved)
        return copy.deepcopy(module)


_plainly_indexed = Tensor.__getitem__


def _indexed(tensor: Tensor, at: Any) -> Tensor:
    """`tensor[at]` by operations: brackets, as torch has them, want CUDA for a tensor on a GPU, memory or not."""
    if not tensor.is_cuda:
        return _plainly_indexed(tensor, at)
    places = list(at) if isinstance(at, tuple) else [at]
    if ... in places:
        rest = places.index(...)
        num_others = sum(place is not None for place in places) - 1
        places[rest : rest + 1] = [slice(None)] * (tensor.dim() - num_others)
    dim = 0
    for place in places:
        if isinstance(place, int):
            tensor = tensor.select(dim, place)
            continue
        if place is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(place, slice):
            tensor = torch.ops.aten.slice(tensor, dim, place.start, place.stop, place.step or 1)
        else:
            tensor = tensor.index_select(dim, place)
        dim += 1
    return tensor


def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor asks of a GPU."""
    monkeypatch.setattr(Tensor, "__getitem__", _indexed)
    monkeypatch.setattr(GraphLowering, "compile_to_module", _stop)
    answers = {
        (CudaInterface, "get_device_properties"): _H100,
        (CudaInterface.Worker, "get_device_properties"): _H100,
        (CudaInterface, "get_compute_capability"): 90,
        (CudaInterface, "is_bf16_supported"): True,
        (torch.cuda, "get_device_properties"): _H100,
        (torch.cuda, "get_device_capability"): _CAPABILITY,
        (torch.cuda, "current_device"): 0,
        (scheduler, "has_triton"): True,
        (_triton, "triton_hash_with_backend"): "",
        (torch.cuda, "Stream"): None,
        (AsyncCompile, "triton"): None,
        (joint_graph, "lazy_init"): None,  # patterns of products, for which it would compute on the GPU
    }
    for (of, name), answer in answers.items():
        monkeypatch.setattr(of, name, lambda *_, _answer=answer, **__: _answer)
