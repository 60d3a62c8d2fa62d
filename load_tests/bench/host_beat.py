"""Host time of turns on the beat: they come and end all the time, and their begin and end cost as much as their steps.

Turns of 4 tokens in and 4 out come in the order of the sessions, as many before each step as in a step of some 6 ms of
a GPU. Steps are launched ahead, as there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from load_tests.bench.host_engine import HostEngine

NUM_INPUT, NUM_OUTPUT = 4, 4
CONTEXT_LEN = 2048
# Turns that come before each step are this share of the sessions: 32 steps to a beat.
_STEPS_PER_BEAT = 32
_NUM_WARM_UP_BEATS, _NUM_BEATS = 3, 12


@dataclass(frozen=True)
class BeatTime:
    """Turns on the beat.

    Attributes:
        num_sessions: each has a turn in a beat.
        turn_us: median over beats; processor time of the engine's thread for a turn, its steps included.
    """

    num_sessions: int
    turn_us: float


def measure_beat(num_sessions: int) -> BeatTime:
    """Lets sessions take turns, a multiple of 32 of them."""
    num_arrivals = num_sessions // _STEPS_PER_BEAT
    num_beats = _NUM_WARM_UP_BEATS + _NUM_BEATS
    max_context = CONTEXT_LEN + (NUM_INPUT + NUM_OUTPUT) * (num_beats + 1)
    host = HostEngine(max_context, num_sessions, is_ahead=True)
    host.open(range(1, num_sessions + 1), CONTEXT_LEN)
    times_us = []
    for _ in range(num_beats):
        beat_s = 0.0
        for first in range(1, num_sessions + 1, num_arrivals):
            for session_id in range(first, first + num_arrivals):
                options = {"max_tokens": NUM_OUTPUT, "ignore_eos": True}
                host.engine.submit(host.turn(session_id, [1] * NUM_INPUT, options))
            begun_s = time.thread_time()
            host.engine.step()
            beat_s += time.thread_time() - begun_s
        times_us.append(beat_s * 1e6 / num_sessions)
    host.run_out()
    return BeatTime(num_sessions, median(times_us[_NUM_WARM_UP_BEATS:]))
