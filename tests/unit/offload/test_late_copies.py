"""Tests of tiers whose copies are still under way when steps are made, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from microturn.kv.pool import PagePool
from microturn.sessions.session import Session
from support.late_copies import LateCopier
from support.sessions import make_session, make_turn
from support.tiers import TiersDriver, bits_of

# Pages are copied in blocks of three: for turns at most nine in a step, and three of what can wait.
NUM_PAGES = 64
PAGE_SIZE = 4


def make_driver(seed: int = 0) -> TiersDriver:
    return TiersDriver(PagePool(NUM_PAGES, PAGE_SIZE), 1_000_000, new_copier=partial(LateCopier, seed=seed))


def parked(driver: TiersDriver, session_id: int, num_pages: int, *, beat_s: float | None = None) -> Session:
    """A session of whole pages; with a beat, its next turn is due so much later."""
    return driver.new_parked(session_id, num_pages * PAGE_SIZE, beat_s=beat_s)


def begin_turn(session: Session, driver: TiersDriver) -> None:
    session.running = make_turn()
    session.running.begun_s = driver.clock()
    driver.sessions.unpark(session)


def end_turn(session: Session, driver: TiersDriver) -> None:
    session.running = None
    driver.sessions.park(session)


def coming(driver: TiersDriver, num_pages: int = 6) -> Session:
    """A session with a turn, whose copy back into the pool has just begun."""
    session = parked(driver, 1, num_pages)
    driver.tiers.reclaim()
    begin_turn(session, driver)
    assert driver.schedule(session) == []
    assert session.table.pages
    return session


def pass_steps(driver: TiersDriver) -> None:
    for _ in range(30):
        driver.step()


@pytest.mark.parametrize("seed", range(4))
def test_a_session_is_computed_when_its_pages_have_arrived(seed: int) -> None:
    driver = make_driver(seed)
    session, other = parked(driver, 1, 20), parked(driver, 2, 2)
    before = bits_of(driver.kv, session.table.pages)
    driver.tiers.reclaim()
    begin_turn(session, driver)
    begin_turn(other, driver)
    num_steps = 0
    while (rows := driver.schedule(session, other)) == [2]:
        num_steps += 1
    assert sorted(rows) == [1, 2]
    assert num_steps >= 3, "twenty pages are more than two steps' share"
    assert bits_of(driver.kv, session.table.used_pages) == before


def test_the_engine_looks_again_soon_as_long_as_a_turn_waits() -> None:
    driver = make_driver()
    session = coming(driver)
    assert driver.tiers.next_s == driver.clock() + 0.001
    while driver.schedule(session) == []:
        pass
    pass_steps(driver)
    assert driver.tiers.next_s is None


def test_pages_may_be_given_up_before_they_have_been_copied() -> None:
    """The next step writes them, and the copy is that of what stood there before."""
    driver = make_driver()
    session = parked(driver, 1, 6)
    before, pages = bits_of(driver.kv, session.table.pages), session.table.pages
    driver.tiers.reclaim()
    for tensor in driver.kv.tensors:
        tensor[pages] = 7.0
    begin_turn(session, driver)
    while driver.schedule(session) == []:
        pass
    assert bits_of(driver.kv, session.table.used_pages) == before


@pytest.mark.parametrize(
    "give_up",
    [
        lambda driver, session: driver.sessions.end(session),
        lambda _, session: session.drop_kv(),
        lambda _, session: session.cut_kv(1),
        lambda _, session: session.cut_kv(2 * PAGE_SIZE),
        lambda driver, session: driver.tiers.offload(session),
    ],
    ids=["end", "drop", "cut to nothing", "cut", "move out"],
)
def test_what_arrives_in_pages_that_were_given_up_spoils_nobodys(
    give_up: Callable[[TiersDriver, Session], object],
) -> None:
    driver = make_driver()
    session = coming(driver)
    end_turn(session, driver)
    pages = set(session.table.pages)
    give_up(driver, session)
    theirs = sorted(pages - set(session.table.pages))
    assert theirs
    for tensor in driver.kv.tensors:
        tensor[theirs] = 7.0
    after = bits_of(driver.kv, theirs)
    driver.kv.write([NUM_PAGES - 1], driver.kv.read([NUM_PAGES - 1])).wait()  # whatever was under way has landed
    assert bits_of(driver.kv, theirs) == after


def test_what_is_left_of_a_session_that_was_cut_on_the_way_arrives() -> None:
    driver = make_driver()
    session = parked(driver, 1, 6)
    before = bits_of(driver.kv, session.table.pages[:2])
    driver.tiers.reclaim()
    begin_turn(session, driver)
    assert driver.schedule(session) == []
    session.context.truncate(2 * PAGE_SIZE + 1)
    session.cut_kv(2 * PAGE_SIZE + 1)
    session.context.append_ids([1])
    while driver.schedule(session) == []:
        pass
    assert bits_of(driver.kv, session.table.used_pages) == before


def test_what_can_wait_waits_while_some_of_it_is_under_way() -> None:
    """A turn's copy would wait behind a long row of it; and the engine does not spin meanwhile."""
    driver = make_driver(seed=3)
    sessions = [parked(driver, number, 6) for number in range(2, 10)]
    filler = make_session(driver.pool, "big", kv_len=driver.pool.num_free * PAGE_SIZE)
    driver.sessions.add(filler)
    filler.running = make_turn(max_tokens=0)
    filler.running.num_input = 0
    for _ in range(200):
        is_busy = driver.step()
        assert len(driver.tiers._later) <= 1, "a share of three pages is a session's alone"
        assert not (is_busy and driver.tiers._later)
    assert sum(session.stored is not None for session in sessions) == 2, "an eighth of the pool is free then"
    assert driver.tiers.next_s is None


def test_who_keeps_a_beat_is_back_before_the_turn() -> None:
    driver = make_driver()
    session = parked(driver, 1, 5, beat_s=8.0)
    before = bits_of(driver.kv, session.table.pages)
    driver.tiers.reclaim()
    pass_steps(driver)
    driver.clock.now_s += 7
    driver.step()
    assert session.stored is not None
    assert driver.tiers.next_s == driver.clock() + 0.001
    pass_steps(driver)
    assert session.stored is None
    assert bits_of(driver.kv, session.table.used_pages) == before
    assert driver.storage.counters.restored_ahead == 1
    assert driver.tiers.next_s is None


def test_many_sessions_that_keep_a_beat_come_back_a_share_at_a_time() -> None:
    driver = make_driver(seed=5)
    sessions = [parked(driver, number, 1 + number % 4, beat_s=8.0) for number in range(12)]
    before = [bits_of(driver.kv, session.table.pages) for session in sessions]
    while driver.tiers.reclaim():
        pass
    pass_steps(driver)
    driver.clock.now_s += 7
    for _ in range(300):
        driver.step()
    assert all(session.stored is None for session in sessions)
    assert [bits_of(driver.kv, session.table.pages) for session in sessions] == before
