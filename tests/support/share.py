"""This process's share of the machine, beside pytest-xdist's other workers, and servers that keep to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

from microturn.serve.child import RunningServer, started_server

# Settings of a server that answers as plain transformers do.
IN_FLOAT32 = ("weights=float32", "kv_dtype=float32")


def num_threads() -> int:
    """How many threads compute: where more do than there are processors, each waits for the others at every barrier."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def model_server(model: str, *settings: str, arguments: Sequence[str] = ()) -> AbstractContextManager[RunningServer]:
    """`started_server`, with this process's share of the processors."""
    return started_server(model, f"num_threads={num_threads()}", *settings, arguments=arguments)
