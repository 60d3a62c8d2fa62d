"""The protocol of one session as a state machine without I/O.

A shell tells it what its user wants (``begin_turn``, ``begin_keepalive``, ``begin_close``), writes what
``requests_to_send`` hands out, feeds it what arrives (``receive``) and tells it when the stream is gone
(``connection_lost``). Each turn collects its own events, matched by request id, so several may be on the wire at once
and nobody sees another's. The core knows no threads, no sockets and no tasks; the shell serialises the calls.

    NEW ──first turn, as START──► OPENING ──first answer──► OPEN ──answer to END──► CLOSED
     ▲                               │                        │
     └───────────START refused───────┘                        ├──no such session any more──► GONE
                                                              └──the stream broke──────────► LOST

While START is not answered nothing else is sent: if it is refused, the turn that waits next becomes START. GONE still
sends END, since Triton holds a sequence until it sees one; from LOST nothing can be sent.

On the wire, what START says becomes the default of all later turns. Here the options of a turn are its own: what the
first turn said beyond the session's options is said again, with the value that holds then, by every later turn; and so
is the session's key.
"""

from __future__ import annotations

import copy
import enum
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping

from microturn_client._errors import Expired, InvalidArgument, MicroturnError, NotFound, SessionClosed, TurnTimeout
from microturn_client._inputs import InputTensor, encode_input
from microturn_client._options import DEFAULT_MAX_TOKENS, DEFAULTS, ONE_TURN_OPTIONS
from microturn_client._pending_turn import PendingTurn
from microturn_client._wire import (
    ModelInferRequest,
    ModelStreamInferResponse,
    SessionId,
    add_options,
    build_request,
    check_session_id,
    mark_end,
    mark_start,
    read_response,
)

# Seconds that a turn's user waits for its end, and a closing session for the server's answer, unless told.
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_CLOSE_TIMEOUT_S = 5.0

# Such a part of the idle time passes between two keep-alives: two may be lost before the session is.
KEEPALIVE_SHARE = 1 / 3


class SessionState(enum.Enum):
    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    GONE = "gone"
    LOST = "lost"
    CLOSED = "closed"


