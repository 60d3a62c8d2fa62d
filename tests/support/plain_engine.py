"""The engine in plain lists: what its sessions must hold, and what every turn must be told.

It hears what the real engine hears: turns, clients that leave, the clock. From the real engine it learns one thing
alone: how far a running turn has come, since that is the scheduler's choice. All else it says by itself, from the wire
contract. It knows no pages, no batches and no threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId
from support.driver import Recorder
from support.fake_runner import VOCAB_SIZE
from support.plain_session import LatestClock, PlainSession
from support.plain_turn import Ending, Limits, PlainTurn, Refused

MAX_SESSIONS = 4


class PlainEngine:
    """All sessions.

    Attributes:
        sessions: those that live.
        saved: those that rest in files, to be taken up again.
        is_leaving: sessions go elsewhere one by one; those that live here go on until then.
        is_draining: no turn is taken any more.
        num_coming: how many sessions are being looked for, each of which has a place.

    Args:
        clock: the engine's.
        find: gives the real engine's session of an id, if it has one.
        limits: of the server.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        find: Callable[[SessionId], Session | None],
        limits: Limits | None = None,
    ) -> None:
        self.sessions: dict[SessionId, PlainSession] = {}
        self.limits = limits or Limits(max_sessions=MAX_SESSIONS)
        self.saved: dict[SessionId, PlainSession] = {}
        self.is_leaving = False
        self.is_draining = False
        self.num_coming: Callable[[], int] = lambda: 0
        self._clock = LatestClock(clock)
        self._find = find
        # By the id of a session that has ended: what who comes back is told, and the key that it needs.
        self._ended: dict[SessionId, tuple[str, str | None]] = {}
        self._unanswered: list[PlainTurn] = []
        # Clients that left a numbered turn, and how much they had been told.
        self._gone: list[tuple[Recorder, int]] = []

    @property
    def num_open(self) -> int:
        return sum(len(session.open) for session in self.sessions.values())

    @property
    def num_heard(self) -> int:
        """Those of sessions that compute."""
        return sum(len(session.open) for session in self.sessions.values() if not session.is_paused)

    def arrive(self, turn: PlainTurn) -> None:
        """A turn is taken, or refused."""
        self._clock()
        ask, session = turn.ask, self.sessions.get(turn.ask.session_id)
        turn.inherit(ask if ask.opens or session is None else session.defaults)
        try:
            self._receive(turn)
        except Refused as refusal:
            turn.ending = refusal.ending
            session = None if turn.ending.code == "UNAVAILABLE" else self.sessions.get(ask.session_id)
            if session is not None and ask.end and not ask.opens and ask.session_key == session.key:
                session.close(at_once=turn.interrupts)
        if turn.recorders:
            self._unanswered.append(turn)
        self._forget_closed()

    def leave(self, turn: PlainTurn) -> None:
        """The client of a turn goes, whatever has become of the turn."""
        if turn.ask.turn is not None:
            self._gone.append((turn.recorder, len(turn.recorder.outputs)))
        for session in self.sessions.values():
            session.leave(turn)
        self._forget_closed()

    def pass_time(self) -> None:
        """The clock shows another time: deadlines pass, and idle sessions expire."""
        now_s = self._clock()
        for session_id, session in list(self.sessions.items()):
            session.end_late_turns()
            is_idle = (session.is_paused or not session.open) and session.last_activity_s + self.limits.idle_s <= now_s
            # Between the two, where the clock was set back, it is the engine's choice.
            if is_idle and (session.expired_s <= now_s or self._find(session_id) is None):
                self._end(session_id, "EXPIRED")
        self._forget_closed()

    def listen(self, *, pass_failed: bool) -> None:
        """Hears what came of a forward pass."""
        num_failed = 0
        for session_id, session in self.sessions.items():
            real = self._find(session_id)
            num_failed += session.listen([] if real is None else real.open_turns, pass_failed=pass_failed)
        assert bool(num_failed) == pass_failed, "a forward pass failed, and nobody was told"
        self._forget_closed()

    def take_up(self, session_id: SessionId) -> None:
        """A saved session lives again."""
        self._ended.pop(session_id, None)
        self.sessions[session_id] = self.saved.pop(session_id).restored(self._clock)

    def close_refused(self, session_id: SessionId, *, at_once: bool) -> None:
        """END came with a turn that was refused before it was taken."""
        if session_id in self.sessions:
            self.sessions[session_id].close(at_once=at_once)
            self._forget_closed()

    def hold(self, session_id: SessionId) -> None:
        """A session is being saved: its turns wait."""
        self.sessions[session_id].is_held = True

    def hand_over(self, session_id: SessionId) -> None:
        """It is saved, and ends here."""
        session = self.sessions[session_id]
        session.undo_all(Ending(code="UNAVAILABLE"))
        self.saved[session_id] = session
        self._end(session_id, "NOT_FOUND")

    def let_go(self, session_id: SessionId) -> None:
        """It goes on here."""
        if session_id in self.sessions:
            self.sessions[session_id].is_held = False
            self.sessions[session_id].advance()
            self._forget_closed()

    def quiesce(self) -> None:
        """What is not done is undone, and every session is saved."""
        for session in self.sessions.values():
            session.undo_all(Ending(code="UNAVAILABLE"))
        self._forget_closed()
        self.saved |= self.sessions

    def stop(self) -> None:
        """The engine stops."""
        for session in self.sessions.values():
            for turn in session.open:
                turn.ending = Ending(code="UNAVAILABLE")

    def check_answers(self) -> None:
        """Asserts that everybody was told what they must be told by now, and no more."""
        for turn in self._unanswered:
            turn.check()
        self._unanswered = [turn for turn in self._unanswered if turn.ending is None]
        assert all(len(recorder.outputs) == num_told for recorder, num_told in self._gone), "nobody listens any more"

    def _receive(self, turn: PlainTurn) -> None:
        ask = turn.ask
        if self.is_draining or (self.is_leaving and ask.session_id not in self.sessions):
            raise Refused("UNAVAILABLE")
        if ask.refusal:
            raise Refused(ask.refusal)
        if any(isinstance(token, int) and not 0 <= token < VOCAB_SIZE for token in ask.given):
            raise Refused("INVALID_ARGUMENT")
        session = self.sessions.get(ask.session_id)
        if session is None and not ask.opens:
            code, key = self._ended.get(ask.session_id, ("NOT_FOUND", None))
            raise Refused(code if key == ask.session_key else "NOT_FOUND")
        if session is not None:
            if ask.session_key != session.key:
                raise Refused("PERMISSION_DENIED")
            if ask.is_of_session and not ask.opens:
                raise Refused("INVALID_ARGUMENT")
            if session.is_repetition(turn):
                return
        if ask.opens:
            self._open(turn, session)
        else:
            assert session is not None
            session.receive(turn)

    def _open(self, turn: PlainTurn, replaced: PlainSession | None) -> None:
        ask = turn.ask
        if ask.turn not in (None, 0):
            raise Refused("INVALID_ARGUMENT")
        if replaced is None and len(self.sessions) + self.num_coming() >= self.limits.max_sessions:
            raise Refused("RESOURCE_EXHAUSTED", retry_after_ms=1000)
        session = self._new_session(turn)
        # It proves itself valid before it resets anything.
        session.told.take_in(turn, ask.max_tokens)
        turn.check_time(self._clock())
        if replaced is not None:
            replaced.reset()
        self.sessions[ask.session_id] = session
        self._ended.pop(ask.session_id, None)
        session.accept(turn)
        session.advance()

    def _new_session(self, turn: PlainTurn) -> PlainSession:
        ask = turn.ask
        if ask.fork_of is None:
            if ask.is_windowed and self.limits.window is None:
                raise Refused("INVALID_ARGUMENT")
            return PlainSession(ask, self._clock, turn.arrived_s, self.limits)
        parent = self.sessions.get(ask.fork_of)
        if parent is None:
            code, key = self._ended.get(ask.fork_of, ("NOT_FOUND", None))
            raise Refused(code if key == ask.session_key else "NOT_FOUND")
        if parent.key != ask.session_key:
            raise Refused("PERMISSION_DENIED")
        if ask.fork_of == ask.session_id or ask.is_windowed:
            raise Refused("INVALID_ARGUMENT")
        branch = PlainSession(ask.on_top_of(parent.defaults), self._clock, turn.arrived_s, self.limits)
        branch.told = replace(parent.told, num_turns=0, sight=replace(parent.told.sight))
        turn.inherit(branch.defaults)
        return branch

    def _forget_closed(self) -> None:
        for session_id, session in list(self.sessions.items()):
            if session.is_closing and not session.open:
                self._end(session_id, "NOT_FOUND")

    def _end(self, session_id: int, code: str) -> None:
        self._ended[session_id] = code, self.sessions.pop(session_id).key
