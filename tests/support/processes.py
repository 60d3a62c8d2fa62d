"""Servers' processes: which they are, killing them, and waiting for those to end that are not our children."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable

import psutil

from microturn.serve.process_tree import find_descendants, is_alive
from microturn.serve.triton_server import STUB_NAME


def alive_after(processes: Collection[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits for processes to end; returns those that did not.

    A zombie has ended: who reaps an orphan is up to the machine, and some never do.
    """
    deadline_s = time.monotonic() + timeout_s
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return alive


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kills processes, of which some may end with the ones that were killed before them."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def model_process_ids() -> set[int]:
    """The model processes of all servers that this process has started."""
    return {process.pid for process in find_descendants(os.getpid(), STUB_NAME)}


def model_process_of(address: str) -> psutil.Process:
    """The model process of the server with this gRPC address, which this process has started."""
    port = address.rpartition(":")[2]
    servers = find_descendants(os.getpid(), "tritonserver")
    (triton,) = [process for process in servers if f"--grpc-port={port}" in process.cmdline()]
    (model,) = find_descendants(triton.pid, STUB_NAME)
    return model
