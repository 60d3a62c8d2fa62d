"""Which CPUs each rank has: those of one socket, and both threads of a core, as far as that can be."""

from __future__ import annotations

import os
from pathlib import Path

from microturn.model.parallel.shards import span_of

_TOPOLOGY = Path("/sys/devices/system/cpu")


def take_share(rank: int, size: int) -> None:
    """Lets the calling thread, and those that it starts, run on a rank's share of its CPUs, if there is one for each.

    Args:
        rank: whose share, of `size`.
    """
    cpus = neighbours(os.sched_getaffinity(0))
    if len(cpus) >= size:
        os.sched_setaffinity(0, {cpus[at] for at in span_of(len(cpus), rank, size)})


def neighbours(cpus: set[int], topology: Path = _TOPOLOGY) -> list[int]:
    """CPUs in the order of sockets, then of cores: their numbers go around all sockets before a core's second thread.

    Args:
        cpus: their numbers.
        topology: the directory in which the kernel says where they are; what it does not say counts as 0.
    """

    def place(cpu: int) -> tuple[int, int, int]:
        at = topology / f"cpu{cpu}" / "topology"
        return _number_in(at / "physical_package_id"), _number_in(at / "core_id"), cpu

    return sorted(cpus, key=place)


def _number_in(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0
