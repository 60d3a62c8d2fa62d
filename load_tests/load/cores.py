"""How many cores were busy during a run, and for whom."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from load_tests.bench.bystanders import bystanders


@dataclass
class Cores:
    """Cores, in the mean over a block; set at its end.

    Attributes:
        server: that the server's processes used, as far as they were alive at both ends.
        others_share: of the machine that others used: neither this program nor a child of it.
        num: that the machine has.
    """

    server: float = 0.0
    others_share: float = 0.0
    num: int = 1


@contextmanager
def cores_busy(server_pid: int) -> Iterator[Cores]:
    """Watches for the duration of a block."""
    cores = Cores(num=psutil.cpu_count() or 1)
    began_s, before_s = time.perf_counter(), _used_s(server_pid)
    with bystanders() as seen:
        yield cores
    after_s, elapsed_s = _used_s(server_pid), time.perf_counter() - began_s
    cores.server = round(sum(after_s[pid] - before_s.get(pid, 0.0) for pid in after_s) / elapsed_s, 2)
    cores.others_share = round(seen.share, 3)


def _used_s(pid: int) -> dict[int, float]:
    """Seconds of processor that a process and its descendants have used, by pid; nothing once it is gone."""
    used = {}
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            used[process.pid] = sum(process.cpu_times()[:2])
    except psutil.NoSuchProcess:
        pass
    return used
