"""`microturn bench trace`: some seconds of steps on a beat, as a file that Perfetto shows (ui.perfetto.dev).

An engine in this process; sessions take turns of 4 tokens in and 4 out every 200 ms, their phases spread. The file is
Chrome's Trace Event Format: steps and their parts, arrivals of turns, garbage collections, and behind each step how
many page faults and preemptions by the kernel there have been. What makes a step late shows beside it.
"""

from __future__ import annotations

import gc
import heapq
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from microturn.bench.grown_sessions import GrownSessions, MustSucceed

_BEAT_S = 0.2
_NUM_INPUT, _NUM_OUTPUT = 4, 4

Event = dict[str, Any]


class Trace:
    """Events on one timeline, in the order in which they ended; times are in microseconds.

    Attributes:
        events: in Chrome's Trace Event Format.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._started_s = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records how long the block takes."""
        begun_us = self._now_us()
        try:
            yield
        finally:
            self._add(name, "X", begun_us, dur=self._now_us() - begun_us)

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Records every call of an object's method from now on."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(name):
                return call(*args, **kwargs)

        setattr(owner, method, timed)

    def mark(self, name: str) -> None:
        """Records a moment."""
        self._add(name, "i", self._now_us(), s="t")

    def count(self, name: str, value: int) -> None:
        """Records a number that changes."""
        self._add(name, "C", self._now_us(), args={name: value})

    def write(self, path: Path) -> None:
        """Writes the file.

        Raises:
            OSError: it cannot be written.
        """
        path.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}))

    def _now_us(self) -> float:
        return (time.perf_counter() - self._started_s) * 1e6

    def _add(self, name: str, phase: str, at_us: float, **more: Any) -> None:
        self.events.append({"name": name, "ph": phase, "ts": at_us, "pid": 1, "tid": 1, **more})


def trace_beat(sessions: GrownSessions, num_sessions: int, context_len: int, duration_s: float) -> Trace:
    """Runs a beat, and records it.

    Args:
        sessions: of an engine that nothing else steps; it is this benchmark's for good.
        num_sessions: sessions on the beat.
        context_len: tokens of each, to which every turn goes back.
        duration_s: of the recording, in seconds. A beat before it is not recorded.
    """
    numbers = range(1, num_sessions + 1)
    sessions.grow(numbers, context_len)
    engine = sessions.engine
    _run(sessions, _due(numbers), _BEAT_S, Trace())  # what is done once is done
    trace = Trace()
    trace.wrap(engine, "step", "step")
    trace.wrap(engine.steps, "launch", "launch")
    trace.wrap(engine.steps, "process_result", "commit")
    trace.wrap(engine.steps.runner, "run", "forward pass")
    collections: list[Any] = []

    def watch_garbage(phase: str, _: Any) -> None:
        if phase == "start":
            collections.append(trace.span("garbage collection"))
            collections[-1].__enter__()
        else:
            collections.pop().__exit__(None, None, None)

    gc.callbacks.append(watch_garbage)
    try:
        _run(sessions, _due(numbers), duration_s, trace)
    finally:
        gc.callbacks.remove(watch_garbage)
    return trace


def step_ms(trace: Trace) -> list[float]:
    """Milliseconds of the steps in which the model ran, in their order."""
    passes = [event["ts"] for event in trace.events if event["name"] == "forward pass"]
    steps = [event for event in trace.events if event["name"] == "step"]
    return [step["dur"] / 1e3 for step in steps if any(step["ts"] <= at < step["ts"] + step["dur"] for at in passes)]


def _due(numbers: range) -> list[tuple[float, int]]:
    """When each session's first turn is due, in seconds from now, and its number."""
    return [(place * _BEAT_S / len(numbers), number) for place, number in enumerate(numbers)]


def _run(sessions: GrownSessions, due: list[tuple[float, int]], duration_s: float, trace: Trace) -> None:
    """Lets turns arrive for so long, and ends when all of them are done."""
    started_s = time.perf_counter()
    while True:
        now_s = time.perf_counter() - started_s
        while due and due[0][0] <= now_s:
            at_s, number = due[0]
            trace.mark(f"turn of session {number}")
            sessions.submit_from(number, MustSucceed(), _NUM_INPUT, _NUM_OUTPUT)
            if at_s + _BEAT_S < duration_s:
                heapq.heapreplace(due, (at_s + _BEAT_S, number))
            else:
                heapq.heappop(due)
        is_busy = sessions.engine.step()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        trace.count("page faults", usage.ru_minflt)
        trace.count("preemptions by the kernel", usage.ru_nivcsw)
        if not is_busy:
            if not due:
                return
            time.sleep(max(0.0, due[0][0] - (time.perf_counter() - started_s)))
