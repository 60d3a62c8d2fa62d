"""Tests of engine: 200 sessions in a pool for eight, for as long as they last, beside eight in a pool for all.

Nothing is measured with a stopwatch. A forward pass costs what it cost SmolLM2-135M on two cores:
33 ms for one token and 364 ms for 256 of them, so that before its first token a pass costs as much as 25 tokens do.
(On a GPU it is some hundred tokens: passes weigh more there, and the many sessions, which share them, look better.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from microturn.model.batch import Batch
from microturn.sessions.turn import Turn
from support.driver import Recorder
from support.fake_runner import VOCAB_SIZE, FakeDriver, expected_tokens

PASS_S = 0.033
TOKENS_PER_PASS = 25
PAGE_SIZE = 16
PAGES_PER_SESSION = 8


@dataclass(frozen=True)
class Shape:
    """Sessions that fill eight pages to the last token, in turns."""

    num_turns: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        assert self.num_turns * (self.input_len + self.output_len) == PAGES_PER_SESSION * PAGE_SIZE


SHAPES = [Shape(4, 12, 20), Shape(4, 24, 8), Shape(8, 8, 8), Shape(2, 40, 24)]


class TimedDriver(FakeDriver):
    """An engine whose forward passes take their time."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        run = self.runner.run

        def run_for_a_while(batch: Batch) -> Tensor:
            self.clock.now_s += pass_s(batch)
            return run(batch)

        self.runner.run = run_for_a_while


@dataclass
class Crowd:
    """Sessions that each send a turn as soon as the one before it has been answered, and what became of them.

    Attributes:
        num_complete: sessions whose every turn was answered.
        refusals: what the others were told, and how many forward passes there had been by then.
        latencies_s: of all turns that were answered.
        reasons: how turns ended.
        num_generated: tokens.
    """

    driver: TimedDriver
    shape: Shape
    deadline_ms: float = 0.0
    num_complete: int = 0
    refusals: list[tuple[str | None, int]] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)
    num_generated: int = 0
    _histories: dict[int, list[int]] = field(default_factory=dict)
    _pending: dict[int, tuple[Recorder, Turn]] = field(default_factory=dict)

    @property
    def passes_s(self) -> list[float]:
        """What the forward passes took."""
        return [pass_s(batch) for batch in self.driver.runner.batches]

    @property
    def throughput(self) -> float:
        """Tokens generated per second of forward passes."""
        return self.num_generated / sum(self.passes_s)

    def run(self, num_sessions: int) -> None:
        """Serves so many sessions until all of them have ended."""
        for session_id in range(num_sessions):
            self._send(session_id, 0)
        while self._pending:
            self.driver.engine.step()
            for session_id, (recorder, turn) in list(self._pending.items()):
                if recorder.is_done:
                    del self._pending[session_id]
                    self._hear(session_id, recorder, turn)
        self.driver.engine.check_integrity()
        assert self.driver.pool.num_free == self.driver.pool.num_pages, "B17-B20: pages were leaked"

    def _send(self, session_id: int, number: int) -> None:
        given = [(7 * session_id + 3 * number + at) % VOCAB_SIZE for at in range(self.shape.input_len)]
        self._histories.setdefault(session_id, []).extend(given)
        self._pending[session_id] = self.driver.post(
            session_id,
            given,
            start=number == 0,
            end=number == self.shape.num_turns - 1,
            max_tokens=self.shape.output_len,
            deadline_ms=self.deadline_ms,
        )

    def _hear(self, session_id: int, recorder: Recorder, turn: Turn) -> None:
        if recorder.error is not None:
            self.refusals.append((recorder.code, len(self.passes_s)))
            return
        self.latencies_s.append(recorder.status.timing_ms["total"] / 1e3)
        self.reasons.add(recorder.status.finish_reason)
        history = self._histories[session_id]
        assert recorder.token_ids == expected_tokens(history, len(recorder.token_ids))
        history += recorder.token_ids
        assert recorder.status.context_len == len(history)
        self.num_generated += len(recorder.token_ids)
        if turn.number + 1 == self.shape.num_turns:
            self.num_complete += 1
        else:
            self._send(session_id, turn.number + 1)


def pass_s(batch: Batch) -> float:
    """How long a forward pass takes."""
    return PASS_S * (1 + batch.num_tokens / TOKENS_PER_PASS)


def serve(
    num_sessions: int, num_pages: int, shape: Shape, *, deadline_ms: float = 0.0, max_sessions: int = 256
) -> Crowd:
    """Serves sessions that each want eight pages."""
    driver = TimedDriver(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        max_context=PAGES_PER_SESSION * PAGE_SIZE,
        max_sessions=max_sessions,
        idle_timeout_s=3600,
    )
    crowd = Crowd(driver, shape, deadline_ms)
    crowd.run(num_sessions)
    return crowd


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_hundred_sessions_in_a_pool_for_eight_are_served_at_half_the_speed_at_least(shape: Shape) -> None:
    """B9: the pool was full, the server stood at 99 % and made no progress; B3: idle sessions held every row."""
    few = serve(8, 4096, shape)
    assert few.num_complete == 8
    many = serve(200, 64, shape)
    assert many.num_complete == 200
    assert many.refusals == []
    assert many.reasons == {"length"}
    assert many.throughput >= 0.5 * few.throughput


def test_who_finds_no_room_is_told_so_at_once_and_the_others_are_served() -> None:
    """A declared session capacity was stored and never enforced."""
    many = serve(200, 64, SHAPES[0], max_sessions=190)
    assert many.num_complete == 190
    assert many.refusals == [("RESOURCE_EXHAUSTED", 1)] * 10, "the first pass had begun in the same step"


@pytest.mark.parametrize("deadline_ms", [200, 2_000, 20_000])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_nothing_waits_longer_than_its_deadline(shape: Shape, deadline_ms: float) -> None:
    """It ends with what there is then, one pass later at most; nobody is refused, and all goes on."""
    many = serve(200, 64, shape, deadline_ms=deadline_ms)
    assert many.num_complete == 200
    assert many.refusals == []
    assert "deadline" in many.reasons
    assert max(many.latencies_s) <= deadline_ms / 1e3 + max(many.passes_s)
    assert many.throughput >= 0.5 * serve(8, 4096, shape, deadline_ms=deadline_ms).throughput
