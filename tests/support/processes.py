"""Waiting for processes that are not our children to end."""

from __future__ import annotations

import time
from collections.abc import Collection

import psutil

from microturn.process_tree import is_alive


def alive_after(processes: Collection[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Waits for processes to end; returns those that did not.

    A zombie has ended: who reaps an orphan is up to the machine, and some never do.
    """
    deadline_s = time.monotonic() + timeout_s
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return alive


def model_process_ids() -> set[int]:
    """The model processes of all servers that this process has started."""
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if child.name().startswith("triton_python_b")}
