"""The memory that this process may still take: what its machine has free, or less where its cgroup has a limit.

A container's limit is that of a cgroup. The kernel ends a process of it that takes more, however much the machine has.
"""

from __future__ import annotations

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
    return max(0, min([psutil.virtual_memory().available, *_left_in_cgroups()]))


def _left_in_cgroups() -> Iterator[int]:
    """Bytes that are left in each cgroup with a limit: this process's own, and those that it is part of."""
    if not _OWN_CGROUPS.exists():  # no Linux
        return
    for line in _OWN_CGROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounted, names = _MOUNTED, _V2
        elif "memory" in controllers.split(","):
            mounted, names = _MOUNTED / "memory", _V1
        else:
            continue
        parts = [part for part in path.split("/") if part]
        # A container may be told its path on the node, of which it sees only the last cgroup, as the root.
        for depth in range(len(parts), -1, -1):
            left = _left_in(mounted.joinpath(*parts[:depth]), names)
            if left is not None:
                yield left


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
