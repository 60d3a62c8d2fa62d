"""The protocol of one session on one stream, as a state machine without I/O.

A shell tells it what its user wants (``begin_…``), writes what ``requests_to_send`` hands out, feeds it what arrives
(``receive``), tells it when the stream is gone (``connection_lost``), and when ``wake_at`` has come (``tick``). Each
turn collects its own events, matched by request id, so several may be on the wire at once and nobody sees another's.
The core knows no threads, no sockets and no tasks; the shell serialises the calls.

    NEW ──first turn, as START──► OPENING ──first answer──► OPEN ──answer to END──► CLOSED
     ▲                               │                        │
     └───────────START refused───────┘                        ├──no such session any more──► GONE
                                                              └──the stream broke──────────► LOST

While START is not answered nothing else is sent: if it is refused, the turn that waits next becomes START. GONE still
sends END, since Triton holds a sequence until it sees one; from LOST nothing can be sent. With a ``Recovery`` the core
has a ``Survival``, which decides what a failure means, and goes on where the session would be GONE or LOST.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping

from microturn_client._cuts import Cuts
from microturn_client._errors import (
    ConnectionLost,
    Expired,
    FailedPrecondition,
    InvalidArgument,
    MicroturnError,
    NotFound,
    SessionClosed,
    TurnTimeout,
)
from microturn_client._inputs import InputTensor, encode_input
from microturn_client._outbox import Outbox
from microturn_client._pending_turn import PendingTurn, Role
from microturn_client._requests import Requests
from microturn_client._retry import Recovery
from microturn_client._session_state import KEEPALIVE_SHARE, SessionState
from microturn_client._survival import Survival
from microturn_client._transcript import Transcript
from microturn_client._wire import ModelInferRequest, ModelStreamInferResponse, Response, SessionId, read_response


class SessionCore:
    """One session.

    Attributes:
        state: see above.
        context_len: absolute length of the context in tokens, as of the last turn that ended.
        seed: that the last turn sampled with; None before one has ended.
        requests: makes its requests.
        clock: seconds, monotonic.
        outbox: its turns without an answer.
        transcript: its turns that have ended.
        cuts: its cuts.
        opener: the turn without an answer behind which nothing is sent; None when there is none.
        start: the turn that opened the session.
        end: the turn that closes it.
        end_resumes: ``end`` is sent to a session that the stream does not know.
        failure: why the session takes no more turns.
        heard_at: when the last message came, or the wire was last empty.

    Args:
        requests: see above.
        clock: see above.
        recovery: how long and how often the session is gone on with after a failure; None when it ends with its stream.
        transcript: what the session knows already.
        is_attached: it was opened before, by another client: the first turn goes on with it. Needs a recovery.
    """

    def __init__(
        self,
        requests: Requests,
        clock: Callable[[], float] = time.monotonic,
        *,
        recovery: Recovery | None = None,
        transcript: Transcript | None = None,
        is_attached: bool = False,
    ) -> None:
        self.state = SessionState.BROKEN if is_attached else SessionState.NEW
        self.context_len = 0
        self.seed: int | None = None
        self.requests = requests
        self.clock = clock
        self.outbox = Outbox(is_numbered=recovery is not None)
        if transcript is None:
            transcript = Transcript() if recovery is None else Transcript(recovery.max_transcript_bytes)
        self.transcript = transcript
        self.cuts = Cuts(self.outbox, self.transcript)
        self.opener: PendingTurn | None = None
        self.start: PendingTurn | None = None
        self.end: PendingTurn | None = None
        self.end_resumes = False
        self.failure: MicroturnError | None = None
        self.heard_at = clock()
        self._has_begun = False
        self._expires_in_s: float | None = None
        self._recovery = recovery
        self._survival = None if recovery is None else Survival(recovery, clock, is_attached=is_attached)
        if is_attached:
            self.transcript.is_complete = False

    @property
    def id(self) -> SessionId:
        """Of the session on the server."""
        return self.requests.session_id

    # ---- what the user wants -------------------------------------------------------------------------------------

    def begin_turn(self, tensor: InputTensor, options: Mapping[str, object], timeout_s: float) -> PendingTurn:
        """Queues a turn behind those that were begun before.

        Raises:
            InvalidArgument, TypeError: when the turn has no form on the wire; nothing is queued.
            SessionClosed: after ``begin_close``.
            MicroturnError: when the session is gone, for the reason that it went.
        """
        if self._survival is not None and "turn" in options:
            raise InvalidArgument("the client numbers turns by itself; with recovery=None it does not")
        self._check_usable()
        options = {**options, "max_tokens": self.requests.max_tokens(tensor, options)}
        self.requests.check(options)
        shows_ids = bool({**self.requests.options, **options}.get("return_appended_ids"))
        turn = PendingTurn(tensor, options, self.clock() + timeout_s, shows_ids=shows_ids)
        self.outbox.put(turn)
        if self._survival is not None:
            self._survival.tell_news(turn)
        return turn

    def begin_interrupt(
        self,
        timeout_s: float,
        *,
        heard_tokens: int | None = None,
        heard_chars: int | None = None,
        heard_text: str | None = None,
        at: int | None = None,
    ) -> PendingTurn:
        """Stops what runs, and cuts the context behind what was heard; see ``Cuts``.

        Raises:
            InvalidArgument: it is not clear what was heard.
            MicroturnError: as ``begin_turn``.
        """
        self._check_usable()
        position = self.cuts.position_of(heard_tokens, heard_chars, heard_text, at)
        return self.cuts.interrupt(position, self.clock() + timeout_s)

    def begin_keepalive(self) -> None:
        """Queues an empty turn that nobody reads, if one is due."""
        due = self.keepalive_at
        if due is not None and due <= self.clock():
            self.outbox.put(PendingTurn.keepalive())

    def begin_close(self, timeout_s: float) -> PendingTurn | None:
        """Queues END behind the turns that were begun; None when the server holds nothing that could be ended."""
        if self.end is not None or self.state is SessionState.CLOSED:
            return self.end
        if not (self._has_begun or self.outbox.has_unsent) or self.state in (SessionState.LOST, SessionState.BROKEN):
            self.fail_all(SessionClosed("the session was closed before the turn was answered"))
            self.state = SessionState.CLOSED
            return None
        is_talking = [turn for turn in self.outbox if not turn.is_passing]
        nobody_listens = bool(is_talking) and all(turn.is_left for turn in is_talking)
        options = {"max_tokens": 0, "on_overlap": "interrupt"} if nobody_listens else {"max_tokens": 0}
        self.end = PendingTurn(encode_input(None), options, self.clock() + timeout_s, role=Role.END)
        self.outbox.put(self.end)
        return self.end

    def branch(self, session_id: SessionId, timeout_s: float) -> tuple[SessionCore, PendingTurn]:
        """A session that goes on from this one's context, and its first turn, which appends nothing.

        Raises:
            MicroturnError: as ``begin_turn``.
        """
        self._check_usable()
        requests, transcript = self.requests.branch(session_id), self.transcript.copy()
        core = SessionCore(requests, self.clock, recovery=self._recovery, transcript=transcript)
        return core, core.begin_turn(encode_input(None), {}, timeout_s)

    # ---- what goes out -------------------------------------------------------------------------------------------

    def requests_to_send(self) -> list[ModelInferRequest]:
        """Hands out what is to be written now, in this order, each once."""
        if self.state is SessionState.OPEN:
            self.cuts.cut_what_was_left()
        was_quiet = not self.outbox.has_sent_any
        requests = []
        while (request := self._next_request()) is not None:
            requests.append(request)
        if was_quiet and requests:
            self.heard_at = self.clock()
        return requests

    def _next_request(self) -> ModelInferRequest | None:
        if self.opener is not None or self.state is SessionState.BROKEN:
            return None
        if self._survival is not None and self.state in (SessionState.RESUMING, SessionState.REPLAYING):
            return self._survival.next_request(self)
        turn = self.outbox.next_turn()
        if turn is None or self.cuts.must_wait(turn) or (self.state is SessionState.GONE and not turn.is_end):
            return None
        return self._send(turn)

    def _send(self, turn: PendingTurn) -> ModelInferRequest:
        if turn.is_cut:
            self.cuts.is_sent(turn)
        self.outbox.number(turn)
        if turn.is_end:
            request = self.requests.end(turn, resume=self.end_resumes)
        elif self.state is SessionState.NEW:
            request = self.requests.start(turn)
            self.start = self.opener = turn
            self._has_begun = True
            self.state = SessionState.OPENING
        else:
            request = self.requests.later(turn)
        self.outbox.has_sent(turn, request.id)
        return request

    # ---- what comes in -------------------------------------------------------------------------------------------

    def receive(self, message: ModelStreamInferResponse) -> None:
        """Takes one message of the stream; one that belongs to no turn on the wire is dropped."""
        self.heard_at = self.clock()
        response = read_response(message)
        if not response.request_id and response.error is not None:
            self.connection_lost(response.error)
            return
        turn = self.outbox.find(response.request_id)
        if turn is None:
            return
        if response.error is not None:
            self._refused(turn, response.request_id, response.error)
            return
        if turn is not self.end and not self.outbox.is_first(response.request_id):
            self.connection_lost(ConnectionLost("the server left a turn without an answer"))
            return
        if turn is self.opener:
            self._opened(turn)
        if response.status is None:
            turn.take_in(response, self.context_len)
            return
        self.outbox.is_answered(response.request_id)
        self._answered(turn, response)

    def _opened(self, turn: PendingTurn) -> None:
        """The first answer to ``opener`` came."""
        if self.state is SessionState.REPLAYING:
            return  # one turn at a time
        was_resuming = self.state is SessionState.RESUMING
        self.opener = None
        self.state = SessionState.OPEN
        if self._survival is not None:
            self._survival.has_opened(self, turn, was_resuming=was_resuming)

    def _answered(self, turn: PendingTurn, response: Response) -> None:
        assert response.status is not None
        self.context_len = response.status.context_len
        self.seed = response.status.seed
        self._expires_in_s = response.status.expires_in_s
        turn.take_in(response, self.context_len)
        if turn is self.end:
            self.state = SessionState.CLOSED
        elif self.cuts.has_ended(turn):
            self.cuts.write_down(turn)
            if turn.is_cut:
                self.cuts.is_confirmed(turn)
        if self._survival is not None:
            self._survival.was_answered(self, turn, response.status)

    def _refused(self, turn: PendingTurn, request_id: str, error: MicroturnError) -> None:
        if self._survival is not None and self._survival.is_remedied(self, turn, request_id, error):
            return
        self.outbox.is_answered(request_id)
        expected = error.details.get("turn") if isinstance(error, FailedPrecondition) else None
        if turn.number is not None and expected is not None and expected < turn.number:
            self.outbox.left_gap(turn, expected)
            turn.release()  # the server has not taken it: there is nothing that an interrupt could undo
            if turn.is_cut:
                self.cuts.is_unsent(turn)
            return
        turn.fail(error)
        turn.release()
        self.outbox.is_void(turn)
        if turn.is_cut:
            for held in self.cuts.is_refused(turn):
                self.cuts.write_down(held)
        if turn is self.end:
            self.state = SessionState.CLOSED
        elif turn is self.opener:
            self.opener = None
            if self._survival is not None and self.state is SessionState.RESUMING:
                self.state = SessionState.OPEN
                self._survival.announce(self, True, "the session lives")
            else:
                self.state = SessionState.NEW
        elif isinstance(error, NotFound | Expired) and self.state is SessionState.OPEN:
            self.state = SessionState.GONE
            self.failure = error
            for waiting in self.outbox.give_up_unsent():
                waiting.fail(error)

    def connection_lost(self, error: MicroturnError) -> None:
        """The stream ended, or an error came that names no turn: without a remedy the turns fail with ``error``."""
        if self._survival is None or not self._survival.outlives(self, error):
            self.lose(error)

    def lose(self, error: MicroturnError) -> None:
        """Ends the session here; all turns fail with ``error``."""
        self.fail_all(error)
        self.failure = error
        is_closing = self.end is not None or self.state is SessionState.CLOSED
        self.state = SessionState.CLOSED if is_closing else SessionState.LOST

    # ---- time ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Does what is due at ``wake_at``."""
        self.begin_keepalive()
        if self._survival is not None:
            self._survival.tick(self)

    @property
    def wake_at(self) -> float | None:
        """When the clock shows this, ``tick`` has something to do; None while it has not."""
        return self.keepalive_at if self._survival is None else self._survival.wake_at(self)

    @property
    def wants_stream(self) -> bool:
        """Whether the stream that there is, if any, is of use."""
        return self.state is not SessionState.BROKEN

    def time_out(self, turn: PendingTurn) -> None:
        """Gives a turn up whose time has passed: one that was not sent never is, and what still comes is dropped."""
        turn.fail(TurnTimeout("the turn did not end within timeout_s; what was handed out of it stays"))
        turn.leave()
        self.outbox.remove_unsent(turn)

    def remaining_s(self, turn: PendingTurn) -> float:
        """Seconds that the turn's user still waits; not above 0 when the time has passed."""
        return turn.deadline - self.clock()

    @property
    def keepalive_at(self) -> float | None:
        """When the clock shows this, a keep-alive is due; None while none is: a turn is out, or nothing is open."""
        if self.state is not SessionState.OPEN or self.outbox.has_sent_any or not self._expires_in_s:
            return None
        return self.heard_at + self._expires_in_s * KEEPALIVE_SHARE

    def _check_usable(self) -> None:
        if self.end is not None or self.state is SessionState.CLOSED:
            raise SessionClosed("the session is closed: open another one")
        if self.failure is not None:
            raise copy.copy(self.failure)
        if self._survival is not None:
            self._survival.revive(self)

    def fail_all(self, error: MicroturnError) -> None:
        """Fails all turns without an answer."""
        for turn in (*self.cuts.release(), *self.outbox.clear()):
            turn.fail(error)
            turn.release()
        self.opener = None
