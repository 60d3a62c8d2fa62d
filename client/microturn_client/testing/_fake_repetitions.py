"""Exactly once, as the fake server has it: turns that come again under their numbers are answered, not done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microturn_client.testing._fake_model import decode
from microturn_client.testing._fake_session import FakeSession, FakeTurn, RefusedError
from microturn_client.testing._messages import FakeRequest, answer


def is_repetition(session: FakeSession, turn: FakeTurn) -> bool:
    """Whether a turn came before; if so, it is answered, or will be with the first.

    Raises:
        RefusedError: its number was another turn's, or its answer is not kept.
    """
    request = turn.request
    number = request.options.get("turn")
    if number is None:
        return False
    [(request_id, send)] = turn.sinks
    for earlier in [*([session.running] if session.running else []), *session.queue]:
        if earlier.is_numbered and earlier.request.options["turn"] == number:
            _check_same(request, earlier.request.content)
            if earlier.output and earlier.streams:
                send(answer(request_id, **_output_of(earlier)))
            earlier.sinks.append((request_id, send))
            return True
    if number in session.results:
        content, told = session.results[number]
        _check_same(request, content)
        send(answer(request_id, **{**told, "status": {**told["status"], "replayed": True}}))
        return True
    if number < session.num_turns:
        raise RefusedError(f"FAILED_PRECONDITION: the answer to turn {number} is not kept [turn={session.num_turns}]")
    return False


def remember(
    session: FakeSession, turn: FakeTurn, status: dict[str, object], ids: Sequence[int] | None, *, max_kept: int
) -> None:
    """Keeps how a numbered turn ended; of a session's the last few."""
    told = {**_output_of(turn), "status": status, "appended_ids": ids}
    session.results[turn.number] = (turn.request.content, told)
    for number in sorted(session.results)[:-max_kept]:
        del session.results[number]


def _output_of(turn: FakeTurn) -> dict[str, Any]:
    """What was generated, as arguments of ``answer``."""
    told = {"token_ids": turn.output, "position": turn.output_position, "text": decode(turn.output)}
    return {**told, **turn.logprobs_of(turn.output)}


def _check_same(request: FakeRequest, content: tuple[object, ...]) -> None:
    if request.content != content:
        raise RefusedError(f"INVALID_ARGUMENT: turn {request.options['turn']} came before with other content")
