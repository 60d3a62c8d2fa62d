"""Simulates sessions with a regular beat, step by step as the engine runs them: how many turns are on time.

Every session has a turn each beat, their phases spread over it. Between two steps the engine takes the turns that have
arrived. A step computes, for every running turn, its input (with the last token of the turn before, whose KV is not
computed yet) or its next token; the first token of an answer is sampled with the end of the input. So a turn takes one
step per generated token, shared with other running turns. A session's next turn waits for the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from microturn.planning.step_times import StepTimes
from microturn.settings import Settings

# A session this many beats late is given up.
_HOPELESS_BEATS = 10
_MOST_SESSIONS = 1 << 17
_ENOUGH_TURNS = 4000


@dataclass(frozen=True)
class ServingCost:
    """The cost of a turn and its tokens outside of the engine.

    Processes that run on the model's cores also delay steps.

    Attributes:
        turn_s: round trip of a turn: half of it delays its arrival, half of it its end.
        turn_hold_s: delay of steps per turn.
        response_hold_s: delay of steps per token that is sent before the turn's last one.
    """

    turn_s: float = 0.0
    turn_hold_s: float = 0.0
    response_hold_s: float = 0.0


@dataclass(frozen=True)
class Beat:
    """The workload of sessions, and its target.

    Attributes:
        beat_s: period of a session's turns, and the deadline of a turn.
        num_input: input tokens per turn; at least one.
        num_output: output tokens per turn; 0 only appends.
        wanted_share: share of turns that must be on time.
        cost: outside of the engine.
        max_step_tokens: maximum tokens of a step (`max_batch_tokens`).
        spread: `even` phases, or `random` ones.
    """

    beat_s: float = 0.2
    num_input: int = 4
    num_output: int = 4
    wanted_share: float = 0.99
    cost: ServingCost = ServingCost()
    max_step_tokens: int = Settings.max_batch_tokens
    spread: str = "even"


def on_time_share(beat: Beat, times: StepTimes, num_sessions: int, *, num_beats: int = 40, seed: int = 0) -> float:
    """The share of turns that end within a beat of when they were due."""
    latencies_s = turn_latencies_s(beat, times, num_sessions, num_beats=num_beats, seed=seed)
    return float(np.mean(latencies_s <= beat.beat_s))


def turn_latencies_s(
    beat: Beat, times: StepTimes, num_sessions: int, *, num_beats: int = 40, seed: int = 0
) -> NDArray[np.float64]:
    """Seconds from when each turn was due to its end [num_sessions, num_beats]; infinite for late sessions given up."""
    cost = beat.cost
    random = np.random.default_rng(seed)
    phases = np.arange(num_sessions) / num_sessions if beat.spread == "even" else random.random(num_sessions)
    due_s = phases * beat.beat_s
    latencies_s = np.full((num_sessions, num_beats), np.inf)
    num_done = np.zeros(num_sessions, np.int64)
    # Of the running turn: tokens still to be appended and to be generated; both 0 without a turn.
    to_append = np.zeros(num_sessions, np.int64)
    to_make = np.zeros(num_sessions, np.int64)
    runs = np.zeros(num_sessions, bool)
    # Disturbances of a machine last: factors are used in the measured order, from a random start.
    jitter = cycle(np.roll(times.jitter, -int(random.integers(len(times.jitter)))))
    now_s = 0.0
    while True:
        comes = ~runs & (num_done < num_beats) & (due_s + cost.turn_s / 2 <= now_s)
        to_append[comes] = beat.num_input + 1
        to_make[comes] = beat.num_output
        runs |= comes
        if not runs.any():
            left = num_done < num_beats
            if not left.any():
                return latencies_s
            now_s = float(due_s[left].min()) + cost.turn_s / 2
            continue
        tokens = _schedule(beat, runs, to_append, due_s)
        scheduled = tokens > 0
        appends = scheduled & (to_append > 0)
        num_appends = int(appends.sum())
        num_decodes = int(scheduled.sum()) - num_appends
        step_s = times.step_s(num_decodes, num_appends, int(tokens[appends].sum())) * float(next(jitter))
        to_append[appends] -= tokens[appends]
        makes = scheduled & (to_append == 0)
        to_make[makes] -= 1
        ends = makes & (to_make <= 0)
        now_s += step_s + cost.turn_hold_s * int(ends.sum()) + cost.response_hold_s * int((makes & ~ends).sum())
        late_s = now_s + cost.turn_s / 2 - due_s[ends]
        latencies_s[ends, num_done[ends]] = late_s
        num_done[ends] += 1
        due_s[ends] += beat.beat_s
        runs &= ~ends
        if late_s.size and late_s.max() > _HOPELESS_BEATS * beat.beat_s:
            return latencies_s


def _schedule(
    beat: Beat, runs: NDArray[np.bool_], to_append: NDArray[np.int64], due_s: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Tokens of each session in the next step: short rows first, by when they are due, then long ones in the rest."""
    wanted = np.where(runs, np.maximum(to_append, 1), 0)
    if wanted.sum() <= beat.max_step_tokens:
        return wanted
    is_long = wanted > beat.max_step_tokens // 4
    tokens = np.zeros_like(wanted)
    left = beat.max_step_tokens
    for session in np.lexsort((due_s, is_long, ~runs))[: int(runs.sum())]:
        tokens[session] = min(int(wanted[session]), left)
        left -= int(tokens[session])
        if not left:
            break
    return tokens


def sessions_on_time(beat: Beat, times: StepTimes, *, seed: int = 0) -> int:
    """The largest number of sessions with enough turns on time; 0 if one session is too many."""

    def are_on_time(num_sessions: int) -> bool:
        # With many sessions a few beats have enough turns.
        num_beats = max(8, min(40, _ENOUGH_TURNS // num_sessions))
        return on_time_share(beat, times, num_sessions, num_beats=num_beats, seed=seed) >= beat.wanted_share

    return largest(are_on_time, _MOST_SESSIONS)


def largest(is_enough: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which a monotonic condition holds; 0 if it never holds."""
    holds, fails = 0, most + 1
    while fails - holds > 1:
        tried = min(2 * holds or 1, most) if fails > most else (holds + fails) // 2
        if is_enough(tried):
            holds = tried
        else:
            fails = tried
    return holds
