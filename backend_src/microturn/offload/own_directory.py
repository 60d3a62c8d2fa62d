"""A directory that belongs to one process while it lives, next to those of other processes.

    <parent>/microturn-kv-<random>/     its owner holds a lock on it; if the lock is free, the owner is dead

A lock, since the system releases it however the process ends; process ids repeat, and containers that share a volume do
not see each other's.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_PREFIX = "microturn-kv-"


class OwnDirectory:
    """A new, empty directory; directories of dead processes next to it are removed.

    Attributes:
        path: of the directory.

    Args:
        parent: where to create it; created if missing. It may be a link: who starts the server names it. Links in it
            are not followed, since others may write there.

    Raises:
        OSError: it cannot be created.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        parent = parent.resolve()
        # Between creation and locking another process must not take it for a dead process's directory.
        with _locked(parent):
            _remove_dead(parent)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _open(self.path)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes the directory with its content; called once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_dead(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            lock = _open(path)
        except OSError:
            continue  # owned by another user, or not a directory
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            log.info("removing %s: its process is dead", path)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = _open(directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
