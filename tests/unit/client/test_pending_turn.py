import pytest

from microturn_client import InvalidArgument, NotFound, Tokens, TurnEnd
from microturn_client._inputs import encode_input
from microturn_client._pending_turn import PendingTurn
from microturn_client._phase import Phase
from microturn_client._wire import Response, read_response


@pytest.fixture
def turn():
    return PendingTurn(encode_input([1]), {"max_tokens": 4}, deadline=0.0)


def test_events_come_out_in_order_and_once(turn, wire):
    turn.take_in(Response("1", text="a", ids=(5,), position=3), context_len=0)
    turn.take_in(read_response(wire.message("1", text=b"b", ids=(6,), position=4, end=wire.status())), context_len=7)
    assert turn.next_event() == Tokens("a", (5,), 3)
    assert turn.next_event() == Tokens("b", (6,), 4)
    assert turn.is_over
    assert isinstance(turn.next_event(), TurnEnd)
    assert turn.next_event() is None


def test_a_response_without_anything_is_no_event(turn):
    turn.take_in(Response("1"), context_len=0)
    assert turn.next_event() is None
    assert not turn.is_over


def test_text_alone_stands_behind_the_tokens_before_it(turn):
    turn.take_in(Response("1", text="x"), context_len=11)
    turn.take_in(Response("1", ids=(5, 6), position=11), context_len=11)
    turn.take_in(Response("1", text="y"), context_len=11)
    assert [turn.next_event().position for _ in range(3)] == [11, 11, 13]


def test_an_error_comes_after_the_events_before_it_and_stays(turn):
    turn.take_in(Response("1", ids=(5,), position=0), context_len=0)
    turn.fail(InvalidArgument("no"))
    assert turn.is_over
    assert turn.next_event() == Tokens("", (5,), 0)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="no"):
            turn.next_event()


def test_the_first_end_stands(turn):
    turn.fail(NotFound("first"))
    turn.fail(InvalidArgument("second"))
    turn.take_in(Response("1", ids=(5,), position=0), context_len=0)
    with pytest.raises(NotFound, match="first"):
        turn.next_event()


def test_each_turn_fails_with_an_error_of_its_own(turn):
    error = NotFound("gone")
    turn.fail(error)
    with pytest.raises(NotFound) as raised:
        turn.next_event()
    assert raised.value is not error


def test_nothing_comes_out_of_a_turn_that_was_left(turn):
    turn.take_in(Response("1", ids=(5,), position=0), context_len=0)
    turn.leave()
    turn.fail(InvalidArgument("no"))
    assert turn.next_event() is None
    assert turn.is_over


class TestHeld:
    @pytest.fixture(autouse=True)
    def _ends_while_it_is_held(self, turn, wire):
        turn.hold()
        assert turn.phase is Phase.HELD
        turn.take_in(read_response(wire.message("1", ids=(5,), position=3, end=wire.status())), context_len=0)
        assert turn.phase is Phase.HELD_ENDED
        assert turn.next_event() is None
        assert not turn.is_over

    def test_what_was_kept_back_comes_where_the_cut_is_refused(self, turn):
        turn.release()
        assert turn.phase is Phase.ENDED
        assert turn.next_event() == Tokens("", (5,), 3)
        assert isinstance(turn.next_event(), TurnEnd)

    def test_it_begins_from_nothing_where_the_cut_has_undone_it(self, turn):
        turn.redo()
        assert turn.phase is Phase.OPEN
        assert turn.next_event() is None
        assert turn.num_undone == 1

    def test_an_error_that_was_told_stands(self, turn):
        turn.release()
        turn.redo()
        turn.fail(NotFound("gone"))
        turn.hold()
        turn.redo()
        assert turn.phase is Phase.ENDED
        with pytest.raises(NotFound):
            turn.next_event()
