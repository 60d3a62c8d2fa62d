"""The threads of passes are bound to a CPU each; in processes of their own, since that is for good."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

NUM_CPUS = len(os.sched_getaffinity(0))
# A thread binds itself and those that it computes with, computes, and starts others; where each of all threads may run.
PROGRAM = """
import os, sys, threading
import numpy as np
from microturn.model.cpu import attention, thread_binding
from microturn.offload.unbound_thread import UnboundThread

def live():
    attention.set_num_threads(int(sys.argv[1]))
    thread_binding.bind_threads()
    computing = np.empty(int(sys.argv[1]), np.int64)
    thread_binding._write_thread_ids(computing)
    here = [os.sched_getaffinity(0)]
    computing = [os.sched_getaffinity(int(number)) for number in computing]
    for started in (
        threading.Thread(target=lambda: here.append(os.sched_getaffinity(0))),
        UnboundThread(lambda: here.append(os.sched_getaffinity(0)), "unbound"),
    ):
        started.start()
        started.join()
    print([computing, *here])

engine = threading.Thread(target=live)
engine.start()
engine.join()
"""


def cpus_of(num_threads: int) -> list[list[set[int]] | set[int]]:
    """Where so many threads that compute may run, and the others."""
    command = [sys.executable, "-c", PROGRAM, str(num_threads)]
    environment = os.environ | {"NUMBA_NUM_THREADS": str(num_threads)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    return ast.literal_eval(done.stdout)


@pytest.mark.skipif(NUM_CPUS == 1, reason="there is one CPU")
def test_a_thread_for_each_cpu_is_bound_to_it_and_what_it_starts_need_not_be() -> None:
    every = os.sched_getaffinity(0)
    computing, calling, inheriting, unbound = cpus_of(NUM_CPUS)
    assert computing == [{cpu} for cpu in sorted(every)]
    assert calling == inheriting == {min(every)}
    assert unbound == every


@pytest.mark.parametrize("num_threads", [NUM_CPUS - 1, NUM_CPUS + 1])
def test_fewer_or_more_threads_than_cpus_are_not_bound(num_threads: int) -> None:
    if num_threads == 0:
        pytest.skip("there is one CPU")
    every = os.sched_getaffinity(0)
    computing, *others = cpus_of(num_threads)
    assert computing == [every] * num_threads
    assert others == [every] * 3
