"""An engine on its own thread, over a `FakeRunner` or a model, and the real clock."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from microturn.sessions.inputs import TokenInput
from microturn.sessions.options import parse_parameters
from microturn.sessions.turn import SessionId, Turn, TurnRequest
from support.driver import Driver, Recorder
from support.fake_runner import FakeDriver

THREAD_NAME = "microturn-engine"


class Answer(Recorder):
    """A sink to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()
        self.ended = threading.Event()

    def put(self, output: Any) -> None:
        super().put(output)
        self.begun.set()
        if self.is_done:
            self.ended.set()

    def fail(self, error: Any) -> None:
        super().fail(error)
        self.ended.set()

    def wait(self) -> Answer:
        """Waits for the end of the turn."""
        assert self.ended.wait(10)
        return self


class Threaded(Driver):
    """An engine that runs by itself; `begin` starts its thread."""

    def begin(self) -> None:
        threading.Thread(target=self.engine.run, name=THREAD_NAME, daemon=True).start()

    def cancel_all(self, session_id: SessionId) -> None:
        """The client of a session's turns goes."""
        turns = self.engine.call(lambda sessions: sessions._sessions.find(session_id).open_turns)
        for turn in turns:
            self.engine.cancel(turn)
        self.engine.call(lambda _: None)

    def ask(
        self, session_id: SessionId, given: list[int], *, start: bool = False, end: bool = False, **values: Any
    ) -> Answer:
        """Posts a turn without waiting for it."""
        answer = Answer()
        options, session_options = parse_parameters(json.dumps(values), start=start)
        self.engine.submit(
            Turn(
                TurnRequest(
                    session_id,
                    TokenInput(given),
                    answer,
                    self.clock(),
                    start=start,
                    end=end,
                    options=options,
                    session_options=session_options,
                )
            )
        )
        return answer


class ThreadedDriver(Threaded, FakeDriver):
    """One over a `FakeRunner`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(clock=time.monotonic, **kwargs)


@contextmanager
def starting_engines(make: Callable[..., Threaded] = ThreadedDriver) -> Iterator[Callable[..., Any]]:
    """Gives what starts engines, and stops them all at the end."""
    drivers: list[Threaded] = []

    def start(**kwargs: Any) -> Threaded:
        drivers.append(make(**kwargs))
        drivers[-1].begin()
        return drivers[-1]

    try:
        yield start
    finally:
        for driver in drivers:
            driver.engine.stop()


def engine_threads() -> list[threading.Thread]:
    """The threads of engines that run."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]
