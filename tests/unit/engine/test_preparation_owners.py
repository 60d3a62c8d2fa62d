"""While turns are prepared: strangers keep no owner waiting, who has sent a turn is not silent, who left undoes it."""

from __future__ import annotations

from typing import Any

import pytest

from microturn.sessions.inputs import TextInput
from microturn.text.prepared_text import PreparedText
from support.by_hand import AllByHand
from support.fake_runner import FakeDriver


@pytest.fixture
def by_hand() -> AllByHand:
    return AllByHand()


def with_text_by_hand(by_hand: AllByHand, **settings: Any) -> FakeDriver:
    """An engine whose long texts become ids, one for each character, when the test says so."""

    def prepare(text: str, parse_special: bool, _enough: int) -> PreparedText:
        return PreparedText(parse_special, len(text), text)

    return FakeDriver(max_context=2048, num_pages=1024, new_background=by_hand, prepare_text=prepare, **settings)


def test_a_stranger_keeps_no_owner_waiting_and_nothing_is_fetched_for_it(by_hand: AllByHand) -> None:
    """Who knew an id had its owner's turns wait behind long texts, and refused behind eight of them."""
    driver = with_text_by_hand(by_hand)
    driver.turn(1, [5, 6], start=True, session_key="ours", max_tokens=0)
    long = TextInput("a" * 600)
    guesses = [driver.post(1, long, session_key="guess")[0] for _ in range(9)]
    guesses.append(driver.post(1, [], session_key="guess", choice=("yes", "no"), tool_choice="none")[0])
    guesses.append(driver.post(1, long, session_key="guess", start=True)[0])
    driver.engine.step()
    assert {guess.code for guess in guesses} == {"PERMISSION_DENIED"}
    assert not any(beside.jobs for beside in by_hand.of.values())
    assert driver.turn(1, [7], session_key="ours", max_tokens=2).status.context_len == 5
    assert driver.turn(1, [8], session_key="ours", max_tokens=0, on_overlap="interrupt").status.context_len == 6


@pytest.mark.parametrize("has_keepalive", [False, True])
def test_a_session_whose_turn_is_being_prepared_does_not_expire(by_hand: AllByHand, *, has_keepalive: bool) -> None:
    """The turn came in time, and its client was told that it had been silent."""
    driver = with_text_by_hand(by_hand, idle_timeout_s=10)
    driver.turn(1, [5, 6], start=True, session_key="ours", max_tokens=0)
    driver.clock.now_s += 9.9
    turn, _ = driver.post(1, TextInput("a" * 600), session_key="ours", max_tokens=2)
    driver.engine.step()
    if has_keepalive:
        driver.post(1, session_key="ours")
    for _ in range(3):
        driver.clock.now_s += 9.9
        driver.engine.step()
    by_hand.of["microturn-text"].do()
    driver.run()
    assert turn.status.context_len == 604
    driver.clock.now_s += 20.1
    driver.engine.step()
    assert driver.turn(1, [7], session_key="ours").code == "EXPIRED"


def test_a_stranger_does_not_keep_a_session(by_hand: AllByHand) -> None:
    driver = with_text_by_hand(by_hand, idle_timeout_s=10)
    driver.turn(1, [5, 6], start=True, session_key="ours", max_tokens=0)
    driver.clock.now_s += 9.9
    driver.post(1, TextInput("a" * 600), session_key="guess")
    driver.engine.step()
    driver.clock.now_s += 0.2
    driver.engine.step()
    assert driver.turn(1, [7], session_key="ours").code == "EXPIRED"


@pytest.mark.parametrize("is_first", [True, False])
def test_a_cancelled_end_is_undone_whole_and_the_session_lives(by_hand: AllByHand, *, is_first: bool) -> None:
    """Rule 8 of the contract; what is refused for its deadline, or for too many before it, closes all the same."""
    driver = with_text_by_hand(by_hand)
    driver.turn(1, [5, 6], start=True, max_tokens=0)
    long = TextInput("a" * 600)
    if not is_first:
        driver.post(1, long, max_tokens=0)
    end, turn = driver.post(1, long if is_first else [7], end=True, max_tokens=0)
    driver.engine.step()
    driver.engine.cancel(turn)
    driver.engine.step()
    assert end.is_done
    by_hand.of["microturn-text"].do()
    driver.run()
    # Triton has ended the sequence all the same.
    again = driver.turn(1, [8], start=True, resume=True, max_tokens=2)
    assert again.status.context_len == (5 if is_first else 605)
