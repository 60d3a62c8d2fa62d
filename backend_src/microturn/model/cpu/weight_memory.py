"""Memory for weights, which live as long as the model: large blocks of huge pages, apart from what comes and goes.

On malloc's heap small arrays that stay keep the holes between them from the system: with 1.9 GB of weights 1.4 GB and
more were held so after a load. And a product reads its weight at the memory's speed only while the CPU finds the pages:
with pages of 4 KB products of one row took 1.12 to 1.15 times as long (Zen 3, one thread).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64

_lock = threading.Lock()
# What is left of the newest block. A block is unmapped with the last array in it.
_rest: NDArray[np.uint8] = np.empty(0, np.uint8)


def zeros(shape: Sequence[int]) -> NDArray[np.uint8]:
    """An array of zeros, uint8, that begins with a cache line."""
    global _rest
    num_bytes = math.prod(shape)
    num_taken = num_bytes + -num_bytes % _LINE_BYTES
    with _lock:
        if num_taken > len(_rest):
            _rest = _new_block(max(num_taken, _BLOCK_BYTES))
        taken, _rest = _rest[:num_bytes], _rest[num_taken:]
    return taken.reshape(shape)


def give_back() -> None:
    """Returns what the heap holds and nobody uses to the system."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _new_block(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that begin with a huge page; the system finds memory for a page when it is written."""
    block = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(block, np.uint8)
    first = -array.ctypes.data % _HUGE_PAGE_BYTES
    return array[first : first + num_bytes]
