"""The beat protocol in the engine: 4 tokens in and 4 out every 200 ms per session, phases spread evenly.

Turns are posted by the clock, whether those before are answered or not, by one thread to an engine on another. A turn
is on time when its last token is there a beat after it was due. Every level begins at the same context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from tqdm import tqdm

from load_tests.bench.beat_level import BEAT_S, BEHIND_S, Level, account
from load_tests.bench.gpu.answers import Answer
from load_tests.bench.gpu.extent import Extent
from load_tests.bench.gpu.steps import grown
from load_tests.bench.gpu.subject import Subject, on_own_thread
from microturn.bench.grown_sessions import GrownSessions

NUM_INPUT, NUM_OUTPUT = 4, 4
WANTED_SHARE = 0.99
# The answer is known to a sixteenth.
_PRECISION = 16


def measure_beat(subject: Subject, extent: Extent) -> dict[str, object]:
    """The largest number of sessions that are served on time."""
    per_session = extent.beat_context_len + (NUM_INPUT + NUM_OUTPUT) * (extent.beat_turns + 1)
    most = 1
    while subject.has_room(2 * most, per_session):
        most *= 2
    room = next(number for number in range(2 * most, 0, -1) if subject.has_room(number, per_session))
    most = min(room, extent.beat_most_rows)
    sessions, levels = subject.sessions, []
    with tqdm(desc="beat", unit="level", leave=False) as progress:

        def is_on_time(num_sessions: int) -> bool:
            ids = grown(sessions, num_sessions, extent.beat_context_len)
            level = take_level(sessions, ids, extent.beat_turns)
            levels.append(level)
            progress.set_postfix_str(f"{num_sessions} sessions: {level.on_time_share:.1%}")
            progress.update()
            return level.on_time_share >= WANTED_SHARE

        largest = largest_on_time(is_on_time, min(extent.beat_first_rows, most), most)
    sessions.end_all()
    return {
        "context_len": extent.beat_context_len,
        "sessions_on_time": largest,
        "room": room,
        "is_limited_by_pool": largest == room,
        "levels": [level.as_json() for level in sorted(levels, key=lambda level: level.num_sessions)],
    }


def largest_on_time(is_on_time: Callable[[int], bool], first: int, most: int) -> int:
    """The largest number of sessions that are on time, nearly: by doubling, then by bisection; 0 where not one is.

    Args:
        is_on_time: measures a number of sessions.
        first: to begin with.
        most: that there is room for.
    """
    good, bad = 0, most + 1
    number = first
    while bad - good > max(1, good // _PRECISION):
        if is_on_time(number):
            good = number
        else:
            bad = number
        number = min(2 * good, most) if good and bad > most else (good + bad) // 2
    return good


def take_level(sessions: GrownSessions, ids: Sequence[int], num_turns: int, beat_s: float = BEAT_S) -> Level:
    """Lets grown sessions take so many turns on the beat; nothing of them is under way afterwards."""
    answers: list[list[Answer]] = [[] for _ in ids]
    num_behind = int(BEHIND_S / beat_s)
    with on_own_thread(sessions.engine):
        begin_s = time.perf_counter() + beat_s
        due_s = [
            [begin_s + beat_s * (turn + index / len(ids)) for turn in range(num_turns)] for index in range(len(ids))
        ]
        for turn in range(num_turns):
            if turn >= num_behind and any(of[turn - num_behind].end_s is None for of in answers):
                break  # somebody will not catch up
            for session_id, of, due in zip(ids, answers, due_s, strict=True):
                time.sleep(max(0.0, due[turn] - time.perf_counter()))
                of.append(Answer())
                sessions.submit(session_id, of[-1], NUM_INPUT, {"max_tokens": NUM_OUTPUT, "ignore_eos": True})
        last_s = time.perf_counter() + BEHIND_S
        while time.perf_counter() < last_s and any(of[-1].end_s is None for of in answers):
            time.sleep(beat_s / 10)
        end_s = time.perf_counter()
        told = [(due[: len(of)], _latencies_ms(due, of)) for due, of in zip(due_s, answers, strict=True)]
    sessions.run_out()
    for of in answers:
        for answer in of:
            answer.result()
    return account(told, end_s, ended_early=len(answers[0]) < num_turns, beat_s=beat_s)


def _latencies_ms(due_s: Sequence[float], answers: Sequence[Answer]) -> list[float]:
    """Of the first turns of a session, which were answered."""
    ends_s = takewhile(lambda end_s: end_s is not None, (answer.end_s for answer in answers))
    return [(end_s - due) * 1e3 for end_s, due in zip(ends_s, due_s, strict=False) if end_s is not None]
