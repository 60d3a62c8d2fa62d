"""Tests of stored_kv."""

from __future__ import annotations

from microturn.kv.page_table import PageTable
from microturn.kv.pool import PagePool
from microturn.kv.stored import Place, StoredImage, StoredKV
from microturn.kv.table_state import TableState


def stored(unused: list[StoredImage]) -> StoredKV:
    """Of ten tokens in three pages."""
    image = StoredImage(TableState(4, 10), 100, unused.append, None)
    return StoredKV(image, image.state, moved_s=0.0)


def test_a_cut_is_remembered() -> None:
    kv = stored([])
    kv.cut(12)
    assert kv.kv_len == 10
    kv.cut(5)
    kv.cut(7)
    assert kv.kv_len == 5


def test_of_a_lost_copy_nothing_counts() -> None:
    kv = stored([])
    kv.image.place = Place.LOST
    assert kv.kv_len == 0


def test_a_copy_belongs_to_all_forks_and_is_unused_when_the_last_has_done_with_it() -> None:
    unused: list[StoredImage] = []
    kv = stored(unused)
    branch = kv.branch(6)
    branch.cut(5)
    assert (kv.kv_len, branch.kv_len) == (10, 5)
    kv.release()
    assert unused == []
    branch.release()
    assert unused == [kv.image]


def test_a_branch_of_what_was_cut_is_not_longer() -> None:
    kv = stored([])
    kv.cut(4)
    assert kv.branch(9).kv_len == 4


def test_an_empty_table_gets_the_pages_that_are_left_after_a_cut() -> None:
    pool = PagePool(4, 4)
    table = PageTable(pool)
    kv = stored([])
    kv.num_copied = 3
    kv.cut(5)
    assert kv.place_in(table)
    assert (len(table.pages), table.kv_len, kv.num_copied) == (2, 5, 0)
    assert pool.num_free == 2


def test_where_the_pool_has_too_few_pages_nothing_is_taken() -> None:
    pool = PagePool(2, 4)
    table = PageTable(pool)
    kv = stored([])
    assert not kv.place_in(table)
    assert (table.pages, table.kv_len, pool.num_free) == ([], 0, 2)
    kv.cut(8)
    assert kv.place_in(table), "what was cut off needs no pages"
