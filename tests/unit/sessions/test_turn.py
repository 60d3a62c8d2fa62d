"""Tests of turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from microturn.errors import InvalidArgument, Unavailable
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput, TurnInput
from microturn.sessions.options import SessionOptions, TurnOptions
from microturn.sessions.turn import Status, Turn, TurnOutput, TurnRequest
from support.driver import Recorder

STATUS = Status("length", None, 0, 3, 3, {}, {}, 60.0, 1)


def turn_of(given: TurnInput, asked: int | None = None, default: int | None = None) -> Turn:
    """A turn that asks for so many tokens in a session whose START asked for `default`."""
    options = {} if asked is None else {"max_tokens": asked}
    request = TurnRequest(1, given, Recorder(), 0.0, options=options)
    return Turn(request, options=TurnOptions(max_tokens=default if asked is None else asked))


@pytest.mark.parametrize("empty", [TokenInput(()), TextInput(""), EmbedInput(torch.empty(0, 4))])
def test_inputs_that_append_nothing(empty: TurnInput) -> None:
    assert empty.is_empty


@pytest.mark.parametrize("full", [TokenInput((0,)), TextInput(" "), EmbedInput(torch.zeros(1, 4))])
def test_inputs_that_append_something(full: TurnInput) -> None:
    assert not full.is_empty


@pytest.mark.parametrize(
    ("asked", "default", "max_tokens"),
    [(None, None, 16), (0, None, 0), (5, None, 5), (None, 7, 7), (5, 7, 5), (0, 7, 0)],
)
def test_an_input_is_answered_with_sixteen_tokens_unless_told(
    asked: int | None, default: int | None, max_tokens: int
) -> None:
    turn = turn_of(TokenInput((1,)), asked, default)
    assert turn.max_tokens == max_tokens
    assert turn.generates is (max_tokens > 0)


@pytest.mark.parametrize(
    ("asked", "default", "max_tokens"), [(None, None, 0), (None, 7, 0), (5, None, 5), (5, 7, 5), (0, 7, 0)]
)
def test_an_empty_input_generates_only_if_its_own_turn_says_so(
    asked: int | None, default: int | None, max_tokens: int
) -> None:
    """START's `max_tokens` made every keep-alive, and the END of every session, generate an answer to nothing."""
    for empty in (TokenInput(()), TextInput(""), EmbedInput(torch.empty(0, 4))):
        assert turn_of(empty, asked, default).max_tokens == max_tokens


# ---- what a turn asks for ------------------------------------------------------------------------------------------


def asking(given: TurnInput, *, end: bool = False, default: dict[str, Any] | None = None, **options: Any) -> Turn:
    """A turn with options of its own, in a session whose START said `default`."""
    request = TurnRequest(1, given, Recorder(), 1000.0, end=end, options=options)
    return Turn(request, options=TurnOptions(**{**(default or {}), **options}))


EMPTY, FULL = TokenInput(()), TokenInput((1,))


@pytest.mark.parametrize(
    ("turn", "interrupts"),
    [
        (asking(FULL), False),
        (asking(FULL, on_overlap="interrupt"), True),
        (asking(FULL, default={"on_overlap": "interrupt"}), True),
        (asking(FULL, default={"on_overlap": "interrupt"}, on_overlap="queue"), False),
        (asking(FULL, default={"on_overlap": "interrupt"}, max_tokens=0), True),
        (asking(EMPTY, on_overlap="interrupt"), True),
        (asking(EMPTY, default={"on_overlap": "interrupt"}), False),
        (asking(EMPTY, default={"on_overlap": "interrupt"}, end=True), False),
        (asking(EMPTY, default={"on_overlap": "interrupt", "max_tokens": 5}), False),
        (asking(EMPTY, default={"on_overlap": "interrupt"}, max_tokens=5), True),
        (asking(EMPTY, default={"on_overlap": "interrupt"}, max_tokens=5, on_overlap="queue"), False),
    ],
)
def test_a_turn_interrupts_if_it_says_so_or_says_something_where_its_session_does(turn: Turn, interrupts: bool) -> None:
    assert turn.interrupts is interrupts


