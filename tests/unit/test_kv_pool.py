"""Tests of kv_pool."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from microturn.kv_pool import PagePool, PageTable, TableState

# ---- the pool ------------------------------------------------------------------------------------------------------


def test_a_new_pool_is_free() -> None:
    pool = PagePool(5, 16)
    assert pool.num_free == 5
    pool.check_integrity([])


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_pages_for_tokens_are_rounded_up(num_tokens: int, num_pages: int) -> None:
    assert PagePool(5, 16).num_pages_for(num_tokens) == num_pages


def test_allocated_pages_are_different_ones() -> None:
    pool = PagePool(5, 16)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    pool.check_integrity([first, second])


def test_a_full_pool_answers_none_and_takes_nothing() -> None:
    pool = PagePool(5, 16)
    assert pool.allocate(6) is None
    assert pool.num_free == 5
    pages = pool.allocate(5)
    assert pages is not None
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_shared_page_is_free_only_when_all_its_owners_gave_it_back() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    assert pages is not None
    pool.share(pages)
    pool.check_integrity([pages, pages])
    pool.release(pages)
    assert pool.num_free == 1
    pool.check_integrity([pages])
    pool.release(pages)
    assert pool.num_free == 2


def test_a_page_is_shared_while_it_has_more_than_one_owner() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    assert pages is not None
    assert not pool.is_shared(pages[0])
    pool.share(pages)
    assert pool.is_shared(pages[0])
    pool.release(pages)
    assert not pool.is_shared(pages[0])
    pool.release(pages)
    assert not pool.is_shared(pages[0])


def test_the_page_freed_last_is_taken_first() -> None:
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    assert pages is not None
    pool.release([pages[1]])
    assert pool.allocate(1) == [pages[1]]


def test_a_free_page_cannot_be_released_or_shared() -> None:
    pool = PagePool(2, 16)
    with pytest.raises(AssertionError, match="free already"):
        pool.release([0])
    with pytest.raises(AssertionError, match="is free"):
        pool.share([0])


def test_integrity_finds_a_page_that_nobody_gave_back() -> None:
    pool = PagePool(3, 16)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="neither free nor owned"):
        pool.check_integrity([])


def test_integrity_finds_an_owner_of_a_free_page() -> None:
    with pytest.raises(AssertionError, match="both free and owned"):
        PagePool(3, 16).check_integrity([[1]])


def test_integrity_finds_a_page_with_more_owners_than_it_counts() -> None:
    pool = PagePool(3, 16)
    pages = pool.allocate(1)
    assert pages is not None
    with pytest.raises(AssertionError, match="count 1 and 2 owners"):
        pool.check_integrity([pages, pages])


def test_integrity_finds_a_page_twice_in_one_list() -> None:
    pool = PagePool(3, 16)
    pages = pool.allocate(1)
    assert pages is not None
    with pytest.raises(AssertionError, match="stands twice"):
        pool.check_integrity([pages * 2])


# ---- a session's table ---------------------------------------------------------------------------------------------


def test_a_table_reserves_what_is_missing_only() -> None:
    pool = PagePool(4, 4)
    table = PageTable(pool)
    assert table.reserve(5)
    first = list(table.pages)
    assert len(first) == 2
    assert table.reserve(8)
    assert table.pages == first
    assert table.reserve(9)
    assert table.pages[:2] == first
    assert pool.num_free == 1


def test_reserving_does_not_say_that_anything_is_in_the_cache() -> None:
    table = PageTable(PagePool(4, 4))
    table.reserve(9)
    assert table.kv_len == 0


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    pool = PagePool(4, 4)
    table = PageTable(pool)
    assert table.reserve(8)
    assert not table.reserve(17)
    assert len(table.pages) == 2
    assert pool.num_free == 2


@pytest.mark.parametrize(("kv_len", "num_kept"), [(9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)])
def test_truncation_keeps_the_pages_that_the_rest_needs(kv_len: int, num_kept: int) -> None:
    pool = PagePool(4, 4)
    table = PageTable(pool)
    table.reserve(9)
    table.kv_len = 9
    pages = list(table.pages)
    table.truncate(kv_len)
    assert table.pages == pages[:num_kept]
    assert table.kv_len == kv_len
    pool.check_integrity([table.pages])


def test_truncation_beyond_the_end_gives_back_what_was_only_reserved() -> None:
    """B17: pages reserved for tokens that were never computed stayed with the session."""
    pool = PagePool(4, 4)
    table = PageTable(pool)
    table.reserve(16)
    table.kv_len = 5
    table.truncate(100)
    assert table.kv_len == 5
    assert len(table.pages) == 2
    assert pool.num_free == 2


@pytest.mark.parametrize(
    ("kv_len", "kept_len"),
    [(14, 14), (13, 13), (12, 12), (11, 8), (9, 8), (8, 8), (7, 4), (5, 4), (4, 4), (1, 0), (0, 0)],
)
def test_a_page_that_is_shared_is_not_kept_to_be_written_again(kv_len: int, kept_len: int) -> None:
    """Three shared pages and one of its own: a cut within a shared page takes the rest of that page too."""
    pool = PagePool(8, 4)
    giver, taker = PageTable(pool), PageTable(pool)
    giver.reserve(12)
    giver.kv_len = 12
    taker.adopt(giver.pages)
    taker.reserve(14)
    taker.kv_len = 14
    taker.truncate(kv_len)
    assert taker.kv_len == kept_len
    assert len(taker.pages) == pool.num_pages_for(kept_len)
    assert giver.kv_len == 12
    pool.check_integrity([giver.pages, taker.pages])


def test_the_last_owner_of_a_page_may_write_it_again() -> None:
    pool = PagePool(8, 4)
    giver, taker = PageTable(pool), PageTable(pool)
    giver.reserve(8)
    giver.kv_len = 8
    taker.adopt(giver.pages)
    giver.truncate(0)
    taker.truncate(6)
    assert taker.kv_len == 6


@pytest.mark.parametrize(("num_tokens", "could"), [(4, True), (8, True), (9, False)])
def test_pages_that_somebody_else_shares_are_nothing_that_others_could_give(num_tokens: int, could: bool) -> None:
    """Two victims share a page with one another, and one of them another with somebody who keeps it."""
    pool = PagePool(4, 4)
    keeper, giver, taker = PageTable(pool), PageTable(pool), PageTable(pool)
    keeper.reserve(4)
    keeper.kv_len = 4
    giver.adopt(keeper.pages)
    giver.reserve(8)
    giver.kv_len = 8
    taker.adopt(giver.pages)
    taker.reserve(12)
    full = PageTable(pool)
    full.reserve(4)
    assert pool.num_free == 0
    table = PageTable(pool)
    assert table.could_have(pool.num_pages_for(num_tokens), [giver, taker]) is could
    assert not table.could_have(pool.num_pages_for(num_tokens), [giver])


def test_adopted_pages_are_shared_and_count_as_computed() -> None:
    pool = PagePool(4, 4)
    giver, taker = PageTable(pool), PageTable(pool)
    giver.reserve(12)
    giver.kv_len = 12
    taker.adopt(giver.pages[:2])
    assert taker.kv_len == 8
    assert pool.num_free == 1
    giver.truncate(0)
    pool.check_integrity([taker.pages])
    assert pool.num_free == 2


def test_only_an_empty_table_adopts() -> None:
    table = PageTable(PagePool(4, 4))
    table.reserve(1)
    with pytest.raises(AssertionError, match="only an empty table"):
        table.adopt([])


# ---- a table made anew ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_len", [0, 1, 4, 10, 12])
def test_a_table_is_loaded_as_it_was_saved(kv_len: int) -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool)
    assert table.reserve(12)
    table.kv_len = kv_len
    assert table.used_pages == table.pages[: pool.num_pages_for(kv_len)]
    state = table.save()
    table.truncate(0)
    other = PageTable(pool)
    assert other.load(state)
    assert other.save() == state
    assert len(other.pages) == state.num_pages == pool.num_pages_for(kv_len), "what was only reserved is not"
    pool.check_integrity([table.pages, other.pages])


def test_a_table_is_not_loaded_where_pages_are_missing() -> None:
    pool = PagePool(3, 4)
    table = PageTable(pool)
    assert not table.load(TableState(4, 13))
    assert (table.pages, table.kv_len, pool.num_free) == ([], 0, 3)


@pytest.mark.parametrize("kv_len", [0, 3, 4, 5, 9, 20])
def test_a_state_is_cut_as_its_table_is(kv_len: int) -> None:
    table = PageTable(PagePool(8, 4))
    assert table.reserve(9)
    table.kv_len = 9
    state = table.save().cut(kv_len)
    table.truncate(kv_len)
    assert state == table.save()
    assert state.num_pages == len(table.pages)


# ---- any order of operations ---------------------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Tables that reserve, compute, share and truncate in any order; the owners are what the tables say."""

    tables = Bundle("tables")

    @initialize(num_pages=st.integers(1, 12), page_size=st.integers(1, 5))
    def begin(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.all_tables: list[PageTable] = []

    @rule(target=tables)
    def new_table(self) -> PageTable:
        self.all_tables.append(PageTable(self.pool))
        return self.all_tables[-1]

    @rule(table=tables, num_tokens=st.integers(0, 30), is_computed=st.booleans())
    def reserve(self, table: PageTable, num_tokens: int, is_computed: bool) -> None:
        num_free, num_owned = self.pool.num_free, len(table.pages)
        missing = max(0, self.pool.num_pages_for(num_tokens) - num_owned)
        assert table.reserve(num_tokens) == (missing <= num_free)
        if len(table.pages) * self.pool.page_size >= num_tokens and is_computed:
            table.kv_len = max(table.kv_len, num_tokens)

    @rule(table=tables, kv_len=st.integers(0, 30))
    def truncate(self, table: PageTable, kv_len: int) -> None:
        table.truncate(kv_len)
        assert len(table.pages) == self.pool.num_pages_for(table.kv_len)
        is_cut_within_page = bool(table.kv_len % self.pool.page_size)
        assert not is_cut_within_page or not self.pool.is_shared(table.pages[-1]), "it would be written again"

    @rule(taker=tables, giver=tables, num_pages=st.integers(0, 6))
    def adopt(self, taker: PageTable, giver: PageTable, num_pages: int) -> None:
        if not taker.pages:
            taker.adopt(giver.pages[: min(num_pages, giver.kv_len // self.pool.page_size)])

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity([table.pages for table in self.all_tables])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
