"""A session that outlives its stream and its server: goes on where it still lives, or opens it anew and tells it all.

    OPEN ──the stream broke, or the server takes no turns──► BROKEN ──a while later──► RESUMING ──it lives──► OPEN
                                                              ▲  ▲                      │  │
                                                              │  └──no answer either────┤  │ it is behind: catching up
                                                              │              it is gone ▼  ▼
                                                              └────────────────────── REPLAYING ──all told──► OPEN

A restored session may be some turns behind. If the number of its next turn and the length of its context are those of
a point of the transcript, it is told what comes after that point, else it is opened anew. A turn that is refused for a
gap says the number alone, so an empty turn asks for both.

A stream may also die without a word, and an answer be lost on one that lives. So where nothing comes, the session is
gone on with on a new stream, and on another after twice that time. A server that is only slow has the turns by their
numbers and goes on with them; no reader hears of it.

Turns have numbers, so one that is sent again is not done again. What was on the wire is sent again: to a session that
lives under its number; to one that was opened anew behind the transcript, where it comes out the same, since sampling
depends on the context, the seed and the position alone. Either way its reader gets what it has not got yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from microturn_client import _log
from microturn_client._errors import Expired, FailedPrecondition, InternalError, MicroturnError, ModelChanged, NotFound
from microturn_client._events import REBUILT, Resumed, Status
from microturn_client._lifecycle import SessionState
from microturn_client._messages_pb2 import ModelInferRequest
from microturn_client._pending_turn import PendingTurn
from microturn_client._replay import Replay
from microturn_client._retry import Backoff, Patience, Recovery, Remedy, remedy_for

if TYPE_CHECKING:
    from microturn_client._session_core import SessionCore

# What is told to a session that is opened anew has no numbers: asked for again, it is begun again. And it is long.
_REPLAY_PATIENCE = 6.0


class Survival:
    """What one session does about failures; its core asks it, and hands itself in.

    Args:
        recovery: how long and how often it tries.
        clock: seconds, monotonic.
        is_attached: it was opened before, by another client: the first turn goes on with it.
    """

    def __init__(self, recovery: Recovery, clock: Callable[[], float], *, is_attached: bool) -> None:
        self._recovery = recovery
        self._backoff = Backoff(recovery, clock)
        self._patience = Patience(recovery)
        self._retry_at = math.inf
        self._has_opened = self._must_learn = is_attached
        self._must_ask = False  # since turns may have other numbers there than here
        self._is_gone = False
        self._probe: PendingTurn | None = None
        self._replay: Replay | None = None
        self._loss: MicroturnError | None = None

    @property
    def is_telling(self) -> bool:
        """Whether the server has yet to be told what it has lost of the session."""
        return self._is_gone or self._replay is not None

    def revive(self, core: SessionCore) -> None:
        """A turn is begun: tries again where it had given up, or was not needed."""
        if core.lifecycle.state is SessionState.BROKEN and self._retry_at == math.inf:
            self._backoff.succeeded()
            self._retry_at = core.clock()
            core.tick()

    # ---- the session breaks --------------------------------------------------------------------------------------

    def outlives(self, core: SessionCore, error: MicroturnError) -> bool:
        """Whether the session goes on after its stream was lost; sees to it."""
        remedy = remedy_for(error, is_resuming=True, num_faults=1)
        if not core.lifecycle.takes_turns or remedy is not Remedy.RESUME:
            return False
        if core.lifecycle.state is not SessionState.BROKEN:
            self._break(core, error)
        return True

    def _break(self, core: SessionCore, error: MicroturnError) -> None:
        _log.no_stream(core.id, error, is_first=self._loss is None)
        self._loss = self._loss or error
        core.requests.route = error.route or core.requests.route
        self._leave_stream(core, self._backoff.next_attempt_at(error.retry_after_ms, error.route))
        if not self._has_opened and self._backoff.is_exhausted(self._recovery.give_up_opening_s):
            core.lifecycle.lose(error)
        elif self._has_opened and self._backoff.is_exhausted(self._recovery.give_up_after_s):
            self._retry_at = math.inf
            _log.is_lost(core.id, error)
            for turn in list(core.outbox):
                core.outbox.give_up(turn, error)

    def _leave_stream(self, core: SessionCore, retry_at: float) -> None:
        core.outbox.is_broken()
        core.cuts.is_unsent()
        core.lifecycle.opener = None
        core.lifecycle.state = SessionState.BROKEN
        self._replay = None
        self._retry_at = retry_at

    def is_remedied(self, core: SessionCore, turn: PendingTurn, request_id: str, error: MicroturnError) -> bool:
        """Whether an error is one of the session rather than of the turn, and something is done about it."""
        if turn is not core.lifecycle.end:
            return core.lifecycle.state is not SessionState.GONE and self._is_survived(core, turn, error)
        if core.lifecycle.end_resumes or not isinstance(error, NotFound):
            return False
        # Triton may have ended the sequence of a session that lives; one END more tells.
        core.lifecycle.end_resumes = True
        core.outbox.is_answered(request_id)
        core.outbox.put(turn)
        return True

    def _is_survived(self, core: SessionCore, turn: PendingTurn, error: MicroturnError) -> bool:
        is_resuming = turn is core.lifecycle.opener and self._has_opened
        remedy = remedy_for(error, is_resuming=is_resuming, num_faults=turn.num_faults)
        turn.num_faults += isinstance(error, InternalError)
        if turn.number is not None and isinstance(error, FailedPrecondition) and "turn" in error.details:
            # A gap is the outbox's to mend, but for a session of another past.
            if is_resuming and core.transcript.has_point(error.details["turn"]):
                self._must_ask = True
                self._leave_stream(core, retry_at=core.clock())
                return True
            remedy = Remedy.REOPEN if is_resuming else Remedy.TELL
        if not self._has_opened and isinstance(error, NotFound | Expired | FailedPrecondition):
            is_orphan = "fork_of" in core.requests.options and len(core.transcript) > 0
            remedy = Remedy.REOPEN if is_orphan else Remedy.TELL
        if remedy is Remedy.TELL and self._replay is None:
            return False
        is_opening_anew = self._replay is not None and self._replay.is_anew
        if self._replay is not None and isinstance(error, FailedPrecondition):
            remedy = Remedy.TELL
            error = ModelChanged(error.message) if is_opening_anew else error  # it asks nothing else of the server
        if remedy is Remedy.RESUME or (remedy is Remedy.REOPEN and self._replay is not None):
            self._break(core, error)
        elif is_opening_anew or not core.transcript.is_replayable:
            core.lifecycle.has_gone(error)
            core.lifecycle.fail_all(error)
        else:
            self.reopen(core, error)
        return True

    def reopen(self, core: SessionCore, error: MicroturnError) -> None:
        """The server has no such session: it is opened anew, and told all that is known here."""
        self._break(core, error)
        self._is_gone = self._has_opened = True
        self._retry_at = core.clock()

    # ---- and goes on ---------------------------------------------------------------------------------------------

    def tick(self, core: SessionCore) -> None:
        """Does what is due."""
        now = core.clock()
        if self._silent_until(core) <= now:
            self._patience.was_in_vain()
            self._leave_stream(core, retry_at=now)
        elif core.lifecycle.state is SessionState.BROKEN and self._retry_at <= now:
            core.lifecycle.state = SessionState.RESUMING if self._has_opened else SessionState.NEW
            if self._is_gone:
                self._begin_replay(core, Replay(core.transcript))

    def wake_at(self, core: SessionCore) -> float | None:
        """When something is due; None while nothing is."""
        if core.lifecycle.state is SessionState.BROKEN:
            return None if self._retry_at == math.inf else self._retry_at
        silent_until = self._silent_until(core)
        return core.keepalive_at if silent_until == math.inf else silent_until

    def _silent_until(self, core: SessionCore) -> float:
        """Up to when nothing need come; infinite while nothing is out, or the session is being closed."""
        if not core.outbox.has_sent_any or core.lifecycle.end is not None:
            return math.inf
        factor = _REPLAY_PATIENCE if core.lifecycle.state is SessionState.REPLAYING else 1.0
        return core.heard_at + factor * self._patience.seconds

    def _begin_replay(self, core: SessionCore, replay: Replay) -> None:
        if replay.is_anew:
            core.requests.reopen_with(core.lifecycle.seed)
            core.lifecycle.has_begun = True
        self._replay = replay
        self._is_gone, self._must_ask = replay.is_anew, True
        core.transcript.keep_points_up_to(replay.first_number)
        core.lifecycle.state = SessionState.REPLAYING
        if replay.is_done:
            self._end_replay(core, replay)

    def _end_replay(self, core: SessionCore, replay: Replay) -> None:
        self._replay = None
        self._is_gone = self._must_ask = False
        self._backoff.succeeded()
        core.outbox.replace_unsent(core.cuts.replan(), replay.next_number)
        core.lifecycle.state = SessionState.OPEN if replay.next_number else SessionState.NEW
        core.context_len = len(core.transcript)
        core.transcript.add_point(replay.next_number)
        if not replay.is_anew and replay.next_number == replay.first_number:
            self.lives(core)
        else:
            self._announce(core, replay.what, same_tokens=replay.is_exact, same_numerics=replay.num_tokens == 0)

    def next_request(self, core: SessionCore) -> ModelInferRequest:
        """What is sent first on a new stream, or next of a replay."""
        requests, replay = core.requests, self._replay
        if replay is not None:
            turn = replay.next_turn()
            request = requests.start(turn) if replay.next_number == 0 else requests.later(turn)
        else:
            turn = self._first_to_resume(core)
            # Numbers count from START. A first turn that an interrupt has undone is said again under another one.
            request = requests.start(turn) if turn.number == 0 else requests.resume(turn)
        core.lifecycle.opener = turn
        core.outbox.has_sent(turn, request.id)
        return request

    def _first_to_resume(self, core: SessionCore) -> PendingTurn:
        """The first turn without an answer, if it was sent before; else one that only asks how the session is."""
        turn = core.outbox.next_turn()
        if turn is None or turn.number is None or self._must_ask:
            turn = self._probe = PendingTurn.keepalive()
        core.outbox.number(turn)
        return turn

    def has_opened(self, core: SessionCore, turn: PendingTurn, *, was_resuming: bool) -> None:
        """The session is open, new or after a loss: the first answer to ``turn`` came."""
        if turn is not self._probe:
            self._backoff.succeeded()
        self._has_opened = True
        if was_resuming and not turn.is_passing:
            self.lives(core)

    def was_answered(self, core: SessionCore, turn: PendingTurn, status: Status) -> None:
        """A turn has ended well."""
        if status.model_fingerprint is not None:
            core.requests.model_fingerprint = status.model_fingerprint
        if turn.is_passing and status.rebuilt:
            # Nobody reads this turn's own events.
            self._announce(core, REBUILT.reason, same_tokens=False, same_numerics=False)
        if self._replay is not None and turn.is_passing:
            self._has_told(core, self._replay, turn, status.appended_ids or ())
            return
        self._patience.renew()
        if turn is self._probe:
            self._has_asked(core, status.turn, status.context_len)

    def _has_told(self, core: SessionCore, replay: Replay, turn: PendingTurn, appended_ids: tuple[int, ...]) -> None:
        core.lifecycle.opener = None
        replay.has_told(turn.tensor, appended_ids, turn.ids)
        if not replay.is_done:
            return
        another = None if replay.is_right else replay.another
        if another is None:
            self._end_replay(core, replay)
        else:
            self._begin_replay(core, another)

    def _has_asked(self, core: SessionCore, next_number: int, context_len: int) -> None:
        """What the session says of itself after a loss: it must be the one that we know, or what that was before."""
        is_known = (next_number, context_len) == (core.outbox.next_number, len(core.transcript)) and not self._must_ask
        num_known = core.transcript.num_known(next_number, context_len)
        if num_known is not None and not is_known:
            self._begin_replay(core, Replay(core.transcript, first_number=next_number, num_known=num_known))
            return
        self._must_ask = False
        self._backoff.succeeded()
        if self._must_learn:
            self._must_learn = False
            self._loss = None
            core.transcript.begin_at(context_len)
            core.outbox.next_number = next_number
        elif is_known:
            self.lives(core)
        elif core.transcript.is_replayable:
            self._break(core, NotFound("the server's session is not the one that was left there"))
            self._is_gone = True
        else:
            core.transcript.begin_at(context_len)
            core.outbox.next_number = next_number
            self._announce(core, "the session has changed meanwhile", same_tokens=False, same_numerics=False)

    def lives(self, core: SessionCore) -> None:
        """The server still had the session after a loss, if there was one."""
        if self._loss is not None:
            self._announce(core, "the session lives", same_tokens=True, same_numerics=True)

    def _announce(self, core: SessionCore, what: str, *, same_tokens: bool, same_numerics: bool) -> None:
        loss, self._loss = self._loss, None
        _log.goes_on(core.id, is_same=same_tokens, reason=what)
        reason = what if loss is None else f"{what}, after: {loss}"
        core.news.happened(Resumed(same_tokens, same_numerics, reason), core.outbox)
