"""Tests of results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microturn.errors import InvalidArgument
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput, TurnInput
from microturn.sessions.options import SessionOptions
from microturn.sessions.results import Results, check_same, content_of
from microturn.sessions.turn import Status, Turn, TurnOutput, TurnRequest
from support.driver import Recorder

STATUS = Status("length", None, 0, 3, 3, {}, {}, 60.0, 1)


def request_of(given: TurnInput | None = None, *, number: int = 0, **values: Any) -> TurnRequest:
    options = {"turn": number, **values.pop("options", {})}
    return TurnRequest(1, given or TokenInput((5, 6)), Recorder(), 0.0, options=options, **values)


def ended(request: TurnRequest, *pieces: TurnOutput) -> Turn:
    """A turn that has answered so."""
    turn = Turn(request, number=request.options["turn"])
    for piece in (*pieces, TurnOutput(text=f"turn {turn.number}", status=replace(STATUS, turn=turn.number))):
        turn.put(piece, 0.0)
    return turn


# ---- the record ----------------------------------------------------------------------------------------------------


def test_a_result_is_the_whole_answer_in_one_piece_and_says_that_it_is_a_repetition() -> None:
    results = Results(capacity=2)
    results.record(ended(request_of(), TurnOutput((1,), "a", 10, (-0.5,)), TurnOutput((2,), "b", 11, (-0.25,))))
    assert results.find(request_of()) == TurnOutput(
        (1, 2), "abturn 0", 10, (-0.5, -0.25), status=replace(STATUS, replayed=True)
    )


def test_of_a_number_that_never_was_there_is_no_result() -> None:
    results = Results(capacity=2)
    results.record(ended(request_of(number=4)))
    assert results.find(request_of(number=3)) is None
    assert results.find(request_of(number=5)) is None


def test_only_the_last_results_are_kept() -> None:
    results = Results(capacity=3)
    for number in range(5):
        results.record(ended(request_of(number=number)))
    found = [results.find(request_of(number=number)) for number in range(5)]
    assert [answer and answer.text for answer in found] == [None, None, "turn 2", "turn 3", "turn 4"]


def test_other_content_is_refused_and_the_record_stays() -> None:
    results = Results(capacity=3)
    results.record(ended(request_of()))
    with pytest.raises(InvalidArgument, match="turn 0 came before with other content"):
        results.find(request_of(TokenInput((5, 7))))
    assert results.find(request_of()) is not None


# ---- content -------------------------------------------------------------------------------------------------------

EMBEDS = torch.arange(8.0).reshape(2, 4)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (request_of(TokenInput((5, 6))), request_of(TokenInput([5, 6]))),
        (request_of(EmbedInput(EMBEDS)), request_of(EmbedInput(EMBEDS.clone()))),
        (request_of(EmbedInput(EMBEDS.T.contiguous().T)), request_of(EmbedInput(EMBEDS))),
        (request_of(options={"seed": 1, "top_k": 2}), request_of(options={"top_k": 2, "seed": 1})),
        (request_of(), request_of(start=True)),
        (request_of(), request_of(session_options=SessionOptions(resume=True))),
        (request_of(), replace(request_of(), arrived_s=99.0, sink=Recorder())),
        *(
            (request_of(), request_of(options={name: value}))
            for name, value in {"deadline_ms": 5.0, "traceparent": "00", "session_key": "k", "tenant": "t"}.items()
        ),
    ],
)
def test_turns_that_say_the_same(one: TurnRequest, other: TurnRequest) -> None:
    assert content_of(one) == content_of(other)
    check_same(one, content_of(other))


@pytest.mark.parametrize(
    "other",
    [
        request_of(TokenInput((6, 5))),
        request_of(TokenInput((5,))),
        request_of(TokenInput(())),
        request_of(TextInput("\x05\x06")),
        request_of(EmbedInput(torch.tensor([[5.0, 6.0, 0.0, 0.0]]))),
        request_of(number=1),
        request_of(end=True),
        request_of(options={"max_tokens": 1}),
        request_of(options={"max_tokens": 0}),
        request_of(options={"seed": 1}),
        request_of(options={"rewind_to": 0}),
        request_of(options={"on_overlap": "interrupt"}),
        request_of(session_options=SessionOptions(max_context=9)),
        request_of(session_options=SessionOptions(tools='[{"name": "clock"}]')),
    ],
)
def test_turns_that_say_something_else(other: TurnRequest) -> None:
    with pytest.raises(InvalidArgument, match=f"turn {other.options['turn']} came before with other content"):
        check_same(other, content_of(request_of()))


def test_kinds_of_input_with_the_same_bytes_are_not_the_same() -> None:
    """Eight zero bytes are an id, two embedded numbers and eight characters."""
    kinds = [TokenInput((0,)), EmbedInput(torch.zeros(1, 2)), TextInput("\0" * 8)]
    assert len({content_of(request_of(kind)) for kind in kinds}) == 3
    assert len({content_of(request_of(TextInput(text))) for text in ("", "ids", "text", "é", "e\u0301")}) == 5


def test_a_copy_is_a_record_of_its_own() -> None:
    results = Results(capacity=2)
    results.record(ended(request_of()))
    copy = results.copy()
    results.record(ended(request_of(number=1)))
    assert [number for number, _ in results.kept()] == [0, 1]
    assert [number for number, _ in copy.kept()] == [0]


def test_of_what_is_handed_over_the_last_results_are_kept() -> None:
    results = Results(capacity=3)
    for number in range(3):
        results.record(ended(request_of(number=number)))
    assert [number for number, _ in Results(2, results.kept()).kept()] == [1, 2]
