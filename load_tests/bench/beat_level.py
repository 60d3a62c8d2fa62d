"""Turns on a beat, and the account of how late they were. Knows no server: a turn is whatever can be awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from load_tests.bench.results import percentile

BEAT_S = 0.2
# A session so far behind its beat will not catch up.
BEHIND_S = 2.0

TakeTurn = Callable[[int], Awaitable[None]]


@dataclass(frozen=True)
class Level:
    """What a number of sessions saw.

    Attributes:
        num_sessions: that kept the beat.
        latencies_ms: of every turn that counts, from its scheduled arrival; of one without an answer, how long it had
            waited when the level ended.
        num_unanswered: how many of these have none.
        ended_early: whether somebody fell so far behind that the level was ended.
        others_share: of the processor, which others used meanwhile.
        beat_s: between two turns of a session, and what a turn may take.
    """

    num_sessions: int
    latencies_ms: Sequence[float]
    num_unanswered: int
    ended_early: bool
    others_share: float = 0.0
    beat_s: float = BEAT_S

    @property
    def on_time_share(self) -> float:
        """Turns whose last token came within a beat, among all."""
        return sum(ms <= self.beat_s * 1e3 for ms in self.latencies_ms) / len(self.latencies_ms)

    def percentile(self, percent: int) -> float:
        """Of the latencies, in milliseconds."""
        return percentile(self.latencies_ms, percent)

    def as_json(self) -> dict[str, object]:
        """For a result file."""
        return {
            "num_sessions": self.num_sessions,
            "num_turns": len(self.latencies_ms),
            "num_unanswered": self.num_unanswered,
            "ended_early": self.ended_early,
            "others_share_of_processor": round(self.others_share, 3),
            "on_time_share": round(self.on_time_share, 5),
            **{f"p{percent}_ms": round(self.percentile(percent), 1) for percent in (50, 90, 99)},
            "max_ms": round(max(self.latencies_ms), 1),
        }


@dataclass
class _Session:
    """One session's beat.

    Attributes:
        due_s: scheduled arrivals.
        latencies_ms: of the turns that were answered, in the same order.
    """

    take_turn: TakeTurn
    due_s: Sequence[float]
    latencies_ms: list[float] = field(default_factory=list)

    async def play(self, fell_behind: asyncio.Event) -> None:
        """Takes its turns until somebody has fallen behind."""
        for number, due_s in enumerate(self.due_s, start=1):
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            if fell_behind.is_set():
                return
            await self.take_turn(number)
            late_s = time.perf_counter() - due_s
            self.latencies_ms.append(late_s * 1e3)
            if late_s > BEHIND_S:
                fell_behind.set()


async def keep_beat(take_turns: Sequence[TakeTurn], num_turns: int, beat_s: float = BEAT_S) -> Level:
    """Lets sessions take turns on the beat, each in a phase of its own.

    Args:
        take_turns: per session, takes the turn of a number (from 1 on) and returns when its last token is there.
        num_turns: of each session.
        beat_s: between two of them.
    """
    num_sessions = len(take_turns)
    begin_s = time.perf_counter() + beat_s
    sessions = [
        _Session(take_turn, [begin_s + beat_s * (turn + index / num_sessions) for turn in range(num_turns)])
        for index, take_turn in enumerate(take_turns)
    ]
    fell_behind = asyncio.Event()
    tasks = [asyncio.create_task(session.play(fell_behind)) for session in sessions]
    last_due_s = begin_s + beat_s * num_turns
    try:
        _, unfinished = await asyncio.wait(
            tasks, timeout=last_due_s + BEHIND_S - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION
        )
        end_s = time.perf_counter()
    finally:
        for task in tasks:
            task.cancel()
    for failed in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(failed, Exception):
            raise failed
    return account(
        [(session.due_s, session.latencies_ms) for session in sessions],
        end_s,
        ended_early=fell_behind.is_set() or bool(unfinished),
        beat_s=beat_s,
    )


def account(
    sessions: Sequence[tuple[Sequence[float], Sequence[float]]],
    end_s: float,
    *,
    ended_early: bool,
    beat_s: float = BEAT_S,
) -> Level:
    """Adds to the answered turns those that were late without an answer.

    Args:
        sessions: per session the scheduled arrivals of all its turns, and the latencies in ms of the first of them,
            which were answered.
        end_s: when the level ended.
        ended_early: see `Level`.
        beat_s: likewise.
    """
    answered = [ms for _, latencies_ms in sessions for ms in latencies_ms]
    waited_s = [end_s - due_s for due, latencies_ms in sessions for due_s in due[len(latencies_ms) :]]
    unanswered = [waited * 1e3 for waited in waited_s if waited > beat_s]
    return Level(len(sessions), answered + unanswered, len(unanswered), ended_early, beat_s=beat_s)
