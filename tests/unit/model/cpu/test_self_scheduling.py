"""Threads that take pieces of work from one counter."""

from __future__ import annotations

import numba
import numpy as np

from microturn.model.cpu.self_scheduling import take

NUM_PIECES = 100_000


@numba.njit(parallel=True)
def _take_all(num_threads: int, times: np.ndarray, of_threads: np.ndarray) -> None:
    taken = np.zeros(1, np.int64)
    for thread in numba.prange(num_threads):
        piece = take(taken)
        while piece < times.shape[0]:
            times[piece] += 1
            of_threads[thread] += 1
            piece = take(taken)


def test_each_piece_is_taken_once_however_many_threads_take() -> None:
    for num_threads in (1, 2, 5):
        times, of_threads = np.zeros(NUM_PIECES, np.int64), np.zeros(num_threads, np.int64)
        _take_all(num_threads, times, of_threads)
        assert (times == 1).all()
        assert of_threads.sum() == NUM_PIECES
