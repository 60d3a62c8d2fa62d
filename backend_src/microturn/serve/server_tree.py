"""One running server and its processes, as the supervisor starts and ends them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil

from microturn.serve import warden
from microturn.serve.process_tree import find_descendants, is_alive, kill_descendants
from microturn.serve.run_directory import RunDirectory
from microturn.serve.server_log import ServerLog
from microturn.serve.triton_server import STUB_NAME

_WARDEN_TIMEOUT_S = 5.0


class ServerTree:
    """Starts a warden, which starts the server.

    Args:
        command: the server's command line.
        environment: the server's environment.
        run: cleaned up by the warden when this process is killed.
        lock: the run's lock, which the warden inherits.
        log: reads the server's output.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], run: RunDirectory, lock: int, log: ServerLog
    ) -> None:
        self._run = run
        self._log = log
        self._warden = subprocess.Popen(
            [sys.executable, "-m", "microturn.serve.warden", str(run.path), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor only
        )
        assert self._warden.stdin is not None
        assert self._warden.stdout is not None
        self._orders = self._warden.stdin
        self._reader = log.follow(self._warden.stdout)
        self._model_processes: list[psutil.Process] = []
        self._triton_processes: list[psutil.Process | None] = []

    def exit_code(self) -> int | None:
        """The server's exit code, with 128 + the signal for a killed one; None while it runs."""
        return self._warden.poll()

    def last_words(self) -> str:
        """Why the server has ended, from its log."""
        self._reader.join(_WARDEN_TIMEOUT_S)
        return self._log.failure() or f"it ended with code {self.exit_code()}"

    def watch_model_processes(self) -> None:
        """Records the model processes; to be called when the model is ready."""
        self._model_processes = find_descendants(self._warden.pid, STUB_NAME)
        self._triton_processes = [process.parent() for process in self._model_processes]

    def dead_model_process(self) -> int | None:
        """The id of a recorded model process that has died, or None; Triton does not restart it.

        One that died with its Triton does not count: the warden is about to tell how that ended.
        """
        for process, triton in zip(self._model_processes, self._triton_processes, strict=True):
            if not is_alive(process) and triton is not None and is_alive(triton):
                return process.pid
        return None

    def is_done(self, port: int) -> bool:
        """Whether a server that stops has unloaded its models, and nobody is seen to be connected to this port."""
        if not self._model_processes or any(map(is_alive, self._model_processes)):
            return False
        try:
            connections = [of for triton in self._triton_processes if triton for of in triton.net_connections("tcp")]
        except psutil.NoSuchProcess:  # it has just ended
            return True
        except psutil.AccessDenied:
            return False
        return not any(of.laddr.port == port and of.status == psutil.CONN_ESTABLISHED for of in connections)

    def ask_to_stop(self) -> None:
        """Sends SIGTERM to the server through the warden; the server then lets live sessions end."""
        self._order(warden.STOP)

    def kill(self) -> None:
        """Kills and reaps all processes at once, and removes their shared memory."""
        self._order(warden.KILL)
        self._orders.close()
        try:
            self._warden.wait(_WARDEN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.wait()
        kill_descendants()  # nothing, unless the warden was killed
        self._reader.join(_WARDEN_TIMEOUT_S)
        self._run.remove_shared_memory()

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the warden has just ended by itself
            os.write(self._orders.fileno(), order)
