"""Exactly once: what a session's numbered turns answered, kept so that one sent again is not done again."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from microturn.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput
from microturn.sessions.turn import Turn, TurnOutput, TurnRequest

# Options about how a turn is delivered. A client that repeats it may well say them differently.
_DELIVERY = frozenset({"deadline_ms", "stream", "stream_interval_ms", "traceparent", "session_key", "tenant"})


@dataclass(frozen=True)
class Result:
    """What a turn said, and what it answered."""

    content: bytes
    answer: TurnOutput


class Results:
    """The last results of a session.

    Args:
        capacity: how many are kept: as many as turns can be outstanding.
        kept: results by number, the oldest first, of which the last are kept.
    """

    def __init__(self, capacity: int, kept: Iterable[tuple[int, Result]] = ()) -> None:
        self._capacity = capacity
        self._results: OrderedDict[int, Result] = OrderedDict()
        for number, result in kept:
            self._keep(number, result)

    def copy(self) -> Results:
        """An independent record of the same results."""
        return Results(self._capacity, self.kept())

    def kept(self) -> list[tuple[int, Result]]:
        """The results by number, the oldest first."""
        return list(self._results.items())

    def record(self, turn: Turn) -> None:
        """Keeps the answer of a numbered turn that has ended well."""
        self._keep(turn.number, Result(content_of(turn.request), TurnOutput.joined(turn.pieces)))

    def find(self, request: TurnRequest) -> TurnOutput | None:
        """The answer to a turn that is a repetition; None when no result of its number is kept.

        Raises:
            InvalidArgument: the turn of that number was another one.
        """
        result = self._results.get(request.options["turn"])
        if result is None:
            return None
        check_same(request, result.content)
        assert result.answer.status is not None
        return result.answer._replace(status=replace(result.answer.status, replayed=True))

    def answer_repetition(
        self, request: TurnRequest, open_turns: Iterable[Turn], num_turns: int, *, max_waiting: int
    ) -> bool:
        """Answers a turn that came before: from its record, or together with the one that is not done yet.

        Args:
            request: of the turn.
            open_turns: those of the session.
            num_turns: the session's.
            max_waiting: repetitions that one turn is answered to.

        Returns:
            Whether it came before.

        Raises:
            InvalidArgument: its number is that of another turn.
            FailedPrecondition: its answer is not kept any more.
            ResourceExhausted: too many clients wait for the turn.
        """
        number = request.options.get("turn")
        if number is None:
            return False
        for earlier in open_turns:
            if earlier.is_numbered and earlier.options.turn == number:
                check_same(request, content_of(earlier.request))
                if len(earlier.sinks) > max_waiting:
                    raise ResourceExhausted(f"{len(earlier.sinks)} clients wait for turn {number}", retry_after_ms=200)
                earlier.attach(request.sink)
                return True
        answer = self.find(request)
        if answer is not None:
            request.sink.put(answer)
        elif number < num_turns:
            raise FailedPrecondition(
                f"the answer to turn {number} is not kept any more: go on with turn {num_turns}", turn=num_turns
            )
        return answer is not None

    def _keep(self, number: int, result: Result) -> None:
        self._results[number] = result
        if len(self._results) > self._capacity:
            self._results.popitem(last=False)


def check_same(request: TurnRequest, content: bytes) -> None:
    """Checks that a turn is what came before under its number.

    Raises:
        InvalidArgument: it is not.
    """
    if content_of(request) != content:
        number = request.options["turn"]
        raise InvalidArgument(
            f"turn {number} came before with other content, perhaps from another client that goes on with this session "
            "too: repeat it as it was, or number it anew, and let one client at a time speak for a session"
        )


def content_of(request: TurnRequest) -> bytes:
    """A digest of what a turn says: input, END and options. Where and how it is delivered does not count."""
    match request.input:
        case TokenInput(token_ids):
            given = b"ids" + array("q", token_ids).tobytes()
        case TextInput(text):
            given = b"text" + text.encode()
        case EmbedInput(embeds):
            given = b"embeds" + embeds.numpy().tobytes()
    said = {name: value for name, value in request.options.items() if name not in _DELIVERY}
    # `resume` is how a client that lost its stream comes back to the turns that it repeats.
    session_options = replace(request.session_options, resume=False)
    form = repr((sorted(said.items()), session_options, request.end)).encode()
    return hashlib.blake2b(form + given, digest_size=16).digest()
