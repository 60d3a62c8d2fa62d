"""Packs the answers of turns into responses, sends them, and finds clients that have closed the connection.

The caller of `Responses.step` does the work: a `ResponseThread` in the server, or a test or simulator.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from microturn.errors import MicroturnError, Unavailable
from microturn.hosts.answers import Answer, packed
from microturn.hosts.triton.answer_pace import RATE_PER_S, AnswerPace
from microturn.sessions.turn import Status, Turn, TurnOutput

log = logging.getLogger(__name__)

# How often connections are checked. A check costs 60 µs per turn.
_POLL_S = 0.1
_WARN_EVERY_S = 10.0
# Ending a request without a response takes 140 µs, during which no answer is sent.
_MAX_SILENT_AT_ONCE = 8


class Sender(Protocol):
    """Sends responses to the client of one request."""

    def send(self, answer: Answer) -> None:
        """Sends a response; the answer that ends the turn is the final one."""

    def end(self) -> None:
        """Ends the request without a response."""

    def is_cancelled(self) -> bool:
        """Whether the client has closed the connection."""


@dataclass(eq=False)
class ResponseStream:
    """The sink of one turn: passes its answer to `Responses`.

    Attributes:
        sender: of the turn's request.
        responses: packs and sends the answer.
        has_begun: whether a response has been sent.
    """

    sender: Sender
    responses: Responses
    has_begun: bool = False

    def put(self, output: TurnOutput) -> None:
        self.responses.post(self, output)

    def fail(self, error: MicroturnError) -> None:
        self.responses.post(self, error)


class Responses:
    """Sends the answers of turns, packing those that are ready together, and cancels turns of closed connections.

    `watch`, `post` and `close` may be called by any thread, `step` by one. An exception in one turn's sender or
    callbacks does not affect other turns.

    Args:
        cancel: called with turns whose client has closed the connection.
        answered: called after a turn's last response: with the turn, how it ended, and when sending began.
        clock: seconds, monotonic.

    Attributes:
        num_withheld: turns that ended without a response because of the rate limit (see `answer_pace`).
    """

    def __init__(
        self,
        cancel: Callable[[Turn], None],
        answered: Callable[[Turn, Status | MicroturnError, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._cancel = cancel
        self._answered = answered
        self._clock = clock
        self._posts: queue.SimpleQueue[tuple[ResponseStream, Turn | Answer] | None] = queue.SimpleQueue()
        self._unanswered: dict[ResponseStream, Turn] = {}
        # Unanswered turns whose connections can be checked.
        self._asked: dict[ResponseStream, Turn] = {}
        self._next_poll_s = 0.0
        self._pace: AnswerPace[tuple[ResponseStream, Answer]] = AnswerPace(clock)
        # Withheld requests still to be ended: other answers go first.
        self._silent: deque[tuple[ResponseStream, Answer]] = deque()
        self.num_withheld = 0
        self._next_warning_s = 0.0

    def watch(self, stream: ResponseStream, turn: Turn) -> None:
        """Starts checking the connection of the turn's client."""
        self._posts.put((stream, turn))

    def post(self, stream: ResponseStream, answer: Answer) -> None:
        """Queues a part of an answer."""
        self._posts.put((stream, answer))

    def close(self) -> None:
        """Ends the loop after the answers posted before."""
        self._posts.put(None)

    def step(self, *, block: bool = False) -> bool:
        """Sends posted answers, and checks connections when it is time to.

        Args:
            block: wait for a post, or until connections or waiting answers are due.

        Returns:
            Whether to go on: False after `close`.
        """
        is_open = True
        ready: dict[ResponseStream, list[Answer]] = {}
        for post in self._take_posts(block=block):
            if post is None:
                is_open = False
                continue
            stream, item = post
            if isinstance(item, Turn):
                self._unanswered[stream] = self._asked[stream] = item
            else:
                ready.setdefault(stream, []).append(item)
        for stream, answers in ready.items():
            self._answer(stream, packed(answers))
        for stream, answer in self._pace.take_due() if is_open else self._pace.take_all():
            self._send(stream, answer)
        for _ in range(min(len(self._silent), _MAX_SILENT_AT_ONCE) if is_open else len(self._silent)):
            self._end_in_silence(*self._silent.popleft())
        self._poll_cancelled()
        return is_open

    def _take_posts(self, *, block: bool) -> list[tuple[ResponseStream, Turn | Answer] | None]:
        posts: list[tuple[ResponseStream, Turn | Answer] | None] = []
        may_wait = self._unanswered or self._pace.is_waiting
        try:
            if block and not self._silent:
                posts.append(self._posts.get(timeout=_POLL_S if may_wait else None))
            while True:
                posts.append(self._posts.get_nowait())
        except queue.Empty:
            return posts

    def _answer(self, stream: ResponseStream, answer: Answer) -> None:
        """Sends an answer, or queues it if the rate limit applies."""
        turn = self._unanswered.get(stream)
        if turn is None:
            return  # sending failed before, and the client was told
        client = (turn.request.session_id, turn.request.options.get("session_key"))
        if stream.has_begun or not _is_free(answer):
            for earlier in self._pace.take_held(client):  # turns are answered in their order
                self._send(*earlier)
        elif not self._pace.admits(client):
            withheld = self._pace.hold(client, (stream, answer))
            if withheld is not None:
                self._silent.append(withheld)
                self._asked.pop(withheld[0], None)
            return
        self._send(stream, answer)

    def _send(self, stream: ResponseStream, answer: Answer) -> None:
        begun_s = self._clock()
        try:
            stream.sender.send(answer)
        except Exception:
            log.exception("failed to send a response")
            self._break_off(stream, begun_s)
            return
        stream.has_begun = True
        self._note(stream, answer, begun_s)

    def _break_off(self, stream: ResponseStream, begun_s: float) -> None:
        """Ends an answer that lost a part: the client would take the rest for all of it."""
        turn = self._unanswered[stream]
        lost = Unavailable(
            "the answer could not be sent, though the turn may have been done: send it again if numbered"
        )
        try:
            stream.sender.send(lost)
        except Exception:
            log.exception("failed to send the error of a lost answer")
        self._note(stream, lost, begun_s)
        self._cancel(turn)

    def _end_in_silence(self, stream: ResponseStream, answer: Answer) -> None:
        begun_s = self._clock()
        self.num_withheld += 1
        if begun_s >= self._next_warning_s:
            self._next_warning_s = begun_s + _WARN_EVERY_S
            session_id = self._unanswered[stream].request.session_id
            log.warning(
                "session '%s' gets more keep-alives and refusals than %g a second: %d turns have ended without a "
                "response so far",
                session_id,
                RATE_PER_S,
                self.num_withheld,
            )
        try:
            stream.sender.end()
        except Exception:
            log.exception("failed to end a request")
        self._note(stream, answer, begun_s)

    def _note(self, stream: ResponseStream, answer: Answer, begun_s: float) -> None:
        """Forgets a turn after its last response."""
        end = answer if isinstance(answer, MicroturnError) else answer.status
        if end is None:
            return
        self._asked.pop(stream, None)
        turn = self._unanswered.pop(stream)
        try:
            self._answered(turn, end, begun_s)
        except Exception:
            log.exception("failed to report an answered turn")

    def _poll_cancelled(self) -> None:
        now_s = self._clock()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + _POLL_S
        for stream, turn in list(self._asked.items()):
            try:
                if stream.sender.is_cancelled():
                    self._cancel(turn)
            except Exception:
                log.exception("failed to check a client's connection: its turn goes on")
                del self._asked[stream]


class ResponseThread:
    """Sends responses until it is stopped, so that neither Triton's thread nor the engine thread does."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._thread = threading.Thread(target=self._run, name="microturn-responses", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the posted answers have been sent."""
        self._responses.close()
        self._thread.join()

    def _run(self) -> None:
        while self._responses.step(block=True):
            pass


def _is_free(answer: Answer) -> bool:
    """Whether a whole answer cost no computation, so that a client could request any number of them."""
    if isinstance(answer, MicroturnError):
        return True
    status = answer.status
    return status is not None and (status.replayed or not status.usage["computed_tokens"])
