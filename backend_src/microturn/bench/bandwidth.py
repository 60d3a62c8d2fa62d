"""Measures the memory bandwidth of this machine, with which decode steps are compared."""

from __future__ import annotations

import time

import torch

# Far beyond any cache of one socket.
_NUM_BYTES = 2**30
_NUM_PASSES = 8


def read_bandwidth() -> float:
    """Bytes per second at which torch's threads read fresh memory: the best of several passes of a sum."""
    values = torch.ones(_NUM_BYTES // 4)
    best_s = float("inf")
    for _ in range(_NUM_PASSES):
        started_s = time.perf_counter()
        values.sum()
        best_s = min(best_s, time.perf_counter() - started_s)
    return _NUM_BYTES / best_s
