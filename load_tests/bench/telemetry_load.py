"""A load inside a served model, whose telemetry is switched on and off: see `telemetry.py`.

It runs where telemetry runs, in Triton's model process, so that what it takes of the processor and of Python's lock is
taken from the steps that are measured. Sessions that are always busy decode side by side; every step is timed.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.errors import MicroturnError
from microturn.hosts.reporting import Reporting
from microturn.sessions.inputs import TokenInput
from microturn.sessions.turn import Turn, TurnOutput, TurnRequest
from microturn.telemetry.recorder import Recorder

NUM_SESSIONS, CONTEXT_LEN, NUM_INPUT, NUM_OUTPUT = 8, 200, 4, 8
# In each there are two rounds of publishing.
PHASE_S = 10.0

# What the benchmark tells this process.
RESULT_FILE, NUM_PHASES = "MICROTURN_BENCH_RESULT", "MICROTURN_BENCH_PHASES"


def begin(engine: Engine, reporting: Reporting) -> None:
    """Begins to measure, in a thread of its own."""
    threading.Thread(target=_measure, args=(engine, reporting), daemon=True).start()


class _Switch:
    """Telemetry, on or off."""

    def __init__(self, recorder: Recorder, reporting: Reporting) -> None:
        self._recorder = recorder
        self._reporting = reporting
        self._read = reporting._publisher._read
        self.answered = reporting.answered
        threads = [reporting._publisher._thread, reporting._log._records.thread]
        if reporting._spans is not None:
            threads.append(reporting._spans._turns.thread)
        idents = [thread.ident for thread in threads if thread is not None]
        self._clocks = [time.pthread_getcpuclockid(ident) for ident in idents if ident is not None]

    def threads_s(self) -> float:
        """Processor time that the threads of telemetry have had so far."""
        return sum(map(time.clock_gettime, self._clocks))

    def set(self, is_on: bool) -> None:
        logging.disable(logging.NOTSET if is_on else logging.CRITICAL)
        self._reporting._publisher._read = self._read if is_on else dict
        self.answered = self._reporting.answered if is_on else _nothing
        for name in [name for name in vars(Recorder) if not name.startswith("_")]:
            if is_on:
                vars(self._recorder).pop(name, None)
            else:
                setattr(self._recorder, name, _nothing)


class _Talker:
    """A session that says the same thing again as soon as it has been answered."""

    def __init__(self, engine: Engine, switch: _Switch, session_id: int) -> None:
        self._engine = engine
        self._switch = switch
        self._id = session_id
        self._turn = self._say([7] * CONTEXT_LEN, start=True, max_tokens=0)

    def put(self, output: TurnOutput) -> None:
        if output.status is not None:
            self._switch.answered(self._turn, output.status, self._engine.clock())
            trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
            options: dict[str, Any] = {
                "max_tokens": NUM_OUTPUT,
                "ignore_eos": True,
                "rewind_to": CONTEXT_LEN,
                "traceparent": trace,
            }
            self._turn = self._say([7] * NUM_INPUT, **options)

    def fail(self, error: MicroturnError) -> None:
        raise error

    def _say(self, token_ids: list[int], *, start: bool = False, **options: Any) -> Turn:
        request = TurnRequest(
            self._id, TokenInput(tuple(token_ids)), self, self._engine.clock(), start=start, options=options
        )
        turn = Turn(request)
        self._engine.submit(turn)
        return turn


def _measure(engine: Engine, reporting: Reporting) -> None:
    switch = _Switch(engine.recorder, reporting)
    step, steps_ms = engine.step, list[float]()

    def timed(*, block: bool = False) -> bool:
        started_s = time.perf_counter()
        is_busy = step(block=block)
        steps_ms.append((time.perf_counter() - started_s) * 1e3)
        return is_busy

    talkers = [_Talker(engine, switch, session_id) for session_id in range(1, NUM_SESSIONS + 1)]
    time.sleep(PHASE_S)  # prompts, and memory that is touched for the first time
    engine.call(lambda _: setattr(engine, "step", timed))
    phases = []
    for number in range(int(os.environ[NUM_PHASES])):
        is_on = number % 4 in (1, 2)  # off, on, on, off: what drifts hits both alike
        engine.call(partial(_begin_phase, switch, is_on, steps_ms))
        threads_s = -switch.threads_s()
        time.sleep(PHASE_S)
        threads_s += switch.threads_s()
        phases.append({"is_on": is_on, "threads_s": threads_s, "steps_ms": engine.call(lambda _: list(steps_ms))})
    result = {"phases": phases, "num_talkers": len(talkers), "metrics": _named(engine.call(Maintenance.measure))}
    path = Path(os.environ[RESULT_FILE])
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)


def _begin_phase(switch: _Switch, is_on: bool, steps_ms: list[float], _: Maintenance) -> None:
    switch.set(is_on)
    steps_ms.clear()


def _named(samples: dict[Any, float]) -> dict[str, float]:
    return {f"{name}{dict(labels)}": value for (name, labels), value in samples.items() if "_bucket" not in name}


def _nothing(*_: Any, **__: Any) -> None:
    pass
