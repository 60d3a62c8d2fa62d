"""Who else used the processor while something was measured: a result from a busy machine must say so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

# More than this, and the numbers say as much about others as about what was measured.
DISTURBING_SHARE = 0.05


@dataclass
class Bystanders:
    """What others used.

    Attributes:
        share: of all cores, over the time of the block; set at its end. Time that a hypervisor gave to somebody else
            counts too.
    """

    share: float = 0.0


@contextmanager
def bystanders() -> Iterator[Bystanders]:
    """Watches for the duration of a block; this process and its descendants do not count."""
    seen = Bystanders()
    started_s, all_s, own_s = time.perf_counter(), _all_s(), _own_s()
    yield seen
    core_s = (time.perf_counter() - started_s) * (psutil.cpu_count() or 1)
    seen.share = max(0.0, (_all_s() - all_s) - (_own_s() - own_s)) / core_s


def warning(share: float) -> str:
    """A line for whoever reads a result, empty when the machine was quiet."""
    return f"others used {share:.0%} of the processor meanwhile" if share > DISTURBING_SHARE else ""


def _all_s() -> float:
    """Seconds in which a core was not idle."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own_s() -> float:
    """Seconds that this process and its living descendants have used, with those of children that have ended."""
    process = psutil.Process()
    total_s = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            total_s += sum(member.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total_s
