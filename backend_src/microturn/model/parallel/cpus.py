"""Which CPUs each rank has: neighbours in their numbers, so that the ranks of two sockets have one each."""

from __future__ import annotations

import os

from microturn.model.parallel.shards import span_of


def take_share(rank: int, size: int) -> None:
    """Lets the calling thread, and those that it starts, run on a rank's share of its CPUs, if there is one for each.

    Args:
        rank: whose share, of `size`.
    """
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) >= size:
        os.sched_setaffinity(0, {cpus[at] for at in span_of(len(cpus), rank, size)})
