"""Tests of weight_memory: arrays of zeros in blocks of their own, which go with the last of them."""

from __future__ import annotations

import gc
import mmap
import subprocess
import sys
from itertools import pairwise

import numpy as np
import psutil
import pytest

from microturn.model.cpu import weight_memory


def test_arrays_are_zeros_that_share_nothing_and_begin_with_a_cache_line() -> None:
    shapes = [(3, 5), (1,), (64,), (7, 11, 13), (1000, 1000)]
    arrays = [weight_memory.zeros(shape) for shape in shapes]
    assert [array.shape for array in arrays] == shapes
    assert all(array.dtype == np.uint8 and array.flags.c_contiguous and not array.any() for array in arrays)
    assert [array.ctypes.data % 64 for array in arrays] == [0] * 5
    for number, array in enumerate(arrays):
        array[:] = number + 1
    assert [set(np.unique(array)) for array in arrays] == [{number + 1} for number in range(5)]


def test_one_that_is_larger_than_a_block_has_its_own() -> None:
    array = weight_memory.zeros((80 << 20,))
    assert array.ctypes.data % (2 << 20) == 0
    assert array[-1] == 0


def test_memory_goes_with_the_arrays() -> None:
    process = psutil.Process()
    arrays = [weight_memory.zeros((20 << 20,)) for _ in range(12)]
    for array in arrays:
        array[:: mmap.PAGESIZE] = 1
    held = process.memory_info().rss
    del arrays, array
    gc.collect()
    # The newest block is kept for what comes.
    assert process.memory_info().rss < held - (150 << 20)


def test_a_load_holds_no_more_than_its_weights() -> None:
    """Small weights beside large arrays that come and go: on malloc's heap they took three times their size."""
    script = """
import numpy as np, psutil, torch
from microturn.model.cpu.int8_linear import Int8Linear
Int8Linear(torch.randn(2048, 1024), None)
before = psutil.Process().memory_info().rss
held = [Int8Linear(torch.randn(2048, 1024).bfloat16(), None) for _ in range(100)]
print((psutil.Process().memory_info().rss - before) / sum(linear.num_bytes for linear in held))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    assert float(done.stdout) < 1.3


@pytest.mark.parametrize(
    ("context", "least", "most"), [("nullcontext()", 30, 50), ("weight_memory.returned_at_once()", -5, 5)]
)
def test_copies_that_come_and_go_leave_no_holes(context: str, least: int, most: int) -> None:
    """Something small that stays lies behind each: on malloc's heap their memory is held by the process."""
    script = f"""
from contextlib import nullcontext
import numpy as np, psutil
from microturn.model.cpu import weight_memory

np.ones(30 << 17)  # from a large array malloc learns to have such ones on its heap
with {context}:
    before = psutil.Process().memory_info().rss
    pairs = [(np.ones(2 << 17), np.ones(512)) for _ in range(20)]
    kept = [small for _, small in pairs]
    del pairs
    print((psutil.Process().memory_info().rss - before) >> 20)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    assert least <= int(done.stdout) <= most


def test_arrays_of_one_block_lie_one_behind_another() -> None:
    addresses = [weight_memory.zeros((1 << 20,)).ctypes.data for _ in range(8)]
    assert sum(second - first == 1 << 20 for first, second in pairwise(addresses)) >= 6
