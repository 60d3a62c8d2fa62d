"""A thread that is not bound to a CPU, whoever starts it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable


class UnboundThread(threading.Thread):
    """A daemon thread that may run wherever the process's main thread may.

    The engine thread may be bound to one CPU (see `model.cpu.thread_binding`), and what it starts would be, too.

    Args:
        target: what it runs.
        name: for people.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)

    def run(self) -> None:
        """See `threading.Thread.run`."""
        cpus = os.sched_getaffinity(os.getpid())
        if cpus != os.sched_getaffinity(0):
            with contextlib.suppress(OSError):  # it is slower where it is, but it works
                os.sched_setaffinity(0, cpus)
        super().run()
