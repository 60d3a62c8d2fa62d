"""A session that outlives its stream and its server: goes on where it still lives, or opens it anew and tells it all.

    OPEN ──the stream broke, or the server takes no turns──► BROKEN ──a while later──► RESUMING ──it lives──► OPEN
                                                              ▲  ▲                        │
                                                              │  └──no answer either──────┤
                                                              │                           ▼ it is gone
                                                              └────────────────────── REPLAYING ──all told──► OPEN

A stream may also die without a word, and an answer be lost on one that lives. So where nothing comes, the session is
gone on with on a new stream, and on another after twice that time. A server that is only slow has the turns by their
numbers and goes on with them; no reader hears of it.

Turns have numbers, so one that is sent again is not done again. What was on the wire is sent again: to a session that
lives under its number; to one that was opened anew behind the transcript, where it comes out the same, since sampling
depends on the context, the seed and the position alone. Either way its reader gets what it has not got yet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from microturn_client._errors import (
    Expired,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    MicroturnError,
    ModelChanged,
    NotFound,
)
from microturn_client._events import REBUILT, Resumed
from microturn_client._inputs import InputTensor
from microturn_client._pending_turn import PendingTurn
from microturn_client._replay import Replay
from microturn_client._requests import Requests
from microturn_client._retry import Backoff, Patience, Recovery, Remedy, remedy_for
from microturn_client._session_core import SessionCore
from microturn_client._session_state import SessionState
from microturn_client._transcript import Transcript
from microturn_client._wire import ModelInferRequest, Response

# What is told to a session that is opened anew has no numbers: asked for again, it is begun again. And it is long.
_REPLAY_PATIENCE = 6.0


class DurableCore(SessionCore):
    """One session.

    Args:
        requests: makes its requests.
        clock: seconds, monotonic.
        recovery: how long and how often it tries.
        transcript: what the session knows already.
        is_attached: it was opened before, by somebody else: the first turn goes on with it.
    """

    def __init__(
        self,
        requests: Requests,
        clock: Callable[[], float] = time.monotonic,
        *,
        recovery: Recovery,
        transcript: Transcript | None = None,
        is_attached: bool = False,
    ) -> None:
        super().__init__(
            requests,
            clock,
            is_numbered=True,
            transcript=Transcript(recovery.max_transcript_bytes) if transcript is None else transcript,
        )
        self._recovery = recovery
        self._backoff = Backoff(recovery, clock)
        self._patience = Patience(recovery)
        self._retry_at = math.inf
        self._has_opened = self._must_learn = is_attached
        self._is_gone = False
        self._probe: PendingTurn | None = None
        self._replay: Replay | None = None
        self._loss: MicroturnError | None = None
        self._news: Resumed | None = None
        if is_attached:
            self.state = SessionState.BROKEN
            self._transcript.is_complete = False

    def begin_turn(self, tensor: InputTensor, options: Mapping[str, object], timeout_s: float) -> PendingTurn:
        """See ``SessionCore``."""
        if "turn" in options:
            raise InvalidArgument("the client numbers turns by itself; with recovery=None it does not")
        turn = super().begin_turn(tensor, options, timeout_s)
        if self._news is not None:
            turn.announce(self._news)
            self._news = None
        return turn

    def _check_usable(self) -> None:
        super()._check_usable()
        if self.state is SessionState.BROKEN and self._retry_at == math.inf:  # it had given up, or was not needed
            self._backoff.succeeded()
            self._retry_at = self._clock()
            self.tick()

    def _twin(self, requests: Requests) -> SessionCore:
        return DurableCore(requests, self._clock, recovery=self._recovery, transcript=self._transcript.copy())

    # ---- the session breaks --------------------------------------------------------------------------------------

    def connection_lost(self, error: MicroturnError) -> None:
        """See ``SessionCore``."""
        is_over = self._end is not None or self.state in (SessionState.CLOSED, SessionState.LOST, SessionState.GONE)
        if is_over or remedy_for(error, is_resuming=True, num_faults=1) is not Remedy.RESUME:
            super().connection_lost(error)
        elif self.state is not SessionState.BROKEN:
            self._break(error)

    def _break(self, error: MicroturnError) -> None:
        self._loss = self._loss or error
        self._leave_stream(self._backoff.next_attempt_at(error.retry_after_ms))
        if not self._has_opened and self._backoff.is_exhausted(self._recovery.give_up_opening_s):
            super().connection_lost(error)
        elif self._has_opened and self._backoff.is_exhausted(self._recovery.give_up_after_s):
            self._retry_at = math.inf
            for turn in list(self._outbox):
                turn.fail(error)
                turn.leave()
                self._outbox.remove_unsent(turn)

    def _leave_stream(self, retry_at: float) -> None:
        self._outbox.is_broken()
        self._cuts.is_broken()
        self._opener = None
        self._replay = None
        self.state = SessionState.BROKEN
        self._retry_at = retry_at

    def _refused(self, turn: PendingTurn, request_id: str, error: MicroturnError) -> None:
        if turn is self._end and isinstance(error, NotFound) and not self._end_resumes:
            # Triton may have ended the sequence of a session that lives; one END more tells.
            self._end_resumes = True
            self._outbox.is_answered(request_id)
            self._outbox.put(turn)
            return
        if turn is not self._end and self.state is not SessionState.GONE and self._is_survived(turn, error):
            return
        was_resuming = self.state is SessionState.RESUMING
        super()._refused(turn, request_id, error)
        if was_resuming and self._opener is None:
            self.state = SessionState.OPEN
            self._announce(True, "the session lives")

    def _is_survived(self, turn: PendingTurn, error: MicroturnError) -> bool:
        """Whether an error is one of the session rather than of the turn, and something is done about it."""
        is_resuming = turn is self._opener and self._has_opened
        remedy = remedy_for(error, is_resuming=is_resuming, num_faults=turn.num_faults)
        turn.num_faults += isinstance(error, InternalError)
        if turn.number is not None and isinstance(error, FailedPrecondition) and "turn" in error.details:
            # A gap is the outbox's to mend, but for a session of another past.
            remedy = Remedy.REOPEN if is_resuming else Remedy.TELL
        if not self._has_opened and isinstance(error, NotFound | Expired):
            is_orphan = "fork_of" in self.requests.options and len(self._transcript) > 0
            remedy = Remedy.REOPEN if is_orphan else Remedy.TELL
        if remedy is Remedy.TELL and self._replay is None:
            return False
        if self._replay is not None and isinstance(error, FailedPrecondition):
            remedy, error = Remedy.TELL, ModelChanged(error.message)  # nothing else is asked of what it finds there
        if remedy is Remedy.RESUME or (remedy is Remedy.REOPEN and self._replay is not None):
            self._break(error)
        elif self._replay is not None or not self._transcript.is_replayable:
            self.state = SessionState.GONE
            self._failure = error
            self._fail_all(error)
        else:
            self._break(error)
            self._is_gone = self._has_opened = True
            self._retry_at = self._clock()
        return True

    # ---- and goes on ---------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """See ``SessionCore``."""
        super().tick()
        now = self._clock()
        if self._silent_until <= now:
            self._patience.was_in_vain()
            self._leave_stream(retry_at=now)
        elif self.state is SessionState.BROKEN and self._retry_at <= now:
            self._try_again()

    @property
    def wake_at(self) -> float | None:
        """See ``SessionCore``."""
        if self.state is SessionState.BROKEN:
            return None if self._retry_at == math.inf else self._retry_at
        return self.keepalive_at if self._silent_until == math.inf else self._silent_until

    @property
    def wants_stream(self) -> bool:
        """See ``SessionCore``."""
        return self.state is not SessionState.BROKEN

    @property
    def _silent_until(self) -> float:
        """Up to when nothing need come; infinite while nothing is out, or the session is being closed."""
        if not self._outbox.has_sent_any or self._end is not None:
            return math.inf
        factor = _REPLAY_PATIENCE if self.state is SessionState.REPLAYING else 1.0
        return self._heard_at + factor * self._patience.seconds

    def _try_again(self) -> None:
        self.state = SessionState.RESUMING if self._has_opened else SessionState.NEW
        if self._is_gone:
            self._begin_replay(Replay(self._transcript))

    def _begin_replay(self, replay: Replay) -> None:
        start = self._start.result if self._start is not None else None
        self.requests.reopen_with(None if start is None else start.seed)
        self._replay = replay
        self.state = SessionState.REPLAYING
        if replay.is_done:
            self._end_replay(replay, SessionState.NEW)

    def _end_replay(self, replay: Replay, state: SessionState) -> None:
        self._replay = None
        self._start = None
        self._is_gone = False
        self._backoff.succeeded()
        self._outbox.replace_unsent(self._cuts.replan(), replay.num_turns)
        self.state = state
        self.context_len = len(self._transcript)
        self._announce(replay.is_exact, f"the session was opened anew with {self.context_len} tokens")

    def _next_request(self) -> ModelInferRequest | None:
        if self.state is SessionState.BROKEN:
            return None
        if self.state is SessionState.REPLAYING:
            return None if self._opener is not None else self._next_of_replay()
        if self.state is SessionState.RESUMING and self._opener is None:
            return self._resume()
        return super()._next_request()

    def _resume(self) -> ModelInferRequest:
        """The first turn without an answer, if it was sent before; else one that only asks how the session is."""
        turn = self._outbox.next_turn()
        if turn is None or turn.number is None:
            turn = self._probe = PendingTurn.keepalive()
            self._outbox.put_first([turn])
        self._outbox.number(turn)
        self._opener = turn
        # Numbers count from START. A first turn that an interrupt has undone is said again under another one.
        request = self.requests.start(turn) if turn.number == 0 else self.requests.resume(turn)
        self._outbox.has_sent(turn, request.id)
        return request

    def _next_of_replay(self) -> ModelInferRequest | None:
        assert self._replay is not None
        self._opener = turn = self._replay.next_turn()
        request = self.requests.start(turn) if self._replay.is_at_start else self.requests.later(turn)
        self._outbox.has_sent(turn, request.id)
        return request

    def _opened(self, turn: PendingTurn) -> None:
        if self.state is SessionState.REPLAYING:
            return  # one turn at a time
        self._backoff.succeeded()
        was_lost = self.state is SessionState.RESUMING
        super()._opened(turn)
        self._has_opened = True
        if was_lost and not turn.is_passing:
            self._announce(True, "the session lives")

    def _answered(self, turn: PendingTurn, response: Response) -> None:
        super()._answered(turn, response)
        status = response.status
        assert status is not None
        if status.model_fingerprint is not None:
            self.requests.model_fingerprint = status.model_fingerprint
        if turn.is_passing and status.rebuilt:
            self._announce(REBUILT.exact, REBUILT.reason)  # nobody reads this turn's own events
        if self._replay is not None and turn.is_passing:
            self._has_told(self._replay, turn, status.appended_ids or ())
            return
        self._patience.renew()
        if turn is self._probe:
            self._has_asked(status.turn, status.context_len)

    def _has_told(self, replay: Replay, turn: PendingTurn, appended_ids: tuple[int, ...]) -> None:
        self._opener = None
        replay.has_told(turn.tensor, appended_ids, turn.ids)
        if not replay.is_done:
            return
        by_ids = replay.by_ids()
        if replay.is_right or by_ids is None:
            self._end_replay(replay, SessionState.OPEN)
        else:
            self._begin_replay(by_ids)

    def _has_asked(self, next_number: int, context_len: int) -> None:
        """What the session says of itself after a loss: it must be the one that we know."""
        if self._must_learn:
            self._must_learn = False
            self._loss = None
            self._transcript.begin_at(context_len)
            self._outbox.next_number = next_number
        elif (next_number, context_len) == (self._outbox.next_number, len(self._transcript)):
            self._announce(True, "the session lives")
        elif self._transcript.is_replayable:
            self._break(NotFound("the server's session is not the one that was left there"))
            self._is_gone = True
        else:
            self._transcript.begin_at(context_len)
            self._outbox.next_number = next_number
            self._announce(False, "the session has changed meanwhile")

    def _announce(self, exact: bool, what: str) -> None:
        loss, self._loss = self._loss, None
        if loss is None and exact:
            return  # it was asked for again, and nothing had happened
        event = Resumed(exact, what if loss is None else f"{what}, after: {loss}")
        reader = next((turn for turn in self._outbox if turn.has_reader), None)
        if reader is None:
            self._news = event
        else:
            reader.announce(event)
