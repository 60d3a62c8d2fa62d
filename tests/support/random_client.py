"""A client that does what comes to its mind with one session after the other, and checks what comes of it.

Turns are sent singly or several at once, interrupted, repeated, refused, left in the middle. What the context must be
then, `ExpectedContext` knows.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

from support.expected_context import ExpectedContext, Sent, Transcript
from support.pipelined import PipelinedStream
from support.raw import Answer, ids, turn_request

MAX_CONTEXT = 112
MAX_QUEUED_TURNS = 3

_START_FLAG = "must specify the START flag"


class RandomClient:
    """One client with one session after the other.

    Attributes:
        transcripts: of the sessions that it has closed.
        num_done: how often it did each kind of thing, and how often it met each kind of end.

    Args:
        address: of a server with MAX_CONTEXT and MAX_QUEUED_TURNS.
        seed: of all that it draws.
    """

    def __init__(self, address: str, seed: str) -> None:
        self.transcripts: list[Transcript] = []
        self.num_done: Counter[str] = Counter()
        self._address = address
        self._rng = random.Random(seed)

    def run(self, num_actions: int) -> None:
        """Does so many things, then closes its session."""
        actions: list[Callable[[], None]] = [
            *[self._take_turn] * 3,
            *[self._take_turns_at_once] * 3,
            *[self._interrupt] * 3,
            *[self._leave] * 2,
            self._repeat,
            self._err,
            self._close,
            self._start_anew,
        ]
        self._stream = PipelinedStream(self._address)
        self._open()
        try:
            for _ in range(num_actions):
                action = self._rng.choice(actions)
                self.num_done[action.__name__.strip("_")] += 1
                action()
                self._check_len()
            self._close()
            self._stream.finish()
        finally:
            self._stream.leave()

    # ---- actions -------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._session_id: int | str = secrets.choice([secrets.token_hex(8), secrets.randbits(62) + 1])
        self._key = self._rng.choice([None, "a key"])
        self._is_numbered = self._rng.random() < 0.5
        self._begin(number=0 if self._is_numbered else None)

    def _start_anew(self) -> None:
        """START on the session that lives. With a number it would be a repetition."""
        self._keep_transcript()
        self._begin(number=None)

    def _begin(self, number: int | None) -> None:
        self._context = ExpectedContext(max_context=MAX_CONTEXT, max_queued_turns=MAX_QUEUED_TURNS)
        # Half of them begin alike, so that pages are shared.
        beginning = list(range(5000, 5048)) if self._rng.random() < 0.5 else self._some_ids(1, 60)
        options = self._options(self._rng.randint(0, 2), number)
        request = turn_request(self._session_id, start=True, options=options, input_ids=ids(*beginning))
        max_tokens = options["max_tokens"]
        self._apply(Sent(self._stream.send(request), beginning, max_tokens, number, None, False, False))

    def _take_turn(self) -> None:
        rewind_to = self._rng.randint(0, len(self._context) + 3) if self._rng.random() < 0.3 else None
        deadline_ms = self._rng.choice([0, 0, 0.1, 30.0, 10_000])
        given = self._some_ids(0, 20)
        self._apply(self._send(given, self._rng.randint(0, 6), rewind_to=rewind_to, deadline_ms=deadline_ms))

    def _take_turns_at_once(self) -> None:
        """More than may wait, now and then."""
        turns = []
        for _ in range(self._rng.randint(2, MAX_QUEUED_TURNS + 3)):
            interrupts = self._rng.random() < 0.2
            rewind_to = self._rng.randint(0, len(self._context)) if self._rng.random() < 0.2 else None
            turns.append(
                self._send(self._some_ids(0, 8), self._rng.randint(0, 3), rewind_to=rewind_to, interrupts=interrupts)
            )
        self._apply(*turns)

    def _interrupt(self) -> None:
        """Talks over an answer, by chance while it runs or when it has ended, with turns between that are not heard."""
        long_turn = self._send(self._some_ids(0, 4), max_tokens=self._rng.randint(5, 30))
        if self._rng.random() < 0.7:
            long_turn.pending.has_begun.wait(20)
        between = [self._send(self._some_ids(1, 4), max_tokens=2) for _ in range(self._rng.randint(0, 2))]
        rewind_to = self._rng.randint(0, len(self._context) + 10) if self._rng.random() < 0.6 else None
        last = self._send(self._some_ids(0, 5), self._rng.randint(0, 3), rewind_to=rewind_to, interrupts=True)
        self._apply(long_turn, *between, last)

    def _leave(self) -> None:
        """Breaks the stream in the middle of a turn, and comes back on another."""
        given = self._some_ids(1, 8)
        turn = self._send(given, max_tokens=self._rng.randint(1, 30))
        # A turn that has not reached the server is nobody's; where it is not answered, give it the time to.
        turn.pending.has_begun.wait(self._rng.choice([0.1, 20]))
        self._stream.leave()
        self._stream = PipelinedStream(self._address)
        if turn.number is not None:
            self._apply(self._send_again(turn))
            return
        status = self._ask(given=[], max_tokens=0).status
        assert status is not None
        if status["context_len"] == len(self._context) or self._context.room_after(turn) < 0:
            return
        # It had ended before anybody noticed: then it is there whole, and can be cut off.
        assert status["context_len"] == len(self._context) + len(given) + turn.max_tokens
        self._context.num_turns += 1
        self._apply(self._send([], 0, rewind_to=len(self._context)))

    def _repeat(self) -> None:
        """Sends the last turn again: it is answered as it was, and not done again."""
        if self._context.last_turn is None or self._context.last_turn.number is None:
            return
        first = self._context.last_turn.pending.answer
        again = self._send_again(self._context.last_turn).pending.wait()
        assert again.error is None, again.error
        assert (again.token_ids, again.position, again.text) == (first.token_ids, first.position, first.text)
        assert again.status is not None
        assert first.status is not None
        assert again.status.pop("replayed")
        assert again.status == {name: value for name, value in first.status.items() if name != "replayed"}
        other = turn_request(
            self._session_id, options=self._options(1, number=self._context.last_turn.number), input_ids=ids(1, 2, 3)
        )
        assert self._stream.send(other).wait().code == "INVALID_ARGUMENT"

    def _err(self) -> None:
        """Turns that are refused; nothing changes."""
        assert self._ask(given=[-1], max_tokens=1).code == "INVALID_ARGUMENT"
        assert self._ask(given=[1], max_tokens=MAX_CONTEXT).code == "CONTEXT_FULL"
        beyond = self._ask(given=[1], max_tokens=1, rewind_to=len(self._context) + 1)
        assert f"[position={len(self._context)}]" in (beyond.error or "")
        assert self._ask(given=[1], max_tokens=1, session_key="another").code == "PERMISSION_DENIED"
        gap = self._ask(given=[1], max_tokens=1, turn=self._context.num_turns + 1)
        assert f"[turn={self._context.num_turns}]" in (gap.error or "")

    def _close(self) -> None:
        """END, with a last turn or without; then another session."""
        if self._rng.random() < 0.5:
            self._apply(self._send(self._some_ids(0, 3), max_tokens=0))
        answer = self._ask(given=[], max_tokens=0, end=True)
        assert answer.status is not None, answer.error
        assert answer.status["finish_reason"] == "closed"
        assert answer.status["context_len"] == len(self._context)
        self._keep_transcript()
        self._open()

    # ---- what is sent --------------------------------------------------------------------------------------------

    def _some_ids(self, low: int, high: int) -> list[int]:
        return self._rng.choices(range(1000, 40_000), k=self._rng.randint(low, high))

    def _options(self, max_tokens: int, number: int | None = None, **options: Any) -> dict[str, Any]:
        options |= {"max_tokens": max_tokens, "ignore_eos": True}
        if self._key is not None:
            options.setdefault("session_key", self._key)
        if number is not None:
            options["turn"] = number
        return options

    def _send(
        self,
        given: list[int],
        max_tokens: int,
        *,
        rewind_to: int | None = None,
        interrupts: bool = False,
        deadline_ms: float = 0,
    ) -> Sent:
        options: dict[str, Any] = {}
        if rewind_to is not None:
            options["rewind_to"] = rewind_to
        if interrupts:
            options["on_overlap"] = "interrupt"
        if deadline_ms:
            options["deadline_ms"] = deadline_ms
        number = self._next_number if self._is_numbered else None
        self._next_number += 1
        request = turn_request(
            self._session_id, options=self._options(max_tokens, number, **options), input_ids=ids(*given)
        )
        pending = self._stream.send(request)
        return Sent(pending, given, max_tokens, number, rewind_to, interrupts, bool(deadline_ms))

    def _send_again(self, turn: Sent) -> Sent:
        """The same turn once more, by `resume` where Triton has forgotten the sequence."""
        request = type(turn.pending.request)()
        request.CopyFrom(turn.pending.request)
        request.id = secrets.token_hex(4)
        pending = self._stream.send(request)
        if _START_FLAG in (pending.wait().error or ""):
            pending = self._stream.send(_resuming(request))
        return Sent(
            pending, turn.given, turn.max_tokens, turn.number, turn.rewind_to, turn.interrupts, turn.has_deadline
        )

    def _ask(self, *, given: list[int], max_tokens: int, end: bool = False, **options: Any) -> Answer:
        """A turn that nothing has to be applied for."""
        request = turn_request(
            self._session_id, end=end, options=self._options(max_tokens, **options), input_ids=ids(*given)
        )
        answer = self._stream.send(request).wait()
        if _START_FLAG in (answer.error or ""):
            answer = self._stream.send(_resuming(request)).wait()
        return answer

    # ---- what must come of it ------------------------------------------------------------------------------------

    def _apply(self, *turns: Sent) -> None:
        """Waits for the answers to turns that were sent together, and checks them."""
        self._context.apply(turns)
        self._next_number = self._context.num_turns

    def _check_len(self) -> None:
        answer = self._ask(given=[], max_tokens=0)
        assert answer.status is not None, answer.error
        assert answer.status["context_len"] == len(self._context)
        assert answer.status["turn"] == self._context.num_turns

    def _keep_transcript(self) -> None:
        self.transcripts.append(self._context.transcript())
        self.num_done += self._context.num_ends


def _resuming(request: Any) -> Any:
    """The same turn for a session that lives, though Triton has forgotten its sequence."""
    again = type(request)()
    again.CopyFrom(request)
    again.id = secrets.token_hex(4)
    again.parameters["sequence_start"].bool_param = True
    again.parameters["resume"].bool_param = True
    return again
