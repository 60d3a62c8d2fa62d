"""A tree of processes: a parent adopts orphans, a child dies with its parent, and all descendants are killed.

Linux only, as Triton is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NAME_LEN = 15  # all that the kernel keeps of a name


def become_subreaper() -> None:
    """Makes orphaned descendants children of this process instead of init's, so that it can kill them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when the thread that forked it ends; ends it at once if that has happened.

    Args:
        parent_pid: of the process that started this one.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def is_alive(process: psutil.Process) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def find_descendants(pid: int, name: str) -> list[psutil.Process]:
    """The descendants of a process that run the program ``name``."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name()[:_NAME_LEN] == name[:_NAME_LEN]:
                    found.append(process)
    return found


def kill_descendants(timeout_s: float = 5.0) -> bool:
    """Kills and reaps every descendant of this process, also those that appear meanwhile.

    Only a subreaper sees them all.

    Returns:
        False when some were still there after ``timeout_s``.
    """
    deadline_s = time.monotonic() + timeout_s
    while descendants := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline_s:
            return False
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(descendants, timeout=0.5)
    return True


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
