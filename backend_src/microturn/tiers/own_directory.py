"""A directory that one process has to itself for as long as it lives, beside those of other processes.

    <parent>/microturn-kv-<random>/     its owner holds a lock on it; who gets the lock knows that the owner is dead

A lock, since it goes with the process however that ends; process ids repeat, and containers that share a volume do not
see each other's.
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
    """A new, empty directory; those of dead processes beside it are removed.

    Attributes:
        path: where it is.

    Args:
        parent: where to make it; made too if need be.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        # Between making a directory and locking it, nobody may take it for that of a dead process.
        with _locked(parent):
            _remove_dead(parent)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _open(self.path)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Removes it with all that is in it; once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove_dead(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            lock = _open(path)
        except OSError:
            continue  # somebody else's, or no directory
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            log.info("removing %s: the process that it belonged to is dead", path)
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
