"""What one run of ``serve`` has on the machine, and its removal.

    <tmp>/microturn-<id>/           the run directory: model repository, links for the server
    /dev/shm/microturn-<id>-*       Triton's shared memory, by its prefix
    /dev/shm/microturn-<id>.lock    locked while a process of the run lives; holds the run directory's path

The lock, not a process id, proves that a run is dead: ids repeat, and containers that share /dev/shm do not see each
other's processes. It is in /dev/shm because it must outlive a container, as the shared memory does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil

from microturn.serve.errors import ServeError

SHARED_MEMORY = Path("/dev/shm")
_NAME = "microturn-"


class RunDirectory:
    """One run's directory and its share of /dev/shm.

    Args:
        path: the run directory, as ``create`` made it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shm_prefix = f"{path.name}-"
        self._lock_path = SHARED_MEMORY / f"{path.name}.lock"

    @classmethod
    @contextlib.contextmanager
    def create(cls, parent: Path | None) -> Iterator[tuple[Self, int]]:
        """Makes a run directory, and removes everything of the run afterwards.

        Args:
            parent: where to make it; None is the system's temporary directory.

        Yields:
            the run directory and the lock's file descriptor, which the warden inherits.

        Raises:
            ServeError: it cannot be written.
        """
        parent = (parent or Path(tempfile.gettempdir())).absolute()
        run = cls(parent / f"{_NAME}{secrets.token_hex(8)}")
        try:
            lock = run._lock()
            parent.mkdir(parents=True, exist_ok=True)
            run.path.mkdir(mode=0o700)
        except OSError as error:
            run.remove()
            raise ServeError(f"cannot make a run directory: {error.strerror}: {error.filename}") from error
        try:
            yield run, lock
        finally:
            run.remove()
            os.close(lock)

    def remove(self) -> None:
        """Removes the run directory, the shared memory and the lock; the lock last, so that a later start can retry."""
        self.remove_shared_memory()
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)

    def remove_shared_memory(self) -> None:
        """Removes what a killed Triton left in /dev/shm."""
        for file in SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
            file.unlink(missing_ok=True)

    def kill_model_processes(self, timeout_s: float = 5.0) -> None:
        """Kills what a killed Triton left running.

        Its Python backend's process notices the death, but when a request was in work its main thread waits for the
        server for ever and holds the GIL, which the thread that would end the process needs.
        """
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # gone meanwhile, or not to be seen
                if any(argument.startswith(self.shm_prefix) for argument in process.cmdline()):
                    process.kill()
                    found.append(process)
        psutil.wait_procs(found, timeout_s)

    def _lock(self) -> int:
        # Locked under another name first, so that it is never seen unlocked under its own.
        hidden = SHARED_MEMORY / f".{self._lock_path.name}"
        descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, os.fsencode(self.path))
        hidden.rename(self._lock_path)
        return descriptor


def living_runs() -> list[Path]:
    """The run directories of this user's live runs."""
    return [path for lock_path in SHARED_MEMORY.glob(f"{_NAME}*.lock") if (path := _run_of(lock_path, is_alive=True))]


def remove_leftovers() -> list[str]:
    """Removes the files and model processes of this user's runs that were killed together with their warden.

    Returns:
        The names of the runs that were removed.
    """
    removed = []
    for lock_path in SHARED_MEMORY.glob(f"{_NAME}*.lock"):
        path = _run_of(lock_path, is_alive=False)
        if path is not None:
            run = RunDirectory(path)
            run.kill_model_processes()
            run.remove()
            removed.append(path.name)
    return removed


def _run_of(lock_path: Path, *, is_alive: bool) -> Path | None:
    """The run directory of this user's lock, where the lock is held just if ``is_alive``; else None."""
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None  # gone meanwhile, or another user's
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            return None
        if _is_held(descriptor) != is_alive:
            return None
        path = Path(os.fsdecode(os.read(descriptor, 4096)))
        # Whatever is written in it, a lock stands for its own run only.
        return path if path.is_absolute() and path.name == lock_path.stem else None
    finally:
        os.close(descriptor)


def _is_held(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