@pytest.mark.parametrize("empty", [EMPTY, TextInput(""), EmbedInput(torch.empty(0, 4))])
def test_a_turn_that_asks_for_nothing_is_a_keep_alive(empty: TurnInput) -> None:
    assert asking(empty).is_keepalive
    assert asking(empty, default={"max_tokens": 5, "on_overlap": "interrupt", "deadline_ms": 5.0}).is_keepalive
    assert asking(empty, deadline_ms=5.0, session_key="k", max_tokens=0, on_overlap="queue").is_keepalive


@pytest.mark.parametrize(
    "turn",
    [
        asking(FULL, max_tokens=0),
        asking(EMPTY, max_tokens=1),
        asking(EMPTY, on_overlap="interrupt"),
        asking(EMPTY, role="user"),
        asking(EMPTY, rewind_to=0),
        asking(EMPTY, turn=0),
        asking(EMPTY, end=True),
    ],
)
def test_a_turn_that_asks_for_anything_is_none(turn: Turn) -> None:
    assert not turn.is_keepalive


def test_a_deadline_counts_from_the_arrival() -> None:
    turn = asking(FULL, deadline_ms=250.0)
    assert turn.deadline_s == 1000.25
    assert [turn.is_late(now_s) for now_s in (1000.0, 1000.24, 1000.25, 1001.0)] == [False, False, True, True]


def test_without_a_deadline_no_turn_is_late() -> None:
    for turn in (asking(FULL), asking(FULL, default={"deadline_ms": 5.0}, deadline_ms=0.0)):
        assert turn.deadline_s is None
        assert not turn.is_late(1e12)


def test_only_a_start_that_does_not_resume_opens() -> None:
    request = TurnRequest(1, FULL, Recorder(), 0.0)
    assert not request.opens
    assert replace(request, start=True).opens
    assert not replace(request, start=True, session_options=SessionOptions(resume=True)).opens


# ---- who is answered -----------------------------------------------------------------------------------------------

PIECES = [TurnOutput((1,), "a", 10), TurnOutput((2,), "b", 11), TurnOutput(text="c", status=STATUS)]


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_who_asks_again_is_answered_from_the_beginning(num_before: int) -> None:
    turn = asking(FULL, turn=0)
    first, again = turn.request.sink, Recorder()
    for piece in PIECES[:num_before]:
        turn.put(piece, 0.0)
    turn.attach(again)
    for piece in PIECES[num_before:]:
        turn.put(piece, 0.0)
    assert first.outputs == PIECES
    assert again.token_ids == [1, 2]
    assert again.text == "abc"
    assert again.outputs[0].position == 10
    assert again.status == STATUS


def test_an_error_is_told_to_all_who_asked() -> None:
    turn = asking(FULL, turn=0)
    sinks = [turn.request.sink, Recorder(), Recorder()]
    for sink in sinks[1:]:
        turn.attach(sink)
    error = InvalidArgument("no")
    turn.fail(error)
    assert [sink.error for sink in sinks] == [error] * 3


def test_who_has_left_is_told_that_and_nothing_more() -> None:
    turn = asking(FULL, turn=0)
    first, again, stranger = turn.request.sink, Recorder(), Recorder()
    turn.attach(again)
    turn.put(PIECES[0], 0.0)
    error = Unavailable("gone")
    for sink in (first, first, stranger):
        turn.detach(sink, error)
    turn.put(PIECES[2], 0.0)
    assert (first.outputs, first.error) == (PIECES[:1], error)
    assert not stranger.is_done
    assert again.is_done
    assert TurnOutput.joined(turn.pieces).token_ids == (1,), "what was said is kept, whoever listens"


def test_a_turn_without_a_number_keeps_nothing_of_its_answer() -> None:
    """Nobody can ask for it again."""
    turn = asking(FULL)
    for piece in PIECES:
        turn.put(piece, 0.0)
    assert turn.pieces == []


def test_a_turn_is_only_equal_to_itself() -> None:
    """B1: a turn that was refused ended the one that ran; the object is the token by which turns are told apart."""
    assert turn_of(TokenInput((1,))) != turn_of(TokenInput((1,)))


