"""The protocol of one session on one stream, as a state machine without I/O.

A shell tells it what its user wants (``begin_…``), writes what ``requests_to_send`` hands out, feeds it what arrives
(``receive``), tells it when the stream is gone (``connection_lost``), and when ``wake_at`` has come (``tick``). Each
turn collects its own events, matched by request id, so several may be on the wire at once and nobody sees another's.
The core knows no threads, no sockets and no tasks; the shell serialises the calls. ``Lifecycle`` has its states. With
a ``Recovery``, ``Survival`` decides what a failure means, and goes on where the session would be GONE or LOST.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from microturn_client import _log
from microturn_client._cuts import Cuts
from microturn_client._errors import ConnectionLost, InvalidArgument, MicroturnError, TurnTimeout
from microturn_client._events import REBUILT
from microturn_client._inputs import InputTensor
from microturn_client._lifecycle import Lifecycle, SessionState
from microturn_client._messages_pb2 import ModelInferRequest, ModelStreamInferResponse
from microturn_client._new_turn import new_turn
from microturn_client._news import News
from microturn_client._outbox import Outbox
from microturn_client._pending_turn import PendingTurn
from microturn_client._refusals import refused
from microturn_client._requests import Requests
from microturn_client._retry import Recovery
from microturn_client._survival import Survival
from microturn_client._timeouts import KEEPALIVE_SHARE
from microturn_client._transcript import Transcript
from microturn_client._wire import Response, SessionId, read_response


class SessionCore:
    """One session.

    Attributes:
        context_len: absolute length of the context in tokens, as of the last turn that ended.
        seed: that the last turn sampled with; None before one has ended.
        requests: makes its requests.
        clock: seconds, monotonic.
        recovery: how long and how often the session is gone on with after a failure; None when it ends with its stream.
        outbox: its turns without an answer.
        transcript: its turns that have ended.
        cuts: its cuts.
        news: what befell it.
        survival: what it does about failures; None when it ends with its stream.
        lifecycle: its state, and the turns that begin and end it.
        heard_at: when the last message came, or the wire was last empty.

    Args:
        requests: see above.
        clock: see above.
        recovery: see above.
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
        self.context_len = 0
        self.seed: int | None = None
        self.requests = requests
        self.clock = clock
        self.recovery = recovery
        self.outbox = Outbox(is_numbered=recovery is not None)
        if transcript is None:
            bound = () if recovery is None else (recovery.max_transcript_bytes,)
            transcript = Transcript(*bound, is_windowed=requests.has_window)
            transcript.is_complete = not is_attached and not requests.goes_on
        self.transcript = transcript
        self.cuts = Cuts(self.outbox, self.transcript)
        self.news = News()
        self.lifecycle = Lifecycle(self.id, self.outbox, self.cuts, is_attached=is_attached)
        self.heard_at = self._message_at = clock()
        self._expires_in_s: float | None = None
        self.survival = None if recovery is None else Survival(recovery, clock, is_attached=is_attached)

    @property
    def id(self) -> SessionId:
        """Of the session on the server."""
        return self.requests.session_id

    # ---- what the user wants -------------------------------------------------------------------------------------

    def begin_turn(
        self, tensor: InputTensor, options: Mapping[str, object], timeout_s: float, total_timeout_s: float = math.inf
    ) -> PendingTurn:
        """Queues a turn behind those that were begun before.

        Raises:
            InvalidArgument, TypeError: when the turn has no form on the wire; nothing is queued.
            SessionClosed: after ``begin_close``.
            MicroturnError: when the session is gone, for the reason that it went.
        """
        if self.survival is not None and "turn" in options:
            raise InvalidArgument("the client numbers turns by itself; with recovery=None it does not")
        self.check_usable()
        turn = new_turn(self.requests, tensor, options)
        turn.begun_at, turn.patience_s = self.clock(), timeout_s
        turn.deadline = turn.begun_at + total_timeout_s
        self.news.tell(turn)
        self.outbox.put(turn)
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
        self.check_usable()
        position = self.cuts.position_of(heard_tokens, heard_chars, heard_text, at)
        cut = self.cuts.interrupt(position, self.clock() + timeout_s)
        self.news.tell(cut)
        return cut

    def begin_close(self, timeout_s: float) -> PendingTurn | None:
        """Queues END, which ends what runs; None when the server holds nothing that could be ended."""
        return self.lifecycle.begin_close(self.clock() + timeout_s)

    # ---- what goes out -------------------------------------------------------------------------------------------

    def requests_to_send(self) -> list[ModelInferRequest]:
        """Hands out what is to be written now, in this order, each once."""
        if self.lifecycle.state is SessionState.OPEN:
            self.cuts.cut_what_was_left()
        was_quiet = not self.outbox.has_sent_any
        requests = []
        while (request := self._next_request()) is not None:
            requests.append(request)
        if was_quiet and requests:
            self.heard_at = self.clock()
        return requests

    def _next_request(self) -> ModelInferRequest | None:
        if self.lifecycle.opener is not None or self.lifecycle.state is SessionState.BROKEN:
            return None
        if self.survival is not None and self.lifecycle.state in (SessionState.RESUMING, SessionState.REPLAYING):
            return self.survival.next_request(self)
        turn = self.outbox.turn_to_send()
        if turn is None or self.cuts.must_wait(turn) or (self.lifecycle.state is SessionState.GONE and not turn.is_end):
            return None
        return self._send(turn)

    def _send(self, turn: PendingTurn) -> ModelInferRequest:
        if turn.is_cut:
            self.cuts.is_sent(turn)
        self.outbox.number(turn)
        if turn.is_end:
            request = self.requests.end(turn, resume=self.lifecycle.end_resumes)
        elif self.lifecycle.state is SessionState.NEW:
            request = self.requests.start(turn)
            self.lifecycle.has_sent_start(turn)
        else:
            request = self.requests.later(turn)
        self.outbox.has_sent(turn, request.id)
        return request

    # ---- what comes in -------------------------------------------------------------------------------------------

    def receive(self, message: ModelStreamInferResponse) -> None:
        """Takes one message of the stream; one that belongs to no turn on the wire is dropped."""
        self.heard_at = self._message_at = self.clock()
        response = read_response(message)
        if not response.request_id and response.error is not None:
            self.connection_lost(response.error)
            return
        turn = self.outbox.find(response.request_id)
        if turn is None:
            return
        if response.error is not None:
            refused(self, turn, response.request_id, response.error)
            return
        if turn is not self.lifecycle.end and not self.outbox.is_first(response.request_id):
            self.connection_lost(ConnectionLost("the server left a turn without an answer"))
            return
        if turn is self.lifecycle.opener:
            self._opened(turn)
        if response.status is None:
            self._take_in(turn, response)
            return
        self.outbox.is_answered(response.request_id)
        self._answered(turn, response)

    def _opened(self, turn: PendingTurn) -> None:
        """The first answer to ``opener`` came."""
        if self.lifecycle.state is SessionState.REPLAYING:
            return  # one turn at a time
        was_resuming = self.lifecycle.state is SessionState.RESUMING
        self.lifecycle.has_opened()
        if self.survival is not None:
            self.survival.has_opened(self, turn, was_resuming=was_resuming)

    def _take_in(self, turn: PendingTurn, response: Response) -> None:
        num_told, has_reader = len(turn.resumed), turn.has_reader
        turn.take_in(response, self.context_len)
        if not turn.is_passing:
            for event in turn.resumed[num_told:]:
                self.news.note(event, is_told=has_reader)

    def _answered(self, turn: PendingTurn, response: Response) -> None:
        assert response.status is not None
        self.outbox.retry_at = None  # there is room for one more
        self.context_len = response.status.context_len
        self.seed = response.status.seed
        self._expires_in_s = response.status.expires_in_s
        self._take_in(turn, response)
        if turn is self.lifecycle.end:
            self.lifecycle.close()
        elif self.cuts.has_ended(turn):
            if response.status.rebuilt and not turn.is_passing:
                _log.goes_on(self.id, is_same=REBUILT.exact, reason=REBUILT.reason)
            self.cuts.write_down(turn)
            if turn.is_cut:
                self.cuts.is_confirmed(turn)
        if self.survival is not None:
            self.survival.was_answered(self, turn, response.status)

    def connection_lost(self, error: MicroturnError) -> None:
        """The stream ended, or an error came that names no turn: without a remedy the turns fail with ``error``."""
        if self.survival is None or not self.survival.outlives(self, error):
            self.lifecycle.lose(error)

    # ---- time ----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Does what is due at ``wake_at``."""
        now = self.clock()
        self.outbox.tick(now)
        if self.keepalive_at is not None and self.keepalive_at <= now:
            self.outbox.put(PendingTurn.keepalive())
        if self.survival is not None:
            self.survival.tick(self)

    @property
    def wake_at(self) -> float | None:
        """When the clock shows this, ``tick`` has something to do; None while it has not."""
        due = self.keepalive_at if self.survival is None else self.survival.wake_at(self)
        times = [time_s for time_s in (due, self.outbox.retry_at) if time_s is not None]
        return min(times, default=None)

    @property
    def wants_stream(self) -> bool:
        """Whether the stream that there is, if any, is of use."""
        return self.lifecycle.state is not SessionState.BROKEN

    def time_out(self, turn: PendingTurn) -> None:
        """Gives a turn up whose time has passed; see ``Outbox.give_up``. What still comes is dropped."""
        is_late = turn.deadline <= self.clock()
        late = "it did not end in its total time" if is_late else f"nothing came for {turn.patience_s:g} s"
        timeout = TurnTimeout(f"the turn was given up, {late}; what was handed out of it stays")
        self.outbox.give_up(turn, turn.refusal or timeout)

    def remaining_s(self, turn: PendingTurn) -> float:
        """Seconds that the turn's user still waits if nothing comes; not above 0 when the time has passed."""
        silent_until = max(self._message_at, turn.begun_at) + turn.patience_s
        return min(silent_until, turn.deadline) - self.clock()

    @property
    def keepalive_at(self) -> float | None:
        """When the clock shows this, a keep-alive is due; None while none is: a turn is out, or nothing is open."""
        if self.lifecycle.state is not SessionState.OPEN or self.outbox.has_sent_any or not self._expires_in_s:
            return None
        return self.heard_at + self._expires_in_s * KEEPALIVE_SHARE

    def check_usable(self) -> None:
        """Raises why it takes no turns: MicroturnError. One that has given up tries again."""
        self.lifecycle.check_takes_turns()
        if self.survival is not None:
            self.survival.revive(self)
