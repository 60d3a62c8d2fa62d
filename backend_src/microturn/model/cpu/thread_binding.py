"""Binds the threads of forward passes to a CPU each, as OpenVINO and vLLM do.

They wait for each other some hundred times in a pass. The kernel likes to put a thread that wakes on the CPU of the one
that woke it: then the two take turns on one CPU, while another is idle, until the load is balanced some ms later. With
eight sessions whose tokens are streamed, 15 % of the time was lost so.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Set
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from microturn.model.cpu.kernel_cache import kernel

log = logging.getLogger(__name__)


def bind_threads() -> None:
    """Binds the calling thread, and those that its kernels are shared with, for good.

    Only where there is a thread for each CPU that this process may use: with fewer, nobody knows which CPUs others have
    taken. A thread that the calling one starts from now on inherits its CPU (see `offload.unbound_thread`).
    """
    cpus = os.sched_getaffinity(0)
    num_threads = numba.get_num_threads()
    if num_threads == 1 or num_threads != len(cpus):
        return
    thread_ids = np.empty(num_threads, np.int64)
    _write_thread_ids(thread_ids)
    places = {thread_id: {cpu} for cpu, thread_id in zip(sorted(cpus), thread_ids.tolist(), strict=True)}
    try:
        _place(places)
    except OSError as error:
        log.warning("threads are not bound to CPUs: %s", error)
        with contextlib.suppress(OSError):
            _place(dict.fromkeys(places, cpus))
    else:
        log.info("%d threads are bound to a CPU each", num_threads)


def _place(places: Mapping[int, Set[int]]) -> None:
    """Lets threads run on these CPUs alone."""
    for thread_id, cpus in places.items():
        os.sched_setaffinity(thread_id, cpus)


def _emit(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:  # noqa: ARG001  Numba's protocol
    of_libc = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), ()), "gettid")
    return builder.call(of_libc, ())


def _gettid(typing_context: Any) -> tuple[Any, Any]:  # noqa: ARG001  Numba's protocol
    """``gettid()`` is the kernel's number of the calling thread."""
    return types.int32(), _emit


gettid = intrinsic(_gettid)


@kernel(parallel=True)
def _write_thread_ids(thread_ids: NDArray[np.int64]) -> None:
    """Writes the id of each thread, the calling one's first."""
    for thread in numba.prange(thread_ids.shape[0]):
        thread_ids[thread] = gettid()
