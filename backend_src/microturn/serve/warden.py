"""The process between supervisor and server, so that no process outlives the supervisor, even when that is killed.

    python -m microturn.serve.warden RUN_DIRECTORY COMMAND…

Orders arrive on stdin: ``stop`` sends SIGTERM to the server, ``kill`` kills all processes below. End of file without
``kill`` means that the supervisor is dead: all processes are killed, and the run's files are removed. When the warden
itself dies, the kernel kills the server.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from microturn.serve.process_tree import become_subreaper, die_with_parent, kill_descendants
from microturn.serve.run_directory import RunDirectory

_POLL_S = 0.1
_IGNORED = (signal.SIGTERM, signal.SIGINT)


STOP, KILL = b"stop\n", b"kill\n"


def main(run_path: Path, command: list[str]) -> int:
    """Runs the server to its end.

    Args:
        run_path: the run directory.
        command: the server's command line.

    Returns:
        The server's exit code, with 128 + the signal for a killed one.
    """
    become_subreaper()
    # A service manager signals every process of a service at once; stopping is the supervisor's decision.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=partial(_become_server, os.getpid()))
    is_orphan = _follow_orders(server)
    server.kill()
    server.wait()
    kill_descendants()
    if is_orphan:
        RunDirectory(run_path).remove()
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _become_server(warden_pid: int) -> None:
    die_with_parent(warden_pid)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)


def _follow_orders(server: subprocess.Popen[bytes]) -> bool:
    """Waits until the server has ended or must be killed. Returns whether the supervisor is dead."""
    orders = sys.stdin.fileno()
    while server.poll() is None:
        if select.select([orders], [], [], _POLL_S)[0]:
            order = os.read(orders, 64)
            if not order:
                return True
            if KILL in order:
                return False
            server.terminate()
    return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
