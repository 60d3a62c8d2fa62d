"""What is done with sessions besides their turns: they are listed, copied, taken up and put to rest.

All of it on the engine's thread, between two steps: see `Engine.call`. Knows no files and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from microturn.errors import FailedPrecondition, NotFound, Unavailable
from microturn.lifecycle import Lifecycle
from microturn.preparation import Preparation
from microturn.reception import Reception
from microturn.session import Session
from microturn.session_table import SessionTable
from microturn.snapshots.arrivals import Arrivals
from microturn.snapshots.look_up import TakenUp
from microturn.snapshots.session_state import Host
from microturn.snapshots.snapshot import Header, next_epoch
from microturn.telemetry.families import Sample
from microturn.telemetry.gauges import Gauges
from microturn.tiers.copies import Copying, KVCopies
from microturn.turn import SessionId


class Housekeeping:
    """An engine's sessions, for who looks after the server.

    Attributes:
        copies: of their KV; see `begin_copying`.

    Args:
        sessions: those that live.
        lifecycle: knows which have a turn.
        reception: takes turns in.
        preparation: has those that it has not got yet.
        arrivals: takes saved sessions up.
        host: what saved sessions find here.
        copies: see above.
        gauges: say how things stand.
        bytes_per_page: what a page of KV takes.
        stop: stops the engine, and ends its turns.
    """

    def __init__(
        self,
        sessions: SessionTable,
        lifecycle: Lifecycle,
        reception: Reception,
        preparation: Preparation,
        arrivals: Arrivals,
        host: Host,
        copies: KVCopies,
        gauges: Gauges,
        bytes_per_page: int,
        stop: Callable[[], None],
    ) -> None:
        self._sessions = sessions
        self._lifecycle = lifecycle
        self._reception = reception
        self._preparation = preparation
        self._arrivals = arrivals
        self._host = host
        self.copies = copies
        self._gauges = gauges
        self._bytes_per_page = bytes_per_page
        self._stop = stop

    def describe(self) -> list[dict[str, Any]]:
        """The living sessions, the oldest first, as `json.dumps` takes them."""
        now_s = self._host.clock()
        return [
            {
                "id": session.id,
                "context_len": len(session.context),
                "kv_len": session.kv_len,
                "num_pages": session.table.num_pages,
                "kv": session.kv_place,
                "bytes": self._bytes_of(session),
                "state": session.state,
                "num_turns": session.num_turns,
                "num_queued": len(session.queued),
                "age_s": round(now_s - session.opened_s, 3),
                "idle_s": round(now_s - session.last_activity_s, 3) if session.running is None else 0.0,
                "expires_in_s": round(session.expires_s - now_s, 3) if session.running is None else None,
            }
            for session in sorted(self._sessions, key=lambda session: session.opened_s)
        ]

    def _bytes_of(self, session: Session) -> dict[str, int]:
        """What a session takes, by tier. What it shares counts in full, and KV on its way back in both places."""
        num_bytes = {
            "device": len(session.table.pages) * self._bytes_per_page,
            "host": 0,
            "disk": 0,
            "inputs": session.context.num_bytes,
        }
        if session.stored is not None and session.kv_place in num_bytes:
            num_bytes[session.kv_place] += session.stored.image.num_bytes
        return num_bytes

    def measure(self) -> dict[Sample, float]:
        """All metrics as of now."""
        return self._gauges.read(is_draining=self._reception.is_draining)

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
        copy = session.at_rest(self._host.new_table(session.window))
        copy.epoch = next_epoch(session.epoch)
        return copy

    def begin_copying(self, session_id: SessionId) -> Copying | None:
        """Begins to copy a session's KV as of its last committed point; None when it has none, or is not here."""
        session = self._sessions.find(session_id)
        return None if session is None else self.copies.begin(session)

    def outdate(self, copy: Session) -> None:
        """Notes that a session goes on here after a copy of it was saved, which is out of date from now on."""
        session = self._sessions.find(copy.id)
        if session is not None:
            session.epoch = max(session.epoch, copy.epoch)

    def give_away(self, copy: Session) -> None:
        """Ends a session whose copy lives on elsewhere.

        Raises:
            FailedPrecondition: it has gone on since it was copied, or is about to.
        """
        session = self._sessions.find(copy.id)
        # Every turn that changes something is activity, and one that came back to where it was has changed nothing.
        if session is None or session.open_turns or session.last_activity_s != copy.last_activity_s:
            raise FailedPrecondition(f"session '{copy.id}' has a turn: try again")
        self._sessions.end(session, "moved")

    def expect(self, session: Session, header: Header) -> None:
        """Keeps a place for a saved session that is about to be claimed: see `Arrivals.expect`."""
        self._arrivals.expect(session, header)

    def admit(self, taken: TakenUp) -> None:
        """Makes it live: see `Arrivals.admit`."""
        self._arrivals.admit(taken)

    def withdraw(self, session_id: SessionId) -> None:
        """It could not be claimed: see `Arrivals.withdraw`."""
        self._arrivals.withdraw(session_id)

    def drain(self) -> None:
        """Takes no more turns; those that are here go on."""
        self._reception.is_draining = True

    @property
    def is_busy(self) -> bool:
        """Whether any session has a turn, or is about to be taken up."""
        return bool(self._lifecycle.running) or self._preparation.is_busy

    def put_to_rest(self) -> list[Session]:
        """Returns every session as of its last committed point.

        Turns that still ran or waited are told that nothing of them was appended.
        """
        self._preparation.fail_all(_going_away())
        self._lifecycle.undo_all(_going_away())
        resting = [session.at_rest(self._host.new_table(session.window)) for session in self._sessions]
        for session in resting:
            session.epoch = next_epoch(session.epoch)
        return resting

    def stop(self) -> None:
        """Stops the engine."""
        self._stop()


def _going_away() -> Unavailable:
    return Unavailable(
        "the server is stopping, nothing was appended: come back, or go elsewhere, with START and resume"
    )
