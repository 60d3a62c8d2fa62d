"""The memory and the CPUs that this process may take: what its machine has, or less where its cgroups have limits.

A container's limits are those of a cgroup. The kernel ends a process of it that takes more memory, however much the
machine has, and stops all of its threads for a part of each tenth of a second once they have used up their CPU time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_MOUNTED = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


class _Names(NamedTuple):
    """Files of a cgroup, and the entry of `memory.stat` with the page cache that is not in use."""

    limit: str
    usage: str
    inactive_file: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def free_memory() -> int:
    """Bytes that this process may still take without swapping; 0 where its cgroup is full."""
    left = (_left_in(cgroup, _V2 if is_v2 else _V1) for cgroup, is_v2 in _cgroups("memory"))
    return max(0, min([psutil.virtual_memory().available, *(one for one in left if one is not None)]))


def num_cpus() -> int:
    """CPUs that this process may keep busy all the time, 1 at least: a part of one would stop the threads of all."""
    quotas = (_quota_of(cgroup, is_v2=is_v2) for cgroup, is_v2 in _cgroups("cpu"))
    whole = (int(quota) for quota in quotas if quota is not None)
    return max(1, min([len(os.sched_getaffinity(0)), *whole]))


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """The cgroups of a controller: this process's own, and those that it is part of; whether each is of version 2."""
    if not _OWN_CGROUPS.exists():  # no Linux
        return
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounted = _MOUNTED / controller if controllers else _MOUNTED
        parts = [part for part in path.split("/") if part]
        # A container may be told its path on the node, of which it sees only the last cgroup, as the root.
        for depth in range(len(parts), -1, -1):
            yield mounted.joinpath(*parts[:depth]), not controllers


def _left_in(cgroup: Path, names: _Names) -> int | None:
    """Bytes that are left in a cgroup; None if it has no limit, or is not to be seen from here."""
    try:
        limit = (cgroup / names.limit).read_text().strip()
        usage = int((cgroup / names.usage).read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    # The kernel takes unused page cache back before it ends anybody: Kubernetes leaves it out of the working set too.
    return int(limit) - usage + int(stat.get(names.inactive_file, 0))


def _quota_of(cgroup: Path, *, is_v2: bool) -> float | None:
    """CPUs' worth of time that a cgroup has; None if it has no limit, or is not to be seen from here."""
    try:
        if is_v2:
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = ((cgroup / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except OSError:
        return None
    return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)
