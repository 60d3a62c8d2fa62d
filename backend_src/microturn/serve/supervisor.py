"""Starts the server, watches it, restarts it, stops it.

One thread makes all decisions; it wakes on signals and twenty times a second. The health turns and the log have
their own threads and only report.
"""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from microturn.serve import console
from microturn.serve.errors import ServeError
from microturn.serve.health import Health, HealthService
from microturn.serve.health_turns import HealthTurns
from microturn.serve.options import ServeOptions
from microturn.serve.ports import local_endpoint
from microturn.serve.restarts import RestartBudget
from microturn.serve.server_log import ServerLog, says_why
from microturn.serve.server_tree import ServerTree
from microturn.serve.signal_inbox import SignalInbox

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
_TICK_S = 0.05
_PROGRESS_S = 10.0
# The share of the grace time for saving sessions; then the time for sending their last answers.
_SHARE_OF_SAVING = 0.8
_LAST_ANSWERS_S = 1.0
# How often a server that stops is asked whether it has turns, and how long one that has none may take to begin to
# unload its model. Triton looks once a second; it waits without end for what it believes to be open: the answer of a
# stream that broke (seen in one of some hundred), or one that is not read.
_ASK_EVERY_S = 0.5
_IDLE_S = 2.5

_NEXT_STEPS = """
Try in another terminal:
  {program} chat {grpc}
  {program} gateway --server {grpc}    a page to talk with, and OpenAI's APIs
  {program} health {health}
  curl http://{metrics}/metrics
Ctrl-C stops the server.
"""


class ServerFailed(Exception):
    """The server must be replaced.

    Args:
        reason: what happened, for the user.
        ready_for_s: how long it had been ready; 0 when it never was.
    """

    def __init__(self, reason: str, ready_for_s: float = 0.0) -> None:
        super().__init__(reason)
        self.ready_for_s = ready_for_s


class StopRequested(Exception):
    """SIGTERM or SIGINT has come."""