class SessionCore:
    """One session.

    Args:
        model: name of the model on the server.
        session_id: integer in [1, 2**63), or a printable text of 1 to 128 characters.
        options: of the session; see ``SessionOptions``.
        clock: seconds, monotonic.

    Raises:
        InvalidArgument, TypeError: for an id or an option that has no form on the wire.
    """

    def __init__(
        self,
        model: str,
        session_id: SessionId,
        options: Mapping[str, object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if misplaced := sorted(options.keys() & ONE_TURN_OPTIONS):
            raise InvalidArgument(f"'{misplaced[0]}' is an option of turns: give it to turn() or append()")
        add_options(ModelInferRequest(), options)
        self._key = {"session_key": options.get("session_key")}
        self.id = check_session_id(session_id)
        self.state = SessionState.NEW
        self.context_len = 0
        self.seed: int | None = None
        self._model = model
        self._clock = clock
        self._options = options
        self._later_options: dict[str, object] = {}
        self._request_ids = itertools.count(1)
        self._unsent: deque[PendingTurn] = deque()
        self._unanswered: dict[str, PendingTurn] = {}
        self._start: PendingTurn | None = None
        self._end: PendingTurn | None = None
        self._failure: MicroturnError | None = None
        self._expires_in_s: float | None = None
        self._answered_at = clock()

    def begin_turn(self, tensor: InputTensor, options: Mapping[str, object], timeout_s: float) -> PendingTurn:
        """Queues a turn behind those that were begun before.

        Raises:
            InvalidArgument, TypeError: when the turn has no form on the wire; nothing is queued.
            SessionClosed: after ``begin_close``.
            MicroturnError: when the session is gone, for the reason that it went.
        """
        if self._end is not None or self.state is SessionState.CLOSED:
            raise SessionClosed("the session is closed: open another one")
        if self._failure is not None:
            raise copy.copy(self._failure)
        return self._enqueue(tensor, {**options, "max_tokens": self._max_tokens(tensor, options)}, timeout_s)

    def begin_keepalive(self) -> None:
        """Queues an empty turn that nobody reads, if one is due."""
        due = self.keepalive_at
        if due is not None and due <= self._clock():
            self._enqueue(encode_input(None), {"max_tokens": 0})

    def begin_close(self, timeout_s: float) -> PendingTurn | None:
        """Queues END behind the turns that were begun; None when the server holds nothing that could be ended."""
        if self._end is not None or self.state is SessionState.CLOSED:
            return self._end
        has_sent = self._start is not None or bool(self._unsent)
        if not has_sent or self.state is SessionState.LOST:
            self.state = SessionState.CLOSED
            return None
        self._end = self._enqueue(encode_input(None), {"max_tokens": 0}, timeout_s)
        mark_end(self._end.request)
        return self._end

    def requests_to_send(self) -> list[ModelInferRequest]:
        """Hands out what is to be written now, in this order, each once. Ask again after ``receive``."""
        requests = []
        while self._unsent and self.state is not SessionState.OPENING:
            turn = self._unsent.popleft()
            if self.state is SessionState.NEW and turn is not self._end:
                self._make_start(turn)
            else:
                add_options(turn.request, self._key | self._later_options)
            self._unanswered[turn.request.id] = turn
            requests.append(turn.request)
        return requests

    def receive(self, message: ModelStreamInferResponse) -> None:
        """Takes one message of the stream; one that belongs to no turn on the wire is dropped."""
        response = read_response(message)
        if not response.request_id and response.error is not None:
            self.connection_lost(response.error)
            return
        turn = self._unanswered.get(response.request_id)
        if turn is None:
            return
        if response.is_final:
            del self._unanswered[response.request_id]
            self._answered_at = self._clock()
        if response.status is not None:
            self.context_len = response.status.context_len
            self.seed = response.status.seed
            self._expires_in_s = response.status.expires_in_s
        turn.take_in(response, self.context_len)
        self._advance(turn, response.error)

    def connection_lost(self, error: MicroturnError) -> None:
        """The stream ended, or an error came that names no turn: whoever waits for an answer fails with ``error``."""
        for turn in (*self._unanswered.values(), *self._unsent):
            turn.fail(error)
        self._unanswered.clear()
        self._unsent.clear()
        self._failure = error
        is_closing = self._end is not None or self.state is SessionState.CLOSED
        self.state = SessionState.CLOSED if is_closing else SessionState.LOST

    def time_out(self, turn: PendingTurn) -> None:
        """Gives a turn up whose time has passed: one that was not sent never is, and what still comes is dropped."""
        turn.fail(TurnTimeout("the turn did not end within timeout_s; one that was sent may still end on the server"))
        if turn in self._unsent:
            self._unsent.remove(turn)

    def remaining_s(self, turn: PendingTurn) -> float:
        """Seconds that the turn's user still waits; not above 0 when the time has passed."""
        return turn.deadline - self._clock()

    @property
    def keepalive_at(self) -> float | None:
        """When the clock shows this, a keep-alive is due; None while none is: a turn is out, or nothing is open."""
        if self.state is not SessionState.OPEN or self._unanswered or not self._expires_in_s:
            return None
        return self._answered_at + self._expires_in_s * KEEPALIVE_SHARE

    def _max_tokens(self, tensor: InputTensor, options: Mapping[str, object]) -> object:
        """Said with every turn, so that it never depends on what START said."""
        if options.get("max_tokens") is not None:
            return options["max_tokens"]
        return 0 if tensor.is_empty else self._options.get("max_tokens", DEFAULT_MAX_TOKENS)

    def _enqueue(self, tensor: InputTensor, options: Mapping[str, object], timeout_s: float = math.inf) -> PendingTurn:
        request = build_request(self._model, str(next(self._request_ids)), self.id, tensor, options)
        turn = PendingTurn(request, deadline=self._clock() + timeout_s)
        self._unsent.append(turn)
        return turn

    def _make_start(self, turn: PendingTurn) -> None:
        defaults = {**DEFAULTS, **self._options}
        self._later_options = {name: value for name, value in defaults.items() if name in turn.request.parameters}
        add_options(turn.request, self._options)
        mark_start(turn.request)
        self._start = turn
        self.state = SessionState.OPENING

    def _advance(self, turn: PendingTurn, error: MicroturnError | None) -> None:
        if turn is self._end:
            self.state = SessionState.CLOSED
        elif turn is self._start and self.state is SessionState.OPENING:
            self.state = SessionState.OPEN if error is None else SessionState.NEW
        elif isinstance(error, NotFound | Expired) and self.state is SessionState.OPEN:
            self.state = SessionState.GONE
            self._failure = error
