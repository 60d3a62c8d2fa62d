"""Tests of history: a session of several turns, cut at every position and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from microturn.sessions.history import History, Mark
from microturn.text.codec import Piece


@dataclass(frozen=True)
class State:
    """What the codec remembers: who speaks, text without ids, and the tokens that were generated since the input."""

    role: str = ""
    held: str = ""
    generated: tuple[int, ...] = ()
    is_open: bool = False


class PlainCodec:
    """A codec that remembers everything, so that nothing wrong is overlooked."""

    def __init__(self) -> None:
        self.state = State()

    def drop_held(self) -> None:
        self.state = replace(self.state, held="")

    def begin_generation(self, stop: Sequence[str], *, shows_special: bool = False) -> None:
        assert not stop, "a stop string of old would stop what is only read again"
        self.state = replace(self.state, is_open=True)

    def accept(self, token_id: int) -> Piece:
        assert self.state.is_open, "no generation has begun"
        self.state = replace(self.state, generated=(*self.state.generated, token_id))
        return Piece("")

    def end_generation(self) -> str:
        self.state = replace(self.state, is_open=False)
        return ""


@dataclass(frozen=True)
class Said:
    """A turn: its input, the text that it leaves without ids, and what was generated."""

    role: str
    given: Sequence[int] = ()
    held: str = ""
    generated: Sequence[int] = ()
    num_embeds: int = 0


TURNS = [
    Said("system", [1, 2], held="he"),
    Said("user", [3, 4, 5], generated=[6, 7, 8]),
    Said("user", held="l"),
    Said("user", held="ld"),
    Said("assistant", [9], generated=[10, 11]),
    Said("assistant", generated=[12, 13]),
    Said("user", [14, 15], num_embeds=3),
    Said("user", [16], held="again"),
]
LEN = 2 + 6 + 3 + 2 + 5 + 1


def tell(history: History, turn: Said) -> None:
    """Does what a turn does to a history."""
    start = len(history)
    history.context.append_ids(turn.given)
    if turn.num_embeds:
        history.context.append_embeds(torch.arange(4.0 * turn.num_embeds).reshape(-1, 4))
    history.codec.state = State(turn.role, turn.held)
    history.mark_input(start)
    if turn.generated:
        history.codec.begin_generation(())
        for token_id in turn.generated:
            history.context.append_ids([token_id])
            history.codec.accept(token_id)
        history.codec.end_generation()
    history.check_integrity()


def told(turns: Sequence[Said]) -> History:
    history = History(PlainCodec())
    for turn in turns:
        tell(history, turn)
    return history


def kept_turns(position: int) -> list[Said]:
    """The turns that are left of the history when it ends at a position."""
    kept: list[Said] = []
    at = 0
    for turn in TURNS:
        num_given = len(turn.given) + turn.num_embeds
        if at + num_given > position:
            if at < position:
                num_kept = position - at
                kept.append(
                    replace(
                        turn,
                        given=turn.given[:num_kept],
                        num_embeds=max(0, num_kept - len(turn.given)),
                        held="",
                        generated=(),
                    )
                )
            break
        kept.append(replace(turn, generated=turn.generated[: position - at - num_given]))
        at += num_given + len(turn.generated)
        if at > position:
            break
    return kept


def contents(history: History) -> tuple[object, ...]:
    """All that a history is made of."""
    # A span that was cut in two may stay so.
    embeds = [
        (at, embed) for span in history.context.embeds for at, embed in enumerate(span.embeds.tolist(), span.start)
    ]
    return list(history.context.token_ids), embeds, history.codec.state, list(history._marks)


def test_a_history_is_as_long_as_its_context() -> None:
    assert len(History(PlainCodec())) == 0
    assert len(told(TURNS)) == LEN


@pytest.mark.parametrize("position", range(LEN + 1))
def test_a_cut_leaves_what_there_would_be_if_nothing_had_stood_behind_it(position: int) -> None:
    history = told(TURNS)
    history.cut(position)
    history.check_integrity()
    assert contents(history) == contents(told(kept_turns(position)))


@pytest.mark.parametrize("position", range(LEN + 1))
def test_what_was_cut_is_put_back_whole(position: int) -> None:
    history = told(TURNS)
    cut = history.cut(position)
    assert cut.tail is not None
    assert len(cut.tail) == LEN - position
    history.roll_back(cut)
    history.check_integrity()
    assert contents(history) == contents(told(TURNS))


@pytest.mark.parametrize("position", range(LEN + 1))
def test_what_was_cut_is_put_back_once_what_came_since_is_undone(position: int) -> None:
    """As a turn does that rewinds, appends, generates and is cancelled."""
    history = told(TURNS)
    cut = history.cut(position)
    checkpoint = history.checkpoint()
    tell(history, Said("user", held="ne"))
    tell(history, Said("user", [20, 21], num_embeds=1, held="new", generated=[22, 23]))
    tell(history, Said("assistant", generated=[24]))
    history.roll_back(checkpoint)
    assert contents(history) == contents(told(kept_turns(position)))
    history.roll_back(cut)
    assert contents(history) == contents(told(TURNS))


@pytest.mark.parametrize("position", range(LEN + 1))
def test_what_was_cut_is_put_back_though_text_without_ids_came_since(position: int) -> None:
    history = told(TURNS)
    cut = history.cut(position)
    tell(history, Said("user", held="new"))
    history.roll_back(cut)
    assert contents(history) == contents(told(TURNS))


@pytest.mark.parametrize("second", range(LEN + 1))
def test_cuts_behind_cuts_are_put_back_in_their_order(second: int) -> None:
    for first in range(second, LEN + 1):
        history = told(TURNS)
        cuts = [history.cut(first), history.cut(second)]
        assert contents(history) == contents(told(kept_turns(second)))
        for cut in reversed(cuts):
            history.roll_back(cut)
        assert contents(history) == contents(told(TURNS))


@pytest.mark.parametrize("position", range(LEN + 1))
def test_a_history_that_was_cut_goes_on_and_is_cut_again(position: int) -> None:
    new = Said("user", [20, 21, 22], generated=[23, 24])
    history = told(TURNS)
    history.cut(position)
    tell(history, new)
    history.cut(position + 4)
    assert contents(history) == contents(told([*kept_turns(position), replace(new, generated=[23])]))
    history.cut(position + 1)
    assert contents(history) == contents(told([*kept_turns(position), replace(new, given=[20], generated=[])]))


def test_text_without_ids_stays_with_the_turn_that_left_it() -> None:
    """Half a word that was told before the cut is not behind it."""
    history = told(TURNS)
    history.cut(LEN)
    assert history.codec.state.held == "again"
    history.cut(8)
    assert (history.codec.state.role, history.codec.state.held) == ("user", "ld")
    history.cut(7)
    assert history.codec.state == State("user", generated=(6, 7))
    history.cut(2)
    assert (history.codec.state.role, history.codec.state.held) == ("system", "he")


def test_text_without_ids_is_kept_once_however_many_turns_told_it() -> None:
    history = told([Said("user", [1], held="a"), *(Said("user", held="a" * num_held) for num_held in range(2, 50))])
    assert [mark.text_state.held for mark in history.marks] == ["a", "a" * 49]


@pytest.mark.parametrize("num_turns", range(len(TURNS) + 1))
def test_a_turn_without_ids_is_undone_though_marks_were_forgotten(num_turns: int) -> None:
    """The mark that the turn before had left in the same place was forgotten for the one that was undone."""
    history, other = told(TURNS[:num_turns]), told(TURNS[:num_turns])
    checkpoint = history.checkpoint()
    tell(history, Said("assistant"))
    for one in (history, other):
        one.forget_marks(len(one))
    history.roll_back(checkpoint)
    for one in (history, other):
        tell(one, Said("user", [20]))
        one.cut(len(one) - 1)
    assert history.codec.state == other.codec.state


def test_nothing_is_left_at_zero() -> None:
    history = told(TURNS)
    history.cut(0)
    assert contents(history) == contents(History(PlainCodec()))


def test_tokens_before_any_input_are_read_from_the_beginning() -> None:
    """A START without input that was followed by nothing else leaves no mark: then there is nothing but the codec."""
    history = History(PlainCodec())
    history.context.append_ids([1, 2, 3])
    history.cut(2)
    assert history.codec.state == State(generated=(1, 2))


@pytest.mark.parametrize(
    ("marks", "message"),
    [([(0, 3), (2, 4)], "inputs overlap"), ([(3, 1)], "inputs overlap"), ([(0, 6)], "an input beyond the context")],
)
def test_integrity_finds_marks_that_cannot_be(marks: list[tuple[int, int]], message: str) -> None:
    history = History(PlainCodec())
    history.context.append_ids([1, 2, 3, 4, 5])
    history._marks = [Mark(start, end, None) for start, end in marks]
    with pytest.raises(AssertionError, match=message):
        history.check_integrity()


def test_a_history_that_was_written_down_is_cut_like_the_one_that_was_lived() -> None:
    for position in range(len(told(TURNS))):
        lived = told(TURNS)
        again = History.recalled(PlainCodec(), lived.context.copy(), lived.marks, lived.codec.state)
        lived.cut(position)
        again.cut(position)
        assert again.codec.state == lived.codec.state
        assert again.marks == lived.marks
        assert again.context.token_ids == lived.context.token_ids


def test_an_answer_begins_where_the_input_before_it_ends() -> None:
    history = History(PlainCodec())
    assert history.answer_start == 0
    for start, end in ((0, 3), (5, 9)):
        history.context.append_ids(range(end - start))
        history.mark_input(start)
        history.context.append_ids([7, 7])
        assert history.answer_start == end
    history.cut(8)
    assert history.answer_start == 8
    history.cut(4)
    assert history.answer_start == 3
