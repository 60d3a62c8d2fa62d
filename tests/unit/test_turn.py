"""Tests of turn."""

from __future__ import annotations

import pytest
import torch

from microturn.options import TurnOptions
from microturn.turn import (
    EmbedInput,
    Status,
    TextInput,
    TokenInput,
    Turn,
    TurnInput,
    TurnOutput,
    TurnRequest,
    is_empty,
)
from support.driver import Recorder

STATUS = Status("length", None, 0, 3, 3, {}, {}, 60.0, 1)


def turn_of(given: TurnInput, asked: int | None = None, default: int | None = None) -> Turn:
    """A turn that asks for so many tokens in a session whose START asked for `default`."""
    options = {} if asked is None else {"max_tokens": asked}
    request = TurnRequest(1, given, Recorder(), 0.0, options=options)
    return Turn(request, options=TurnOptions(max_tokens=default if asked is None else asked))


@pytest.mark.parametrize("empty", [TokenInput(()), TextInput(""), EmbedInput(torch.empty(0, 4))])
def test_inputs_that_append_nothing(empty: TurnInput) -> None:
    assert is_empty(empty)


@pytest.mark.parametrize("full", [TokenInput((0,)), TextInput(" "), EmbedInput(torch.zeros(1, 4))])
def test_inputs_that_append_something(full: TurnInput) -> None:
    assert not is_empty(full)


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
