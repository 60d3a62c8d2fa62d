"""Tests of tiers: which sessions leave the pool, how they come back, and how much is copied in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from microturn.kv import copier as kv_copier
from microturn.kv.pool import PagePool
from microturn.offload import tiers
from microturn.sessions.session import Session
from support.sessions import make_session, make_turn
from support.tiers import TiersDriver, bits_of

# A pool of 64 pages is short with fewer than 4 free, until 8 are.
NUM_PAGES = 64
PAGE_SIZE = 4
PLENTY = 1_000_000

Starter = Callable[..., TiersDriver]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts tiers over a pool of their own; with `is_on_disk` all goes on into files."""
    started = []

    def start(host_bytes: int = PLENTY, *, is_on_disk: bool = False) -> TiersDriver:
        pool = PagePool(NUM_PAGES, PAGE_SIZE)
        if is_on_disk:
            started.append(TiersDriver(pool, 0, tmp_path, max_image_bytes=host_bytes))
        else:
            started.append(TiersDriver(pool, host_bytes))
        return started[-1]

    yield start
    for driver in started:
        driver.storage.close()


@pytest.fixture
def two_pages_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As little is copied as if pages were large."""
    monkeypatch.setattr(kv_copier, "_BYTES_FOR_TURNS", 2 * PAGE_BYTES)
    monkeypatch.setattr(kv_copier, "_BYTES_FOR_LATER", 2 * PAGE_BYTES)


PAGE_BYTES = TiersDriver(PagePool(1, PAGE_SIZE)).kv.bytes_per_page


def parked(driver: TiersDriver, session_id: int, num_pages: int, *, beat_s: float | None = None) -> Session:
    """A session of whole pages and two tokens more; with a beat, its next turn is due so much later."""
    return driver.new_parked(session_id, num_pages * PAGE_SIZE - 2, beat_s=beat_s)


def fill_pool(driver: TiersDriver, num_free: int) -> Session:
    """A running session that holds all pages but so many."""
    session = make_session(driver.pool, "big", kv_len=(driver.pool.num_free - num_free) * PAGE_SIZE)
    driver.sessions.add(session)
    session.running = make_turn(max_tokens=0)
    session.running.num_input = 0
    return session


def end_big(driver: TiersDriver) -> None:
    """The running session ends."""
    session = driver.sessions.find("big")
    assert session is not None
    session.running = None
    driver.sessions.end(session)


def step_until_quiet(driver: TiersDriver) -> int:
    """Steps as long as there is something to copy; says how often."""
    for number in range(1, 100):
        if not driver.step():
            return number
    raise AssertionError("it never ends")


def begin_turn(driver: TiersDriver, session: Session) -> None:
    session.running = make_turn()
    session.running.begun_s = driver.clock()
    driver.sessions.unpark(session)


def is_out(session: Session) -> bool:
    return session.stored is not None and not session.table.pages


# ---- pages that are needed at once ---------------------------------------------------------------------------------


def test_the_session_parked_longest_ago_gives_its_pages_first(start: Starter) -> None:
    driver = start()
    sessions = [parked(driver, number, 2) for number in range(3)]
    driver.sessions.unpark(sessions[0])
    driver.sessions.park(sessions[0])
    for session in (sessions[1], sessions[2], sessions[0]):
        assert session.table.pages
        assert driver.tiers.reclaim()
        assert is_out(session)
    assert not driver.tiers.reclaim()


def test_prefixes_that_nobody_holds_give_way_before_any_session(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 2)
    ended = make_session(driver.pool, 2, context_len=9, kv_len=8)
    driver.prefixes.publish(ended.table, ended.context)
    ended.table.truncate(0)
    assert driver.pool.num_free == NUM_PAGES - 2
    taken = driver.pool.allocate(NUM_PAGES - 2)
    assert taken is not None
    assert session.stored is None
    assert not driver.prefixes.pages
    driver.pool.release(taken)
    assert driver.tiers.reclaim()
    assert is_out(session)


def test_without_a_host_tier_pages_are_dropped_and_the_context_stays(start: Starter) -> None:
    driver = start(0)
    session = parked(driver, 1, 2)
    assert driver.tiers.reclaim()
    assert (session.stored, session.table.pages, session.kv_len, len(session.context)) == (None, [], 0, 7)
    assert driver.storage.counters.dropped == 1
    assert not driver.tiers.reclaim()


def test_a_running_session_that_must_give_way_keeps_its_kv(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 3)
    before = bits_of(driver.kv, session.table.pages)
    begin_turn(driver, session)
    driver.tiers.offload(session)
    assert is_out(session)
    driver.check_integrity()
    assert driver.schedule(session) == [1]
    assert bits_of(driver.kv, session.table.pages) == before


def test_pages_without_tokens_are_given_up_and_nothing_is_copied(start: Starter) -> None:
    driver = start()
    session = make_session(driver.pool, 1, context_len=9)
    driver.sessions.add(session)
    session.running = make_turn()
    assert session.reserve(9)
    driver.tiers.offload(session)
    assert driver.pool.num_free == NUM_PAGES
    assert session.stored is None
    assert driver.storage.counters.dropped == 0


def test_shared_pages_are_copied_and_left_to_the_others(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 3)
    branch = make_session(driver.pool, 2, context_len=11)
    branch.share_kv_of(session, 11)
    driver.sessions.add(branch)
    before, theirs = bits_of(driver.kv, session.table.pages), bits_of(driver.kv, branch.table.pages)
    driver.tiers.reclaim()
    assert is_out(session)
    assert bits_of(driver.kv, branch.table.pages) == theirs
    begin_turn(driver, session)
    assert driver.schedule(session) == [1]
    assert bits_of(driver.kv, session.table.pages) == before
    assert not set(session.table.pages) & set(branch.table.pages)


# ---- in the background ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_free", "num_left"), [(4, 0), (3, 3), (0, 4)])
def test_sessions_leave_when_few_pages_are_free_until_enough_are(start: Starter, num_free: int, num_left: int) -> None:
    driver = start()
    sessions = [parked(driver, number, 2) for number in range(6)]
    fill_pool(driver, num_free)
    step_until_quiet(driver)
    assert [is_out(session) for session in sessions] == [True] * num_left + [False] * (6 - num_left)


def test_without_a_host_tier_nothing_leaves_before_it_must(start: Starter) -> None:
    driver = start(0)
    session = parked(driver, 1, 2)
    fill_pool(driver, 0)
    assert not driver.step()
    assert session.table.pages


@pytest.mark.usefixtures("two_pages_a_step")
def test_no_more_than_a_few_pages_are_copied_in_a_step(start: Starter) -> None:
    driver = start()
    sessions = [parked(driver, 1, 5), parked(driver, 2, 5)]
    before = [bits_of(driver.kv, session.table.pages) for session in sessions]
    fill_pool(driver, 0)
    num_steps = 0
    while driver.step():
        num_steps += 1
        assert sum(is_out(session) for session in sessions) <= num_steps * 2 // 5
    assert [is_out(session) for session in sessions] == [True, True]
    for session, bits in zip(sessions, before, strict=True):
        begin_turn(driver, session)
        while driver.schedule(session) == []:
            num_steps += 1
        assert bits_of(driver.kv, session.table.pages) == bits
        session.running = None
        driver.sessions.end(session)


@pytest.mark.usefixtures("two_pages_a_step")
def test_a_turn_in_between_makes_what_was_copied_worthless(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 5)
    fill_pool(driver, 0)
    assert driver.step()
    driver.sessions.unpark(session)
    for tensor in driver.kv.tensors:
        tensor[session.table.pages] = 7.0
    driver.sessions.park(session)
    after = bits_of(driver.kv, session.table.pages)
    step_until_quiet(driver)
    assert is_out(session)
    begin_turn(driver, session)
    end_big(driver)
    while driver.schedule(session) == []:
        pass
    assert bits_of(driver.kv, session.table.pages) == after


@pytest.mark.usefixtures("two_pages_a_step")
def test_what_has_been_copied_is_not_copied_again_when_the_rest_is_needed_at_once(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 5)
    before = bits_of(driver.kv, session.table.pages)
    fill_pool(driver, 0)
    assert driver.step()
    driver.kv.tensors[0][session.table.pages[:2]] = 7.0  # nobody may do that; it shows what is read again
    assert driver.tiers.reclaim()
    assert session.stored is not None
    assert session.stored.image.pages is not None
    driver.kv.write(session_pages := [0, 1, 2, 3, 4], session.stored.image.pages)
    assert bits_of(driver.kv, session_pages) == before


@pytest.mark.usefixtures("two_pages_a_step")
def test_a_session_that_ends_while_it_is_copied_is_forgotten(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 5)
    fill_pool(driver, 0)
    assert driver.step()
    driver.sessions.end(session)
    assert not driver.step()
    assert driver.tiers._saving is None
    assert driver.storage.host.used_bytes == 0


def test_a_session_too_large_for_the_host_stays_as_long_as_it_can(start: Starter) -> None:
    driver = start(3 * PAGE_BYTES)
    session = parked(driver, 1, 5)
    fill_pool(driver, 0)
    assert not driver.step()
    assert session.table.pages
    assert driver.tiers.reclaim()
    assert (session.stored, session.kv_len) == (None, 0)


# ---- back for a turn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_session_comes_back_bit_by_bit(start: Starter, is_on_disk: bool) -> None:
    """Oracle 4, on all bit patterns: device, host, disk and device again."""
    driver = start(is_on_disk=is_on_disk)
    session = parked(driver, 1, 5)
    before, pages = bits_of(driver.kv, session.table.pages), list(session.table.pages)
    driver.tiers.reclaim()
    driver.settle()
    for tensor in driver.kv.tensors:
        tensor.zero_()
    parked(driver, 2, 7)  # so that it comes back into other pages
    begin_turn(driver, session)
    if is_on_disk:
        assert driver.schedule(session) == []
        driver.settle()
    assert driver.schedule(session) == [1]
    assert session.table.pages != pages
    assert bits_of(driver.kv, session.table.pages) == before
    assert (session.stored, session.table.kv_len) == (None, 18)
    assert driver.storage.host.used_bytes == 0
    assert driver.storage.counters.restored == 1


def test_the_status_will_tell_how_long_it_took(start: Starter) -> None:
    driver = start(is_on_disk=True)
    session = parked(driver, 1, 5)
    driver.tiers.reclaim()
    driver.settle()
    driver.clock.now_s += 60
    begin_turn(driver, session)
    driver.schedule(session)
    driver.settle()
    driver.clock.now_s += 0.25
    driver.schedule(session)
    assert session.running is not None
    assert session.running.restore_s == pytest.approx(0.25)


def test_others_are_computed_while_a_session_is_on_its_way(start: Starter) -> None:
    driver = start(is_on_disk=True)
    away, here = parked(driver, 1, 5), parked(driver, 2, 5)
    driver.tiers.reclaim()
    driver.settle()
    begin_turn(driver, away)
    begin_turn(driver, here)
    assert driver.schedule(away, here) == [2]
    driver.settle()
    assert driver.schedule(away, here) == [1, 2]


@pytest.mark.usefixtures("two_pages_a_step")
@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("context_len", [0, 1, 5, 9, 13, 18])
def test_a_cut_counts_wherever_the_kv_is(start: Starter, num_steps: int, context_len: int) -> None:
    """Outside the pool, or half of it copied back."""
    driver = start()
    session = parked(driver, 1, 5)
    kv_len = max(0, context_len - 1)
    kept = bits_of(driver.kv, session.table.pages[: driver.pool.num_pages_for(kv_len)])
    driver.tiers.reclaim()
    begin_turn(driver, session)
    for _ in range(num_steps):
        assert driver.schedule(session) == []
    session.context.truncate(context_len)
    session.cut_kv(context_len)
    session.context.append_ids([1, 2, 3])
    assert session.kv_len == kv_len
    while driver.schedule(session) == []:
        pass
    assert session.table.kv_len == kv_len
    assert bits_of(driver.kv, session.table.used_pages) == kept


def test_what_was_cut_off_needs_no_pages_any_more(start: Starter) -> None:
    """The pages of all that was copied were asked for; where only those left could be had, the engine stopped."""
    driver = start()
    session = parked(driver, 1, 5)
    driver.tiers.reclaim()
    fill_pool(driver, 2)
    session.context.truncate(4)
    session.cut_kv(4)
    session.context.append_ids([1])
    begin_turn(driver, session)
    assert driver.schedule(session) == [1]
    assert len(session.table.pages) == 2


def test_of_a_session_cut_back_to_its_first_token_nothing_is_kept(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 5)
    driver.tiers.reclaim()
    session.cut_kv(1)
    assert (session.stored, session.kv_len, driver.storage.host.used_bytes) == (None, 0, 0)


def test_a_branch_of_a_session_that_is_away_has_the_same_kv(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 5)
    before = bits_of(driver.kv, session.table.pages[:4])
    driver.tiers.reclaim()
    branch = make_session(driver.pool, 2, context_len=20)
    branch.share_kv_of(session, 15)
    driver.sessions.add(branch)
    driver.check_integrity()
    assert (session.kv_len, branch.kv_len) == (18, 14)
    driver.sessions.end(session)
    begin_turn(driver, branch)
    assert driver.schedule(branch) == [2]
    assert bits_of(driver.kv, branch.table.used_pages) == before
    assert driver.storage.host.used_bytes == 0


def test_a_copy_that_is_lost_means_computing_again(start: Starter) -> None:
    driver = start(5 * PAGE_BYTES)
    first, second = parked(driver, 1, 5), parked(driver, 2, 5)
    driver.tiers.reclaim()
    begin_turn(driver, first)
    assert first.num_pending == 1
    assert first.running is not None
    first.running.num_cached = first.kv_len
    for _ in range(3):
        driver.step()
    driver.tiers.offload(second)
    assert first.num_pending == 19
    assert driver.schedule(first) == [1]
    assert (first.stored, first.table.kv_len, first.running.num_cached) == (None, 0, 0)


# ---- back before the turn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_who_keeps_a_beat_is_back_before_the_turn(start: Starter, is_on_disk: bool) -> None:
    driver = start(is_on_disk=is_on_disk)
    session = parked(driver, 1, 5, beat_s=8.0)
    before = bits_of(driver.kv, session.table.pages)
    driver.tiers.reclaim()
    driver.settle()
    assert driver.tiers.next_s == driver.clock() + 7.0
    driver.clock.now_s += 6.9
    assert not driver.step()
    assert is_out(session)
    driver.clock.now_s += 0.1
    step_until_quiet(driver)
    driver.settle()
    step_until_quiet(driver)
    assert session.stored is None
    assert bits_of(driver.kv, session.table.pages) == before
    assert driver.storage.counters.restored_ahead == 1
    assert driver.tiers.next_s is None
    assert driver.sessions.parked_longest() is session, "and it may be moved again"


def test_who_keeps_no_beat_stays_where_it_is(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 5)
    driver.tiers.reclaim()
    assert driver.tiers.next_s is None
    driver.clock.now_s += 100
    assert not driver.step()
    assert is_out(session)


def test_the_expected_take_no_pages_from_others(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 5, beat_s=8.0)
    driver.tiers.reclaim()
    other = parked(driver, 2, 2)
    fill_pool(driver, 4)
    driver.clock.now_s += 7
    assert not driver.step()
    assert is_out(session)
    assert other.stored is None


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_the_expected_wait_for_pages_and_no_file_is_read_before(start: Starter, is_on_disk: bool) -> None:
    """Who found no pages at the time was not restored ahead at all."""
    driver = start(is_on_disk=is_on_disk)
    session = parked(driver, 1, 5, beat_s=8.0)
    driver.tiers.reclaim()
    driver.settle()
    fill_pool(driver, 4)
    driver.clock.now_s += 7
    assert not driver.step()
    driver.settle()
    assert is_out(session)
    assert driver.storage.counters.read_from_disk == 0
    end_big(driver)
    step_until_quiet(driver)
    driver.settle()
    step_until_quiet(driver)
    assert session.stored is None
    assert driver.storage.counters.restored_ahead == 1


def test_the_expected_come_back_into_pages_that_others_leave(start: Starter) -> None:
    """The engine went to rest when a session had left, though another waited for its pages."""
    driver = start()
    session = parked(driver, 1, 5, beat_s=8.0)
    driver.tiers.reclaim()
    other = parked(driver, 2, 6)
    fill_pool(driver, 3)
    driver.clock.now_s += 7
    step_until_quiet(driver)
    assert is_out(other)
    assert session.stored is None


def test_those_that_wait_for_pages_are_not_looked_at_in_every_step(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step looked at all sessions that were expected and found no page free: 2.7 ms where 1,000 waited."""
    driver = start(1 << 20)
    for number in range(1, 1001):
        parked(driver, number, 1, beat_s=8.0)
        driver.tiers.reclaim()
    big = fill_pool(driver, 0)
    driver.clock.now_s += 7
    visited: list[Session] = []
    is_away = tiers.is_away

    def note(session: Session) -> bool:
        visited.append(session)
        return is_away(session)

    monkeypatch.setattr(tiers, "is_away", note)
    assert step_until_quiet(driver) < 1000
    visited.clear()
    for _ in range(20):
        driver.step()
    assert not visited, "nothing has changed"
    big.table.truncate(4 * driver.pool.page_size)  # a few pages come free
    most = 0
    for _ in range(300):
        visited.clear()
        driver.step()
        most = max(most, len(visited))
    assert 0 < most <= 32
    assert driver.storage.counters.restored_ahead >= driver.pool.num_pages - 4


@pytest.mark.usefixtures("two_pages_a_step")
def test_who_was_expected_and_must_give_way_again_is_not_called_back(start: Starter) -> None:
    """It would come and go for ever, and the engine would never rest."""
    driver = start()
    session = parked(driver, 1, 5, beat_s=8.0)
    driver.tiers.reclaim()
    fill_pool(driver, 6)
    driver.clock.now_s += 7
    assert step_until_quiet(driver) <= 10
    assert is_out(session)
    assert driver.tiers.next_s is None


@pytest.mark.usefixtures("two_pages_a_step")
def test_a_turn_takes_over_what_was_copied_ahead(start: Starter) -> None:
    driver = start()
    session = parked(driver, 1, 5, beat_s=8.0)
    before = bits_of(driver.kv, session.table.pages)
    driver.tiers.reclaim()
    driver.clock.now_s += 7
    assert driver.step()
    begin_turn(driver, session)
    assert driver.schedule(session) == []
    assert driver.schedule(session) == [1]
    assert bits_of(driver.kv, session.table.pages) == before
    assert driver.storage.counters.restored_ahead == 0
