"""Tests of kv_pool."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from microturn.kv.page_list import PageIds
from microturn.kv.page_table import PageTable
from microturn.kv.page_track import Track
from microturn.kv.pool import PagePool
from microturn.kv.table_state import TableState


def num_evictable(pool: PagePool) -> int:
    """How many of the free pages are kept."""
    return pool.num_free + pool.num_used - pool.num_pages


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


def test_a_kept_page_without_owners_is_free_and_allocated_last() -> None:
    """Pages that only a cache holds counted as taken: a turn was refused for pages that were free in truth."""
    pool, taken = PagePool(4, 16), []
    pool.on_lost = taken.append
    kept = pool.allocate(2)
    assert kept is not None
    pool.keep(kept)
    assert (pool.num_free, num_evictable(pool), pool.num_used) == (2, 0, 2)
    pool.release(kept)
    pool.check_integrity([], kept)
    assert (pool.num_free, num_evictable(pool), pool.num_used) == (4, 2, 2)
    first = pool.allocate(2)
    assert first is not None
    assert not set(first) & set(kept)
    assert taken == []
    last = pool.allocate(1)
    assert last == taken == [kept[1]], "of a prefix the last page goes first"
    pool.check_integrity([first, last], [kept[0]])
    assert pool.allocate(2) is None
    assert num_evictable(pool) == 1, "where there are too few pages none is evicted"


def test_what_was_kept_of_a_page_is_lost_when_its_only_owner_writes_it_again() -> None:
    """Or a rewind into a first turn would compute up to a page again."""
    pool, lost = PagePool(8, 4), []
    pool.on_lost = lost.append
    table = PageTable(pool)
    table.reserve(12)
    table.kv_len = 12
    pages = list(table.pages)
    pool.keep(pages)
    table.truncate(6)
    assert (table.kv_len, table.pages, lost) == (6, pages[:2], [pages[1]])
    pool.check_integrity([table.pages], [pages[0], pages[2]])


def test_a_kept_page_is_owned_again_by_the_one_that_shares_it() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1)
    assert pages is not None
    pool.keep(pages)
    pool.release(pages)
    pool.share(pages)
    assert (pool.num_free, pool.allocate(1)) == (0, None)
    pool.forget(pages)
    pool.release(pages)
    pool.check_integrity([])


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


@pytest.mark.parametrize(("kv_len", "num_kept"), [(9, 3), (8, 2), (1, 1), (0, 0)])
def test_pages_reserved_for_what_never_came_are_given_up(kv_len: int, num_kept: int) -> None:
    pool = PagePool(8, 4)
    table = PageTable(pool)
    table.reserve(20)
    table.kv_len = kv_len
    pages = list(table.pages)
    table.trim()
    assert table.pages == pages[:num_kept]
    assert table.kv_len == kv_len
    assert pool.num_free == 8 - num_kept


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
    taker.adopt_from(giver, giver.kv_len)
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
    taker.adopt_from(giver, giver.kv_len)
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
    giver.adopt_from(keeper, 4)
    giver.reserve(8)
    giver.kv_len = 8
    taker.adopt_from(giver, giver.kv_len)
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
    taker.adopt_from(giver, 8)
    assert taker.kv_len == 8
    assert pool.num_free == 1
    giver.truncate(0)
    pool.check_integrity([taker.pages])
    assert pool.num_free == 2


def test_only_an_empty_table_adopts() -> None:
    table = PageTable(PagePool(4, 4))
    table.reserve(1)
    with pytest.raises(AssertionError, match="only an empty table"):
        table.adopt(0, [[]])


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


# ---- kinds of layers -----------------------------------------------------------------------------------------------

# Two groups of layers that see five tokens, beside one group that sees all.
KINDS = (Track(), Track(num_groups=2, window=5, slack=4))


def computed(pool: PagePool, kv_len: int) -> PageTable:
    table = PageTable(pool, KINDS)
    assert table.reserve(kv_len)
    table.kv_len = kv_len
    return table


def test_every_group_of_layers_has_a_page_for_the_same_tokens() -> None:
    pool = PagePool(12, 4)
    table = computed(pool, 9)
    assert len(table.pages) == 9
    assert [len(pages) for _, pages in table.seen(0)] == [3, 6]
    assert not table.reserve(17), "two pages more for each of three groups are six"
    assert pool.num_free == 3


@pytest.mark.parametrize(("context_len", "num_left"), [(12, 9), (13, 7), (16, 7), (17, 5), (90, 5)])
def test_what_no_window_shows_is_given_up_but_for_the_slack(context_len: int, num_left: int) -> None:
    """Twelve tokens, in three pages for each of three groups. In two of these the next token sees from the ninth on."""
    pool = PagePool(12, 4)
    table = computed(pool, 12)
    table.slide(context_len)
    assert len(table.pages) == num_left
    table.check_integrity()
    pool.check_integrity([table.pages])


def test_a_cut_into_what_a_window_gave_up_keeps_nothing() -> None:
    table = computed(PagePool(30, 4), 20)
    table.slide(20)
    (_, all_kept), (sliding, kept) = table.seen(0)
    assert (sliding.num_evicted, len(kept), len(all_kept)) == (8, 6, 5)
    state = table.save()
    assert state.cut(12).kv_len == 12
    assert state.cut(11).kv_len == state.cut(11).num_pages == 0
    table.truncate(12)
    assert (table.kv_len, len(table.pages)) == (12, 3 + 2)
    table.truncate(11)
    assert (table.kv_len, table.is_empty) == (0, True)


def test_a_sessions_window_and_that_of_layers_give_up_pages_each_by_itself() -> None:
    table = PageTable(PagePool(40, 4), [Track(num_sinks=4), Track(window=5, slack=4)])
    assert table.reserve(30)
    table.kv_len = 30
    table.evict(8)
    table.slide(30)
    (shown, pages), (sliding, last_pages) = table.seen(12)
    assert (shown.num_evicted, len(pages)) == (12, 8 - 3)
    assert (sliding.num_evicted, len(last_pages)) == (20, 8 - 5)
    assert table.save().cut(15).kv_len == 0, "the sinks' pages are there, those of the other layers not"


@pytest.mark.parametrize("kv_len", [20, 17, 16, 15, 12, 3])
def test_the_used_pages_of_a_table_that_is_cut_are_the_first_ones(kv_len: int) -> None:
    """So that of a copy of all the first part is enough."""
    table = computed(PagePool(40, 4), 20)
    table.slide(20)
    used, state = table.used_pages, table.save()
    assert sorted(used) == sorted(table.pages)
    table.truncate(kv_len)
    assert state.cut(kv_len) == table.save()
    assert table.used_pages == used[: state.cut(kv_len).num_pages]


# ---- any order of operations ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Owner:
    """A table, and what each of its tokens is; `floor` is the shortest context that a cut may leave for nothing."""

    table: PageTable
    tokens: list[int]
    floor: int = 0


class PoolMachine(RuleBasedStateMachine):
    """Tables that compute, share, slide and truncate in any order; cells say what was written where, and by whom."""

    owners = Bundle("owners")

    @initialize(
        target=owners,
        num_pages=st.integers(10, 150),
        page_size=st.integers(1, 4),
        lengths=st.tuples(*[st.sampled_from([25, 18, 9, 0])] * 3),
        kinds=st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(1, 9)), min_size=1, max_size=3),
    )
    def begin(
        self, num_pages: int, page_size: int, lengths: tuple[int, ...], kinds: list[tuple[int, int | None]]
    ) -> MultipleResults[Owner]:
        self.pool = PagePool(num_pages, page_size)
        self.kinds = [
            Track(num_groups, window, slack=page_size, num_sinks=page_size if window is None else 0)
            for num_groups, window in kinds
        ]
        self.all = [Owner(PageTable(self.pool, self.kinds), []) for _ in range(3)]
        self.cells: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.num_tokens = 0
        for owner, length in zip(self.all, lengths, strict=True):
            self._compute(owner, length)
        return multiple(*self.all)

    @rule(owner=owners, num_tokens=st.integers(0, 20))
    def reserve(self, owner: Owner, num_tokens: int) -> None:
        table = owner.table
        num_free, num_owned = self.pool.num_free, len(table.pages)
        could = table.could_have(table.save().num_pages_with(num_tokens), [])
        assert table.reserve(table.kv_len + num_tokens) == could
        assert len(table.pages) - num_owned == num_free - self.pool.num_free

    @rule(owner=owners, num_tokens=st.sampled_from([12, 7, 4, 1]))
    def compute(self, owner: Owner, num_tokens: int) -> None:
        self._compute(owner, num_tokens)

    def _compute(self, owner: Owner, num_tokens: int) -> None:
        table, first = owner.table, owner.table.kv_len
        if not table.reserve(first + num_tokens):
            return
        owner.tokens[first:] = range(self.num_tokens, self.num_tokens + num_tokens)
        self.num_tokens += num_tokens
        for position in range(first, first + num_tokens):
            for kind, (track, pages) in enumerate(self._seen(table)):
                at = position - track.num_evicted
                for group in range(track.num_groups):
                    page = pages[at // table.page_size * track.num_groups + group]
                    assert not self.pool.is_shared(page), "somebody else's page is written"
                    self.cells[page, at % table.page_size] = kind, group, owner.tokens[position]
        table.kv_len += num_tokens

    @rule(owner=owners, num_less=st.integers(0, 12))
    def truncate(self, owner: Owner, num_less: int) -> None:
        table, kv_len = owner.table, max(0, owner.table.kv_len - num_less)
        state, is_shared = table.save().cut(kv_len), any(map(self.pool.is_shared, table.pages))
        before = min(kv_len, table.kv_len)
        table.truncate(kv_len)
        assert is_shared or table.save() == state
        if not is_shared and before >= owner.floor - 1:
            assert table.kv_len == before, "what may be cut back for nothing was computed again"
        assert len(table.pages) == table.save().num_pages
        self._forget(owner)

    @rule(owner=owners, ahead=st.integers(-12, 5))
    def slide(self, owner: Owner, ahead: int) -> None:
        context_len = max(0, owner.table.kv_len + ahead)
        owner.table.slide(context_len)
        owner.floor = max(owner.floor, min(owner.table.kv_len + 1, context_len - self.pool.page_size))

    @rule(owner=owners, num_pages=st.integers(1, 4))
    def evict(self, owner: Owner, num_pages: int) -> None:
        table, size = owner.table, self.pool.page_size
        if any(track.window is None for track in table.tracks) and table.kv_len >= (num_pages + 1) * size:
            table.evict(num_pages * size)
            owner.floor = max(owner.floor, (num_pages + 1) * size + 1)

    @rule(taker=owners, giver=owners, num_less=st.integers(0, 9))
    def adopt(self, taker: Owner, giver: Owner, num_less: int) -> None:
        if taker is not giver:
            taker.table.truncate(0)
            taker.table.adopt_from(giver.table, max(0, giver.table.kv_len - num_less))
            taker.tokens, taker.floor = list(giver.tokens), giver.floor
            self._forget(taker)

    @rule(owner=owners)
    def move_out_and_back(self, owner: Owner) -> None:
        """Its pages are copied one by one, and other pages take the copies."""
        table = owner.table
        state, cells = table.save(), [self._cells_of(page) for page in table.used_pages]
        table.truncate(0)
        if table.load(state):
            for page, copy in zip(table.used_pages, cells, strict=True):
                self.cells.update({(page, offset): cell for offset, cell in copy.items()})
        self._forget(owner)

    def _cells_of(self, page: int) -> dict[int, tuple[int, int, int]]:
        return {at: self.cells[page, at] for at in range(self.pool.page_size) if (page, at) in self.cells}

    def _forget(self, owner: Owner) -> None:
        del owner.tokens[owner.table.kv_len :]
        if not owner.table.kv_len:
            owner.floor = 0

    def _seen(self, table: PageTable) -> list[tuple[Track, PageIds]]:
        return table.seen(max((track.num_evicted for track in table.tracks if track.window is None), default=0))

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity([owner.table.pages for owner in self.all])
        for owner in self.all:
            owner.table.check_integrity()
            self._check_cells(owner)

    def _check_cells(self, owner: Owner) -> None:
        """All that the next token sees is there, for every group of layers."""
        table = owner.table
        for kind, (track, pages) in enumerate(self._seen(table)):
            oldest = 0 if track.window is None else max(0, table.kv_len - track.window + 1)
            for position in range(oldest, table.kv_len):
                if track.num_sinks <= position < track.num_sinks + track.num_evicted and track.window is None:
                    continue
                at = position if position < track.num_sinks else position - track.num_evicted
                for group in range(track.num_groups):
                    page = pages[at // table.page_size * track.num_groups + group]
                    assert self.cells[page, at % table.page_size] == (kind, group, owner.tokens[position])


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


# ---- behind a gap --------------------------------------------------------------------------------------------------


def test_a_table_begins_behind_a_gap_as_if_nothing_had_stood_there() -> None:
    """Sinks of a page, then position 40: layers that see all keep the sinks, those that look back 5 tokens do not."""
    pool = PagePool(32, 4)
    table = PageTable(pool, [Track(num_sinks=4), Track(2, window=5, slack=4)])
    assert table.reserve(4)
    table.kv_len = 4
    table.begin_behind(40)
    assert (table.kv_len, [len(pages) for pages in table._pages]) == (40, [1, 0])
    table.check_integrity()
    assert table.reserve(46)
    table.kv_len = 46
    (everything, pages), (near, near_pages) = table.seen(8)
    assert (everything.num_evicted, len(pages)) == (36, 3), "nobody sees what is not there"
    assert (near.num_evicted, len(near_pages)) == (40, 4)
    table.check_integrity()
    table.evict(40)
    assert table.seen(40)[0][0].num_evicted == 40
    pool.check_integrity([table.pages])


@pytest.mark.parametrize(("kv_len", "left"), [(45, 45), (40, 40), (39, 0), (4, 0), (2, 0)])
def test_a_cut_to_before_a_gap_leaves_nothing_behind_it(kv_len: int, left: int) -> None:
    pool = PagePool(32, 4)
    table = PageTable(pool, [Track(num_sinks=4), Track(window=5, slack=4)])
    assert table.reserve(4)
    table.kv_len = 4
    table.begin_behind(40)
    assert table.reserve(46)
    table.kv_len = 46
    table.truncate(kv_len)
    assert table.kv_len == left
    assert any(track.origin for track in table.tracks) is (left > 0)
    table.check_integrity()
    pool.check_integrity([table.pages])


def test_a_branch_begins_behind_the_same_gap() -> None:
    pool = PagePool(32, 4)
    table = PageTable(pool, [Track(num_sinks=4)])
    assert table.reserve(4)
    table.kv_len = 4
    table.begin_behind(40)
    assert table.reserve(46)
    table.kv_len = 46
    branch = PageTable(pool, [Track(num_sinks=4)])
    branch.adopt_from(table, 45)
    assert (branch.kv_len, branch.tracks) == (44, table.tracks)
    branch.check_integrity()
    pool.check_integrity([table.pages, branch.pages])


def test_only_sinks_come_before_a_gap() -> None:
    table = PageTable(PagePool(32, 4), [Track(num_sinks=4)])
    assert table.reserve(8)
    table.kv_len = 8
    with pytest.raises(AssertionError):
        table.begin_behind(40)
