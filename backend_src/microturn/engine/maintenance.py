"""What is done with sessions besides their turns: they are listed, copied, restored and quiesced.

All of it on the engine's thread, between two steps: see `Engine.call`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from microturn.engine.described import described
from microturn.engine.gauges import Gauges
from microturn.engine.lifecycle import Lifecycle
from microturn.engine.moving import Held, Load, Mark, Saving, mark_of
from microturn.engine.preparation import Preparation
from microturn.engine.request_handler import RequestHandler
from microturn.errors import FailedPrecondition, NotFound, Unavailable
from microturn.kv.table_state import TableState
from microturn.offload.copies import Copying, KVCopies
from microturn.sessions.environment import SessionEnvironment
from microturn.sessions.intake import undo_end
from microturn.sessions.ownership import owns
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable, moved
from microturn.sessions.turn import SessionId
from microturn.snapshots.arrivals import Arrivals
from microturn.snapshots.restoring import RestoredSession
from microturn.snapshots.snapshot import Header
from microturn.telemetry.families import Sample


class Maintenance:
    """An engine's sessions, for the operator.

    Attributes:
        arrivals: restores saved sessions.
        copies: of their KV; see `begin_copying`.
        is_stopped: whether `stop` was called.

    Args:
        sessions: those that live.
        lifecycle: knows which have a turn.
        request_handler: accepts turns.
        preparation: has the turns that wait to be received.
        arrivals: see above.
        environment: what saved sessions find here.
        copies: see above.
        gauges: say how things stand.
        bytes_per_page: what a page of KV takes.
    """

    def __init__(
        self,
        sessions: SessionTable,
        lifecycle: Lifecycle,
        request_handler: RequestHandler,
        preparation: Preparation,
        arrivals: Arrivals,
        environment: SessionEnvironment,
        copies: KVCopies,
        gauges: Gauges,
        bytes_per_page: int,
    ) -> None:
        self._sessions = sessions
        self._lifecycle = lifecycle
        self._request_handler = request_handler
        self._preparation = preparation
        self.arrivals = arrivals
        self._environment = environment
        self.copies = copies
        self._gauges = gauges
        self._bytes_per_page = bytes_per_page
        self.is_stopped = False

    def describe(self) -> list[dict[str, Any]]:
        """The living sessions, the oldest first, as `json.dumps` takes them."""
        now_s = self._environment.clock()
        sessions = sorted(self._sessions, key=lambda session: session.opened_s)
        return [described(session, now_s, self._bytes_per_page) for session in sessions]

    def measure(self) -> dict[Sample, float]:
        """All metrics as of now."""
        handler = self._request_handler
        return self._gauges.read(is_draining=handler.is_leaving or handler.is_draining)

    def copy(self, name: str) -> Session:
        """A session as of its last committed point, of an epoch of its own.

        Args:
            name: its id, written as text.

        Raises:
            NotFound: no such session lives here.
        """
        session = self._sessions.find(self._sessions.id_named(name))
        if session is None or session.is_closing:
            raise NotFound(f"no session '{name}' is here")
        return self._resting(session)

    def _resting(self, session: Session) -> Session:
        copy = session.at_rest(self._environment.new_table(session.window))
        copy.epoch = session.epoch + 1
        return copy

    def begin_copying(self, session_id: SessionId) -> Copying | None:
        """Begins to copy a session's KV as of its last committed point; None when it has none, or is not here."""
        session = self._sessions.find(session_id)
        return None if session is None else self.copies.begin(session)

    def lives(self, session_id: SessionId) -> bool:
        """Whether a session is here."""
        return self._sessions.find(session_id) is not None

    def epoch_of(self, session_id: SessionId, key: str | None, tenant: str | None) -> int | None:
        """The epoch of a client's session; None if it is not here, or another client's."""
        session = self._sessions.find(session_id)
        return session.epoch if session is not None and owns(session, key, tenant) else None

    @property
    def load(self) -> Load:
        """How much is here."""
        handler = self._request_handler
        met, missed = self._gauges.deadlines
        return Load(
            num_sessions=self._sessions.num_places,
            max_sessions=self._environment.settings.max_sessions,
            is_leaving=handler.is_leaving or handler.is_draining,
            free_bytes=self._gauges.free_bytes,
            deadlines_met=met,
            deadlines_missed=missed,
        )

    def bump_epoch(self, copy: Session) -> None:
        """Raises the epoch of a session that goes on here after a copy of it was saved: the copy is out of date."""
        session = self._sessions.find(copy.id)
        if session is not None:
            session.epoch = max(session.epoch, copy.epoch)

    def changed(self, marks: Mapping[SessionId, Mark]) -> list[SessionId]:
        """The sessions that have had a turn since they were marked by `begin_saving`."""
        begun = [session for session in self._sessions if session.committed_len]
        return [session.id for session in begun if marks.get(session.id) != mark_of(session)]

    def begin_saving(self, session_id: SessionId, last: Mark | None, before: TableState | None) -> Saving | None:
        """Begins to save a session that goes on here, as of its last committed point; None if it is not here.

        Args:
            session_id: of the session.
            last: the point that was saved last of a session of this id; None if none was.
            before: of the KV that was saved then; None if all of it is to be copied.
        """
        session = self._sessions.find(session_id)
        if session is None or session.is_closing or session.held_as is not None:
            return None
        copy = self._resting(session)
        session.epoch = copy.epoch
        is_same = last is not None and last.base_epoch == session.base_epoch
        num_before = self.copies.num_unchanged(session, before) if is_same and before is not None else 0
        copying = self.copies.begin(session, num_before)
        session.kv_floor = session.kv_len
        return Saving(copy, copying, mark_of(session))

    def release_moved(self, copy: Session) -> None:
        """Ends a session whose copy lives on elsewhere. A turn that is paused is done again there, if it is asked for.

        Raises:
            FailedPrecondition: it has gone on since it was copied, or is about to.
        """
        session = self._sessions.find(copy.id)
        # Every turn that changes something is activity, and one that came back to where it was has changed nothing.
        if session is None or not session.rests or session.last_activity_s != copy.last_activity_s:
            raise FailedPrecondition(f"session '{copy.id}' has a turn: try again")
        self._lifecycle.end(session, "moved", moved())

    # ---- sessions are handed over --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Opens no more sessions but branches, and restores none; those that live go on until they are handed over."""
        self._request_handler.is_leaving = True

    def next_resting(self, but: Container[SessionId] = ()) -> SessionId | None:
        """The session that rests and was active last, other than those named; None if none rests."""
        resting = [session for session in self._sessions if session.rests and session.id not in but]
        return max(resting, key=lambda session: session.last_activity_s).id if resting else None

    def hold(self, session_id: SessionId, before: Copying | None = None) -> Held | None:
        """Holds a session that rests: from now on its turns wait, until `hand_over` or `let_go`.

        A turn that is paused is undone where the session is handed over, and done again there.

        Args:
            session_id: of the session.
            before: an earlier copy of its KV, complete and not ended: what it has of it still is not copied again.

        Returns:
            What is held; None if it does not rest, or is not here.
        """
        session = self._sessions.find(session_id)
        if session is None or not session.rests:
            return None
        num_before = 0 if before is None else self.copies.num_kept(session, before)
        copy, copying = self._resting(session), self.copies.begin(session, num_before)
        if copying is not None and self.copies.advance(copying):
            self.copies.end(copying)
        session.held_as = copy.epoch
        return Held(copy, copying, session.epoch)

    def hand_over(self, copy: Session, route: str | None = None) -> bool:
        """Ends a held session whose copy can be taken up elsewhere; False if it is not any more what was copied.

        It has ended by itself, or its paused turn has: an interrupt and a deadline do not wait.

        Args:
            copy: what `hold` returned.
            route: to the server that has it; None where it is not known which one will.
        """
        session = self._held(copy)
        if session is None:
            return False
        # An END that waits is told to go elsewhere; one that was refused has nothing to wait for.
        is_over = session.is_closing and not session.queued
        if is_over or mark_of(session) != mark_of(copy):
            self.let_go(copy)
            return False
        self._lifecycle.end(session, "moved", moved(route), route)
        return True

    def let_go(self, copy: Session, *, has_copy: bool = True) -> None:
        """A held session goes on here; where its copy may be elsewhere, that is out of date."""
        session = self._held(copy)
        if session is not None:
            session.epoch = copy.epoch + 1 if has_copy else session.epoch
            session.held_as = None
            self._lifecycle.advance(session)

    def _held(self, copy: Session) -> Session | None:
        """The session that is held for a copy; None if it has ended, or another has begun under its id."""
        session = self._sessions.find(copy.id)
        return session if session is not None and session.held_as == copy.epoch else None

    def receive(self, taken: RestoredSession, header: Header, epoch_before: int) -> None:
        """Takes a session that another server hands over: see `Arrivals.receive`.

        Raises:
            Unavailable: this server is about to stop.
        """
        if self._request_handler.is_leaving or self._request_handler.is_draining:
            raise Unavailable("this server is stopping: hand the session over to another")
        self.arrivals.receive(taken, header, epoch_before)

    def drop(self, session_id: SessionId, mark: Mark) -> bool:
        """Ends a session as it was handed over, since it goes on where it was.

        Returns:
            Whether it goes on here instead: it has, or has had, a turn since it came.
        """
        session = self._sessions.find(session_id)
        if session is None or session.base_epoch != mark.base_epoch:
            return False
        if not session.rests or mark_of(session) != mark:
            return True
        self._lifecycle.end(session, "moved", moved())
        return False

    # ---- the server stops ----------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes no more turns; those that are here go on."""
        self._request_handler.is_draining = True

    @property
    def is_busy(self) -> bool:
        """Whether any session has a turn, is held, or is about to be restored."""
        is_held = any(session.held_as is not None for session in self._sessions)
        return bool(self._lifecycle.running) or is_held or self._preparation.is_busy

    def quiesce(self) -> list[Session]:
        """Returns every session as of its last committed point.

        Turns that still ran or waited are told that nothing of them was appended, END among them.
        """
        self._preparation.fail_all(_going_away())
        for session in list(self._sessions):
            for turn in session.open_turns:
                undo_end(session, turn)
            while session.queued:
                session.queued.popleft().fail(_going_away())
            if session.running is not None:
                self._lifecycle.fail(session, session.running, _going_away())
        return [self._resting(session) for session in self._sessions]

    def stop(self) -> None:
        """Stops the engine once this task is done; its turns end with UNAVAILABLE."""
        self.is_stopped = True


def _going_away() -> Unavailable:
    return Unavailable(
        "the server is stopping, nothing was appended: come back, or go elsewhere, with START and resume"
    )
