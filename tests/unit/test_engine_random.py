"""Tests of engine: any order of posts, steps, cancellations, failures and silence, against plain lists.

The model of a session is the list of what it has been told and has said, and the turns that are still to be answered.
Every answer is checked against it in the order of the session's turns, the pool's integrity after every step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from microturn.turn import Turn
from support.driver import Recorder
from support.fake_runner import FakeDriver, expected_tokens

NUM_IDS = 5
MAX_CONTEXT = 40
MAX_QUEUED = 3
IDLE_S = 10.0

session_ids = st.integers(1, NUM_IDS)
# Some inputs begin alike, so that prefixes are shared.
inputs = st.one_of(st.lists(st.integers(0, 96), max_size=14), st.integers(0, 20).map(lambda n: list(range(n))))
output_lens = st.integers(0, 8)
seldom = st.sampled_from([False, False, False, True])


@dataclass(eq=False)
class Posted:
    """A turn that was posted."""

    given: list[int]
    max_tokens: int
    recorder: Recorder
    turn: Turn
    may_be_cancelled: bool = False
    may_fail: bool = False


@dataclass
class Model:
    """What a session must be."""

    history: list[int] = field(default_factory=list)
    unanswered: list[Posted] = field(default_factory=list)
    is_closing: bool = False


class EngineMachine(RuleBasedStateMachine):
    """Sessions in a pool that is too small for them."""

    @initialize(
        num_pages=st.integers(10, 40), max_batch_tokens=st.sampled_from([4, 7, 64]), share_prefixes=st.booleans()
    )
    def begin(self, num_pages: int, max_batch_tokens: int, share_prefixes: bool) -> None:
        self.driver = FakeDriver(
            num_pages=num_pages,
            max_context=MAX_CONTEXT,
            max_batch_tokens=max_batch_tokens,
            max_queued_turns=MAX_QUEUED,
            idle_timeout_s=IDLE_S,
            share_prefixes=share_prefixes,
        )
        self.models: dict[int, Model] = {}
        self.ended: dict[int, str] = {}

    # ---- what may happen -------------------------------------------------------------------------------------------

    @rule(
        session_id=session_ids, given=inputs, max_tokens=output_lens, end=st.sampled_from([False, False, False, True])
    )
    def turn(self, session_id: int, given: list[int], max_tokens: int, end: bool) -> None:
        """A turn; it opens its session if there is none."""
        start = session_id not in self.models
        posted = self._post(session_id, given, max_tokens, start=start, end=end)
        if start and posted.recorder.error is not None:
            self._check_refused_start(posted)
        elif start:
            self.models[session_id] = Model(unanswered=[posted], is_closing=end)
        else:
            self._check_arrival(self.models[session_id], posted, end)

    @rule(session_id=session_ids, given=inputs, max_tokens=output_lens)
    def start_anew(self, session_id: int, given: list[int], max_tokens: int) -> None:
        """START, whether the session lives or not."""
        posted = self._post(session_id, given, max_tokens, start=True)
        if posted.recorder.error is not None:
            self._check_refused_start(posted)
            return
        old = self.models.pop(session_id, Model())
        for turn in old.unanswered:
            assert turn.recorder.status.finish_reason == "cancelled"
        self.models[session_id] = Model(unanswered=[posted])

    @rule(session_id=session_ids)
    def turn_without_start(self, session_id: int) -> None:
        """A turn of a session that was never opened, or is gone."""
        if session_id not in self.models:
            posted = self._post(session_id, [1], 1)
            assert posted.recorder.error is not None
            assert posted.recorder.error.code == self.ended.get(session_id, "NOT_FOUND")

    @rule(number=st.integers(0, 100))
    def cancel(self, number: int) -> None:
        """Somebody leaves: an unanswered turn, running or waiting, is cancelled."""
        unanswered = [posted for model in self.models.values() for posted in model.unanswered]
        if unanswered:
            posted = unanswered[number % len(unanswered)]
            posted.may_be_cancelled = True
            self.driver.engine.cancel(posted.turn)
            self._step()

    @precondition(lambda self: any(model.unanswered for model in self.models.values()))
    @rule()
    def fail_a_pass(self) -> None:
        """The next forward pass raises, having written nonsense into its pages."""
        for model in self.models.values():
            for posted in model.unanswered[:1]:
                posted.may_fail = True
        self.driver.runner.error = RuntimeError("out of memory")
        self._step()
        self.driver.runner.error = None

    @rule(num_steps=st.integers(1, 6))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.clock.now_s += 0.01
            self._step()

    @rule(kept=st.sets(session_ids))
    def silence(self, kept: set[int]) -> None:
        """All turns end; then only some sessions are kept alive for longer than the idle time."""
        self._finish()
        for _ in range(2):
            self.driver.clock.now_s += 0.7 * IDLE_S
            for session_id in kept & set(self.models):
                status = self.driver.turn(session_id).status
                assert status.context_len == len(self.models[session_id].history)
            self.driver.run()
        for session_id in set(self.models) - kept:
            del self.models[session_id]
            self.ended[session_id] = "EXPIRED"

    @invariant()
    def every_answer_is_right(self) -> None:
        if hasattr(self, "driver"):
            self._check_answers()

    def teardown(self) -> None:
        """Everybody can be answered, and in the end every page is free or kept for a prefix."""
        if not hasattr(self, "driver"):
            return
        self._finish()
        for session_id in list(self.models):
            assert self.driver.turn(session_id, end=True).status.finish_reason == "closed"
        while self.driver.engine._prefixes.evict():
            pass
        assert self.driver.pool.num_free == self.driver.pool.num_pages

    # ---- what must come of it --------------------------------------------------------------------------------------

    def _post(
        self, session_id: int, given: list[int], max_tokens: int, *, start: bool = False, end: bool = False
    ) -> Posted:
        recorder, turn = self.driver.post(session_id, given, start=start, end=end, max_tokens=max_tokens)
        self.driver.engine.step()
        self.driver.engine.check_integrity()
        return Posted(given, max_tokens, recorder, turn)

    def _step(self) -> None:
        self.driver.engine.step()
        self.driver.engine.check_integrity()
        self._check_answers()

    def _finish(self) -> None:
        self.driver.run(max_steps=2000)
        self._check_answers()
        assert not any(model.unanswered for model in self.models.values())

    def _check_refused_start(self, posted: Posted) -> None:
        assert posted.recorder.error is not None
        is_empty = not posted.given and posted.max_tokens > 0
        assert posted.recorder.error.code == ("INVALID_ARGUMENT" if is_empty else "CONTEXT_FULL")
        assert is_empty or len(posted.given) + posted.max_tokens > MAX_CONTEXT

    def _check_arrival(self, model: Model, posted: Posted, end: bool) -> None:
        """A turn is accepted, or refused for what is known when it arrives. END closes either way."""
        code = posted.recorder.error.code if posted.recorder.error is not None else None
        if code == "FAILED_PRECONDITION":
            assert model.is_closing
        elif code == "RESOURCE_EXHAUSTED":
            assert len(model.unanswered) > MAX_QUEUED
        else:
            assert not model.is_closing
            model.unanswered.append(posted)
        model.is_closing = model.is_closing or end

    def _check_answers(self) -> None:
        for session_id, model in list(self.models.items()):
            for posted in list(self._answered(model)):
                self._check_answer(model, posted)
            is_gone = self.driver.engine._sessions.find(session_id) is None
            assert is_gone == (model.is_closing and not model.unanswered)
            if is_gone:
                del self.models[session_id]
                self.ended[session_id] = "NOT_FOUND"

    def _answered(self, model: Model) -> Iterator[Posted]:
        """Turns with an answer, in the order of the session; a turn cancelled while it waits is answered early."""
        for posted in list(model.unanswered):
            if not posted.recorder.is_done:
                continue
            model.unanswered.remove(posted)
            yield posted

    def _check_answer(self, model: Model, posted: Posted) -> None:
        error = posted.recorder.error
        new_len = len(model.history) + len(posted.given) + posted.max_tokens
        if error is not None:
            reasons = {
                "CONTEXT_FULL": new_len > MAX_CONTEXT,
                "INVALID_ARGUMENT": not model.history and not posted.given and posted.max_tokens > 0,
                "INTERNAL": posted.may_fail,
            }
            assert reasons.get(error.code), error
            return
        status = posted.recorder.status
        if status.finish_reason == "cancelled":
            assert posted.may_be_cancelled
            return
        assert new_len <= MAX_CONTEXT
        model.history += posted.given
        assert posted.recorder.token_ids == expected_tokens(model.history, posted.max_tokens)
        model.history += posted.recorder.token_ids
        assert status.context_len == len(model.history)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=200, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
