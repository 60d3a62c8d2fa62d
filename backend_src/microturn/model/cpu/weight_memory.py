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
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64

# Parameters of mallopt, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

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


@contextlib.contextmanager
def returned_at_once() -> Iterator[None]:
    """Within, what is large is mapped for itself where the heap has no room, and goes back to the system when freed.

    A load makes and frees copies of weights. On malloc's heap each is followed by something small that stays: the load
    of a file in bfloat16 held twice what it served, and 1.2 times so (`make bench-load-memory`).
    At the end what the heap holds unused goes back too.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # another C library than glibc
        yield
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        # What malloc comes to at most by itself, and no longer does after a mallopt: a pass's arrays stay on the heap.
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        libc.malloc_trim(0)


def _new_block(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros that begin with a huge page; the system finds memory for a page when it is written."""
    block = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(block, np.uint8)
    first = -array.ctypes.data % _HUGE_PAGE_BYTES
    return array[first : first + num_bytes]