def test_joined_pieces_read_like_one() -> None:
    first = TurnOutput((1, 2), "ab", 10, (-0.1, -0.2))
    last = TurnOutput((3,), "c", 12, (-0.3,), STATUS, (7, 8))
    assert TurnOutput.joined([first, last]) == TurnOutput((1, 2, 3), "abc", 10, (-0.1, -0.2, -0.3), STATUS, (7, 8))


def test_a_joined_piece_begins_where_the_first_token_is() -> None:
    only_text = TurnOutput((), "a", 0)
    tokens = TurnOutput((3,), "b", 12)
    assert TurnOutput.joined([only_text, tokens]).position == 12
    assert TurnOutput.joined([tokens, TurnOutput(status=STATUS)]).position == 12


# ---- an answer as a whole ------------------------------------------------------------------------------------------


def test_an_answer_that_is_not_streamed_is_one_piece_for_all_who_wait() -> None:
    sinks = [Recorder(), Recorder()]
    turn = Turn(TurnRequest(1, TokenInput((1,)), sinks[0], 0.0), options=TurnOptions(stream=False))
    turn.put(TurnOutput(token_ids=(5,), text="a", position=7), 0.0)
    turn.attach(sinks[1])
    turn.put(TurnOutput(token_ids=(6,), text="b", position=8), 0.0)
    assert not any(sink.outputs for sink in sinks)
    turn.put(TurnOutput(text="c", status=STATUS), 0.0)
    whole = TurnOutput(token_ids=(5, 6), text="abc", position=7, status=STATUS)
    assert [sink.outputs for sink in sinks] == [[whole], [whole]]


def test_an_answer_that_is_not_streamed_and_fails_is_an_error_alone() -> None:
    turn = Turn(TurnRequest(1, TokenInput((1,)), sink := Recorder(), 0.0), options=TurnOptions(stream=False))
    turn.put(TurnOutput(token_ids=(5,), position=7), 0.0)
    turn.fail(Unavailable("gone"))
    assert (sink.outputs, sink.code) == ([], "UNAVAILABLE")


# ---- an answer with an interval ------------------------------------------------------------------------------------


def paced_turn(interval_ms: float = 50.0) -> Turn:
    request = TurnRequest(1, TokenInput((1,)), Recorder(), 0.0, options={"turn": 0})
    return Turn(request, options=TurnOptions(stream_interval_ms=interval_ms))


def put_each(turn: Turn, times_ms: Sequence[int]) -> None:
    """Puts a token at each of these times; its id is the time."""
    for time_ms in times_ms:
        turn.put(TurnOutput(token_ids=(time_ms,), text=f"{time_ms} ", position=time_ms), time_ms / 1e3)


@pytest.mark.parametrize(
    ("interval_ms", "groups"),
    [
        (0.0, [(0,), (14,), (28,), (42,), (56,), (70,), (120,), (125,)]),
        (50.0, [(0,), (14, 28, 42, 56), (70, 120), (125,)]),
        (1000.0, [(0,), (14, 28, 42, 56, 70, 120, 125)]),
    ],
)
def test_tokens_behind_the_first_wait_until_the_interval_has_passed(
    interval_ms: float, groups: list[tuple[int, ...]]
) -> None:
    turn = paced_turn(interval_ms)
    put_each(turn, [0, 14, 28, 42, 56, 70, 120])
    turn.put(TurnOutput(token_ids=(125,), position=125, status=STATUS), 0.125)
    sink = turn.request.sink
    assert [output.token_ids for output in sink.outputs] == groups
    assert [output.position for output in sink.outputs] == [group[0] for group in groups]
    assert sink.text == "0 14 28 42 56 70 120 "
    assert sink.status == STATUS


def test_who_asks_again_within_an_interval_gets_each_token_once() -> None:
    turn = paced_turn()
    put_each(turn, [0, 14, 28])
    turn.attach(again := Recorder())
    put_each(turn, [42])
    turn.put(TurnOutput(status=STATUS), 0.05)
    assert turn.request.sink.token_ids == again.token_ids == [0, 14, 28, 42]


def test_tokens_that_wait_go_with_a_turn_that_fails() -> None:
    turn = paced_turn()
    put_each(turn, [0, 14])
    turn.fail(Unavailable("gone"))
    sink = turn.request.sink
    assert (sink.token_ids, sink.code) == ([0], "UNAVAILABLE")
