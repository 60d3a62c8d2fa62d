"""Tests of forecast."""

from __future__ import annotations

import gc
import weakref

import pytest

from microturn.kv.pool import PagePool
from microturn.kv.stored import StoredImage, StoredKV
from microturn.kv.table_state import TableState
from microturn.offload.forecast import Forecast
from microturn.sessions.session import Session
from support.sessions import make_session, make_turn


def away(session_id: int, *arrivals_s: float) -> Session:
    """A session outside the pool whose turns came then."""
    session = make_session(PagePool(4, 4), session_id, context_len=5)
    session.stored = StoredKV(StoredImage(TableState(4, 4), 1, lambda _: None, None), TableState(4, 4), 0.0)
    for arrived_s in arrivals_s:
        session.beat.note(arrived_s)
    return session


@pytest.fixture
def forecast() -> Forecast:
    return Forecast()


def test_sessions_are_named_once_in_the_order_in_which_they_are_wanted(forecast: Forecast) -> None:
    slow, fast = away(1, 0, 8, 16, 24), away(2, 0, 4, 8, 12)
    for session in (slow, fast):
        forecast.note(session, 13)
    assert forecast.next_s == 15
    assert forecast.due(14.9) == []
    assert forecast.due(40) == [fast, slow]
    assert forecast.due(50) == []
    assert forecast.next_s is None


def test_who_keeps_no_beat_is_not_expected(forecast: Forecast) -> None:
    forecast.note(away(1, 0, 4, 5, 12), 13)
    assert forecast.next_s is None


def test_who_is_wanted_already_had_to_give_way_and_is_not_called_back(forecast: Forecast) -> None:
    forecast.note(away(1, 0, 4, 8, 12), 15)
    assert forecast.next_s is None


def test_who_has_come_or_come_back_is_not_expected_any_more(forecast: Forecast) -> None:
    running, back, again = (away(number, 0, 4, 8, 12) for number in range(3))
    for session in (running, back, again):
        forecast.note(session, 13)
    running.running = make_turn()
    back.drop_stored()
    again.beat.note(14)
    assert forecast.due(20) == []


def test_nothing_holds_a_session_that_has_ended(forecast: Forecast) -> None:
    session = away(1, 0, 4, 8, 12)
    forecast.note(session, 13)
    held = weakref.ref(session)
    del session
    gc.collect()
    assert held() is None
    assert forecast.due(20) == []
