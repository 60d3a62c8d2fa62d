"""FlashInfer's own planner, on a CPU: as FlashInfer's wrappers call it, for a GPU that need not be there.

Its C++ is host code; `flashinfer_planner.cpp` gives it what it asks of CUDA's runtime.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from support.needed import needed

_SOURCE = Path(__file__).with_suffix(".cpp")
_HEADERS = ("bf16", "device_runtime_api", "fp16", "fp8", "runtime", "runtime_api")
_NUM_NUMBERS = 15


class PlanError(RuntimeError):
    """The planner refuses, and says why."""


class Gpu(NamedTuple):
    """What a plan depends on: multiprocessors, compute capability, and the most shared memory of a block."""

    num_processors: int
    capability: tuple[int, int]
    shared_bytes: int


class PlanInfo(NamedTuple):
    """FlashInfer's `PrefillPlanInfo`: what the host keeps of a plan, and what a captured kernel has baked in."""

    num_blocks: int  # of the grid; as many for each key head
    max_tokens: int
    num_tokens_at: int  # where in the plan's memory
    tile: int
    rows_at: int
    query_tiles_at: int
    chunks_at: int
    merge_indptr_at: int
    out_indptr_at: int
    chunk_size_at: int
    partial_results_at: int  # in the workspace
    partial_weights_at: int
    is_valid_at: int
    is_captured: int
    is_split: int


@dataclass(frozen=True)
class Planned:
    """A plan, with what it was asked for.

    Attributes:
        info: see there.
        memory: uint8, what the plan has copied to the device.
        num_heads: query heads.
        head_dim: elements of a head.
        group_size: query heads of a key head.
        query_indptr: int32 [rows + 1], bounds of each row's queries.
        kv_lens: int32 [rows], keys of each row.
        page_size: tokens in a page.
        window_left: how many keys before its own a query sees; -1 for all.
    """

    info: PlanInfo
    memory: NDArray[np.uint8]
    num_heads: int
    head_dim: int
    group_size: int
    query_indptr: NDArray[np.int32]
    kv_lens: NDArray[np.int32]
    page_size: int
    window_left: int

    def ints(self, at: int, count: int) -> NDArray[np.int32]:
        """Some numbers of the plan's memory."""
        return self.memory[at : at + 4 * count].view(np.int32)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace that the plan's kernels may write."""
        info = self.info
        return info.partial_weights_at + 4 * self.num_heads * info.num_blocks * info.tile if info.is_split else 0


@dataclass
class Planner:
    """The compiled planner; keeps its plans.

    Attributes:
        plans: since `install`, or since they were taken away.
    """

    library: ctypes.CDLL
    plans: list[Planned] = field(default_factory=list)

    @classmethod
    def build(cls, directory: Path) -> Planner:
        """Compiles it into a directory, in seconds."""
        for name in _HEADERS:
            (directory / f"cuda_{name}.h").touch()
        (directory / "driver_types.h").touch()
        library = directory / "flashinfer_planner.so"
        headers = Path(flashinfer.__file__).parent / "data" / "include"
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{directory}", f"-I{headers}"]
        subprocess.run([needed("g++", "install a C++ compiler"), *flags, _SOURCE, "-o", library], check=True)
        return cls(ctypes.CDLL(str(library)))

    def install(self, monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
        """Has FlashInfer's wrappers plan with it, in ordinary memory."""
        self.plans.clear()
        self.library.set_gpu(gpu.num_processors, *gpu.capability, gpu.shared_bytes)
        monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", self._module)
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options | {"pin_memory": False}))

    def _module(self, backend: str, *types: Any) -> SimpleNamespace:
        assert backend == "fa2"
        return SimpleNamespace(plan=partial(self.plan, types[1].itemsize))

    def plan(
        self,
        kv_dtype_bytes: int,
        workspace: Tensor,
        memory: Tensor,
        pinned: Tensor,
        query_indptr: Tensor,
        page_indptr: Tensor,
        kv_lens: Tensor,
        max_tokens: int,
        num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        page_size: int,
        is_captured: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        *others: int,
    ) -> Sequence[int]:
        """Stands for the function of FlashInfer's compiled module, for a cache of so many bytes an element."""
        assert query_indptr.dtype == page_indptr.dtype == torch.int32
        assert len(query_indptr) == len(page_indptr) == num_rows + 1
        numbers, reason = (ctypes.c_int64 * _NUM_NUMBERS)(), ctypes.create_string_buffer(1000)
        sizes = (max_tokens, num_rows, num_heads, num_kv_heads, page_size, is_captured, head_dim_qk, head_dim_vo)
        plan = self.library.plan
        plan.restype = ctypes.c_bool
        is_planned = plan(
            numbers,
            reason,
            ctypes.c_size_t(len(reason)),
            *_pointer_and_size(workspace),
            *_pointer_and_size(memory),
            ctypes.c_void_p(pinned.data_ptr()),
            ctypes.c_void_p(query_indptr.data_ptr()),
            ctypes.c_void_p(page_indptr.data_ptr()),
            *(ctypes.c_int64(size) for size in (*sizes, window_left, *others, kv_dtype_bytes)),
        )
        if not is_planned:
            raise PlanError(reason.value.decode())
        self.plans.append(
            Planned(
                PlanInfo(*numbers),
                memory.numpy().copy(),
                num_heads,
                head_dim_vo,
                num_heads // num_kv_heads,
                query_indptr.numpy().copy(),
                kv_lens.numpy().astype(np.int32),
                page_size,
                window_left,
            )
        )
        return list(numbers)


def _pointer_and_size(memory: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