class Supervisor:
    """Keeps one server running, and handles the stop signals of this process from its creation on.

    Args:
        options: addresses and time limits.
        start_server: starts a new server.
        health: gets every change.
        log: the server's log.
        is_busy: whether the server has turns; True where that cannot be told.
        save_sessions: saves the server's sessions within so many seconds, and returns whether it did; None lets them
            end instead.
    """

    def __init__(
        self,
        options: ServeOptions,
        start_server: Callable[[], ServerTree],
        health: HealthService,
        log: ServerLog,
        is_busy: Callable[[], bool],
        save_sessions: Callable[[float], bool] | None = None,
    ) -> None:
        self._options = options
        self._start_server = start_server
        self._health = health
        self._log = log
        self._is_busy = is_busy
        self._save_sessions = save_sessions
        self._restarts = RestartBudget()
        self._signals = SignalInbox(_STOP_SIGNALS | {signal.SIGCHLD})
        self._was_ready = False

    def run(self) -> None:
        """Serves until a stop signal comes.

        Raises:
            ServeError: the server could not be started, or failed again and again.
        """
        try:
            while True:
                try:
                    self._serve_once()
                except ServerFailed as failure:
                    self._pause(self._delay_after(failure))
        except StopRequested:
            console.say("stopped")

    def _serve_once(self) -> None:
        """Runs one server until ServerFailed or StopRequested, one of which it always raises."""
        started_s = time.monotonic()
        server = self._start_server()
        address = local_endpoint(self._options.host, self._options.grpc_port)
        turns = HealthTurns(address, self._options.health_timeout_s)
        is_ready = False
        try:
            self._wait_until_ready(server, turns, started_s)
            is_ready = True
            self._announce(time.monotonic() - started_s)
            self._watch(server, turns)
        except StopRequested:
            self._health.drain()
            turns.close()  # Triton waits for open streams, theirs too
            if is_ready:
                self._stop(server)
            raise
        finally:
            self._health.set_health(Health.DOWN)
            server.kill()
            turns.close()

    def _wait_until_ready(self, server: ServerTree, turns: HealthTurns, started_s: float) -> None:
        next_progress_s = _PROGRESS_S
        while not turns.is_healthy:
            self._tick()
            elapsed_s = time.monotonic() - started_s
            if server.exit_code() is not None:
                raise ServerFailed(server.last_words())
            if turns.silent_for_s() > self._options.health_timeout_s:
                raise ServerFailed(f"the model does not answer: {turns.trouble}")
            if elapsed_s > self._options.start_timeout_s:
                raise ServerFailed(f"not ready after {elapsed_s:.0f} s (--start-timeout-s)")
            if elapsed_s > next_progress_s:
                console.say(f"still starting after {elapsed_s:.0f} s")
                next_progress_s += _PROGRESS_S
        server.watch_model_processes()

    def _announce(self, start_s: float) -> None:
        self._log.show_server_lines(True)
        self._health.set_health(Health.OPEN)
        endpoints = {
            name.removeprefix("--").removesuffix("-port"): local_endpoint(self._options.host, port)
            for name, port in self._options.ports().items()
        }
        where = ", ".join(f"{name} {endpoint}" for name, endpoint in endpoints.items())
        console.announce(f"ready in {start_s:.1f} s: {where}")
        if not self._was_ready:
            console.suggest(_NEXT_STEPS.format(program=_program(), **endpoints))
        self._was_ready = True

    def _watch(self, server: ServerTree, turns: HealthTurns) -> None:
        ready_s = time.monotonic()
        while True:
            self._tick()
            failure = self._failure_of(server, turns)
            if failure is not None:
                raise ServerFailed(failure, ready_for_s=time.monotonic() - ready_s)
            self._health.set_health(turns.health)

    def _failure_of(self, server: ServerTree, turns: HealthTurns) -> str | None:
        if server.exit_code() is not None:
            return f"Triton ended with code {server.exit_code()}"
        dead = server.dead_model_process()
        if dead is not None:
            return f"the model process {dead} died"
        if turns.silent_for_s() > self._options.health_timeout_s:
            return f"no health turn was answered for {turns.silent_for_s():.0f} s ({turns.trouble})"
        return None

    def _delay_after(self, failure: ServerFailed) -> float:
        # An error message at the first start would come again.
        if not self._was_ready and says_why(str(failure)):
            raise ServeError(f"Triton did not start: {failure}") from failure
        delay_s = self._restarts.next_delay_s(failure.ready_for_s)
        if delay_s is None:
            num_failures = self._restarts.num_quick_failures
            raise ServeError(f"gave up after {num_failures} failures in a row, the last: {failure}") from failure
        console.say(f"{failure}; restarting" + (f" in {delay_s:g} s" if delay_s else ""))
        return delay_s

    def _stop(self, server: ServerTree) -> None:
        """Saves live sessions, or gives their turns the grace time to end. A second signal cuts it short."""
        console.say(f"stopping, for at most {self._options.grace_s:g} s")
        self._log.show_server_lines(False)
        deadline_s = time.monotonic() + self._options.grace_s
        try:
            # A session that moves before its proxy notices would be sent back here.
            self._pause(min(self._options.drain_notice_s, self._options.grace_s / 2))
            is_saved = self._save_sessions is not None and self._wait_for_saving(self._save_sessions, deadline_s)
            if is_saved:
                # The sessions are saved, and their clients reconnect only when their streams have ended. Triton takes
                # longer, even without clients: unloading the model alone takes two seconds.
                deadline_s = min(deadline_s, time.monotonic() + _LAST_ANSWERS_S)
            server.ask_to_stop()
            asked_s = busy_s = time.monotonic()
            while server.exit_code() is None:
                # By itself Triton takes most of a second more, in which it writes traces if its options ask for them.
                if not self._options.triton_args and server.is_done(self._options.grpc_port):
                    return
                if time.monotonic() > asked_s + _ASK_EVERY_S:
                    asked_s = time.monotonic()
                    busy_s = asked_s if self._is_busy() else busy_s
                    if asked_s > busy_s + _IDLE_S:
                        return
                if time.monotonic() > deadline_s:
                    if not is_saved:
                        console.say("the grace time is over, and streams may still be open: ending them")
                    return
                self._tick()
        except StopRequested:
            return

    def _wait_for_saving(self, save_sessions: Callable[[float], bool], deadline_s: float) -> bool:
        saved: list[bool] = []
        timeout_s = _SHARE_OF_SAVING * (deadline_s - time.monotonic())
        saving = threading.Thread(target=lambda: saved.append(save_sessions(timeout_s)), daemon=True)
        saving.start()
        while saving.is_alive():
            self._tick()
        return saved == [True]

    def _pause(self, duration_s: float) -> None:
        deadline_s = time.monotonic() + duration_s
        while time.monotonic() < deadline_s:
            self._tick()

    def _tick(self) -> None:
        if self._signals.wait(_TICK_S) & _STOP_SIGNALS:
            raise StopRequested


def _program() -> str:
    """How a user calls ``microturn`` from here: by its path where it is not on PATH, as with ``make serve``."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "microturn" and shutil.which("microturn") is None else "microturn"
