"""The states of one session for its client, and how it ends: closed by its user, gone on the server, or lost.

    NEW ──first turn, as START──► OPENING ──first answer──► OPEN ──answer to END──► CLOSED
     ▲                               │                        │
     └───────────START refused───────┘                        ├──no such session any more──► GONE
                                                              └──the stream broke──────────► LOST

While START is not answered nothing else is sent: if it is refused, the turn that waits next becomes START. GONE still
sends END, since Triton holds a sequence until it sees one; from LOST nothing can be sent. ``Survival`` draws the states
between OPEN and OPEN of a session that goes on where it would be GONE or LOST.
"""

from __future__ import annotations

import copy
import enum

from microturn_client import _log
from microturn_client._cuts import Cuts
from microturn_client._errors import MicroturnError, SessionClosed
from microturn_client._inputs import encode_input
from microturn_client._outbox import Outbox
from microturn_client._pending_turn import PendingTurn
from microturn_client._phase import Role
from microturn_client._wire import SessionId

CLOSED_BEFORE = "the session was closed before the turn was answered"


class SessionState(enum.Enum):
    """See above."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    BROKEN = "broken"
    RESUMING = "resuming"
    REPLAYING = "replaying"
    GONE = "gone"
    LOST = "lost"
    CLOSED = "closed"


class Lifecycle:
    """The state of one session, and the turns that begin and end it.

    Attributes:
        state: see above.
        opener: the turn without an answer behind which nothing is sent; None when there is none.
        start: the turn that opened the session.
        has_begun: Triton may hold a sequence that only END ends.
        end: the turn that closes it.
        end_resumes: ``end`` is sent to a session that the stream does not know.
        failure: why the session takes no more turns.

    Args:
        session_id: what the log calls it.
        outbox: its turns without an answer.
        cuts: its cuts.
        is_attached: it was opened before, by another client.
    """

    def __init__(self, session_id: SessionId, outbox: Outbox, cuts: Cuts, *, is_attached: bool) -> None:
        self.state = SessionState.BROKEN if is_attached else SessionState.NEW
        self.opener: PendingTurn | None = None
        self.start: PendingTurn | None = None
        self.end: PendingTurn | None = None
        self.end_resumes = False
        self.failure: MicroturnError | None = None
        self._session_id = session_id
        self._outbox = outbox
        self._cuts = cuts
        self.has_begun = is_attached

    @property
    def is_closed(self) -> bool:
        """Whether its user has closed it, or nothing is left to be closed."""
        return self.end is not None or self.state is SessionState.CLOSED

    @property
    def seed(self) -> int | None:
        """What the session samples with; None where START, which may have left it to the server, has no answer here."""
        return None if self.start is None or self.start.result is None else self.start.result.seed

    @property
    def takes_turns(self) -> bool:
        """Whether it is neither closed nor lost."""
        return not self.is_closed and self.failure is None

    def check_takes_turns(self) -> None:
        """Raises why it takes none: SessionClosed, or the failure."""
        if self.is_closed:
            raise SessionClosed("the session is closed: open another one")
        if self.failure is not None:
            raise copy.copy(self.failure)

    def has_sent_start(self, turn: PendingTurn) -> None:
        """From here on Triton may hold a sequence that only END ends."""
        self.start = self.opener = turn
        self.has_begun = True
        self.state = SessionState.OPENING

    def has_opened(self) -> None:
        """The server has the session: others than ``opener`` may be sent."""
        self.opener = None
        self.state = SessionState.OPEN

    def begin_close(self, deadline: float) -> PendingTurn | None:
        """Queues END, which ends what runs; None when the server holds nothing that could be ended.

        Turns that were not sent never are.
        """
        if self.is_closed:
            return self.end
        if not self.has_begun or self.state in (SessionState.LOST, SessionState.BROKEN):
            self.close()
            return None
        for turn in self._outbox.give_up_unsent():
            turn.fail(SessionClosed(CLOSED_BEFORE))
            turn.release()
            if turn.is_cut:
                self._cuts.is_refused()
        options = {"max_tokens": 0, "on_overlap": "interrupt"}
        self.end = PendingTurn(encode_input(None), options, deadline, role=Role.END)
        self._outbox.put(self.end)
        return self.end

    def close(self) -> None:
        """END was answered, or need not be sent. It is answered last: what has no answer now gets none."""
        self.state = SessionState.CLOSED
        self.fail_all(SessionClosed(CLOSED_BEFORE))

    def has_gone(self, error: MicroturnError) -> None:
        """The server has the session no more."""
        self.state = SessionState.GONE
        self.failure = error
        _log.is_lost(self._session_id, error)

    def lose(self, error: MicroturnError) -> None:
        """Ends the session here; all turns fail with ``error``."""
        self.fail_all(error)
        self.failure = error
        if self.is_closed:
            self.state = SessionState.CLOSED
        else:
            self.state = SessionState.LOST
            _log.is_lost(self._session_id, error)

    def fail_all(self, error: MicroturnError) -> None:
        """Fails all turns without an answer."""
        for turn in (*self._cuts.release(), *self._outbox.clear()):
            turn.fail(error)
            turn.release()
        self.opener = None
