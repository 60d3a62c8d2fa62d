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
        piece = take(taken, 0)
        while piece < times.shape[0]:
            times[piece] += 1
            of_threads[thread] += 1
            piece = take(taken, 0)


def test_each_piece_is_taken_once_however_many_threads_take() -> None:
    for num_threads in (1, 2, 5):
        times, of_threads = np.zeros(NUM_PIECES, np.int64), np.zeros(num_threads, np.int64)
        _take_all(num_threads, times, of_threads)
        assert (times == 1).all()
        assert of_threads.sum() == NUM_PIECES


@numba.njit(parallel=True)
def _sum_of_last(num_threads: int, written: np.ndarray, sums: np.ndarray) -> None:
    taken, ended = np.zeros(1, np.int64), np.zeros(written.shape[0], np.int64)
    for _ in numba.prange(num_threads):
        piece = take(taken, 0)
        while piece < written.size:
            group, part = piece // written.shape[1], piece % written.shape[1]
            written[group, part] = part
            if take(ended, group) == written.shape[1] - 1:
                sums[group] = written[group].sum()
            piece = take(taken, 0)


def test_who_ends_the_last_piece_sees_what_all_others_wrote() -> None:
    written, sums = np.full((NUM_PIECES // 5, 5), -1), np.zeros(NUM_PIECES // 5, np.int64)
    _sum_of_last(5, written, sums)
    assert (sums == 10).all()
