"""Answers on their way out: what turns say, packed into responses, and which clients have gone.

Knows turns and how their answers end; knows neither Triton nor threads. Whoever calls `Responses.step` does the work:
a thread in the server (`response_thread`), a test or a simulator elsewhere.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Protocol

from microturn.errors import MicroturnError
from microturn.turn import Status, Turn, TurnOutput

log = logging.getLogger(__name__)

Answer = TurnOutput | MicroturnError

# How often clients are asked for whether they are still there. Asking costs Triton 60 µs a turn.
_CANCEL_POLL_S = 0.1


class Sender(Protocol):
    """The way back to the client of one request."""

    def send(self, answer: Answer) -> None:
        """Sends a response; the answer that ends the turn is the last one."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone."""


class ResponseStream:
    """The answer of one turn on its way to the client; the turn's sink.

    Args:
        sender: of the turn's request.
        responses: packs and sends what is put here.
    """

    def __init__(self, sender: Sender, responses: Responses) -> None:
        self.sender = sender
        self._responses = responses

    def put(self, output: TurnOutput) -> None:
        self._responses.post(self, output)

    def fail(self, error: MicroturnError) -> None:
        self._responses.post(self, error)


class Responses:
    """Sends what turns answer, packing what is ready together, and finds the clients that have gone.

    `watch` and `post` may be called by any thread, `step` by one.

    Args:
        cancel: is told of turns that nobody waits for any more.
        answered: is told of turns whose last response has been sent: the turn, how it ended, when sending began.
        clock: seconds, monotonic.
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
        self._next_poll_s = 0.0

    def watch(self, stream: ResponseStream, turn: Turn) -> None:
        """Asks from now on whether the turn's client is still there."""
        self._posts.put((stream, turn))

    def post(self, stream: ResponseStream, answer: Answer) -> None:
        """Hands on a piece of an answer."""
        self._posts.put((stream, answer))

    def close(self) -> None:
        """Has the step that takes this be the last, behind what was posted before."""
        self._posts.put(None)

    def step(self, *, block: bool = False) -> bool:
        """Sends what has been posted, and asks about clients when it is time to.

        Args:
            block: wait for a post, or until it is time to ask.

        Returns:
            Whether more may come.
        """
        is_open = True
        ready: dict[ResponseStream, list[Answer]] = {}
        for post in self._take_posts(block=block):
            if post is None:
                is_open = False
                continue
            stream, item = post
            if isinstance(item, Turn):
                self._unanswered[stream] = item
            else:
                ready.setdefault(stream, []).append(item)
        for stream, answers in ready.items():
            self._send(stream, answers)
        self._poll_cancelled()
        return is_open

    def _take_posts(self, *, block: bool) -> list[tuple[ResponseStream, Turn | Answer] | None]:
        posts: list[tuple[ResponseStream, Turn | Answer] | None] = []
        try:
            if block:
                posts.append(self._posts.get(timeout=_CANCEL_POLL_S if self._unanswered else None))
            while True:
                posts.append(self._posts.get_nowait())
        except queue.Empty:
            return posts

    def _send(self, stream: ResponseStream, answers: list[Answer]) -> None:
        answer = _packed(answers)
        begun_s = self._clock()
        try:
            stream.sender.send(answer)
        except Exception:
            # The turn has ended in the engine; only its client can be affected.
            log.exception("a response could not be sent")
        end = answer if isinstance(answer, MicroturnError) else answer.status
        if end is not None:
            turn = self._unanswered.pop(stream, None)
            if turn is not None:
                self._answered(turn, end, begun_s)

    def _poll_cancelled(self) -> None:
        now_s = self._clock()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + _CANCEL_POLL_S
        for stream, turn in self._unanswered.items():
            if stream.sender.is_cancelled():
                self._cancel(turn)


def _packed(answers: list[Answer]) -> Answer:
    """What a turn answered since the last response, as one response."""
    last = answers[-1]
    if isinstance(last, MicroturnError):
        return last  # what was generated before it is rolled back
    return TurnOutput.joined([answer for answer in answers if isinstance(answer, TurnOutput)])
