"""Tests of prefix_cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from microturn.kv.page_table import PageTable
from microturn.kv.page_track import Track
from microturn.kv.pool import PagePool
from microturn.kv.prefix_cache import PrefixCache
from microturn.sessions.context import Context

PAGE_SIZE = 4


@pytest.fixture
def pool() -> PagePool:
    return PagePool(16, PAGE_SIZE)


@pytest.fixture
def cache(pool: PagePool) -> PrefixCache:
    return PrefixCache(pool)


def num_evictable(pool: PagePool) -> int:
    """How many of the free pages are kept."""
    return pool.num_free + pool.num_used - pool.num_pages


def context_of(token_ids: Sequence[int]) -> Context:
    context = Context()
    context.append_ids(token_ids)
    return context


def computed(pool: PagePool, num_tokens: int) -> PageTable:
    """A table with so many tokens in the cache."""
    table = PageTable(pool)
    assert table.reserve(num_tokens)
    table.kv_len = num_tokens
    return table


def publish(pool: PagePool, cache: PrefixCache, token_ids: Sequence[int]) -> list[int]:
    """A session with these tokens comes, is computed but for its last token, and goes; its pages."""
    table = computed(pool, len(token_ids) - 1)
    pages = list(table.pages)
    cache.publish(table, context_of(token_ids))
    table.truncate(0)
    pool.check_integrity([], cache.pages)
    return pages


def adopt(pool: PagePool, cache: PrefixCache, token_ids: Sequence[int]) -> PageTable:
    table = PageTable(pool)
    cache.adopt(table, context_of(token_ids))
    return table


def evict(pool: PagePool, num_pages: int) -> None:
    """Somebody takes the pages that nobody owns or keeps, and so many more, and gives them back."""
    taken = pool.allocate(pool.num_pages - pool.num_used + num_pages)
    assert taken is not None
    pool.release(taken)


def test_an_empty_cache_gives_nothing(pool: PagePool, cache: PrefixCache) -> None:
    table = adopt(pool, cache, range(20))
    assert table.kv_len == 0
    assert not cache.pages


def test_who_begins_with_the_same_tokens_gets_the_same_pages(pool: PagePool, cache: PrefixCache) -> None:
    pages = publish(pool, cache, range(11))
    table = adopt(pool, cache, [*range(8), 50, 51])
    assert table.pages == pages[:2]
    assert table.kv_len == 8
    pool.check_integrity([table.pages], cache.pages)


def test_only_full_pages_are_kept(pool: PagePool, cache: PrefixCache) -> None:
    publish(pool, cache, range(8))  # seven of them are computed
    assert adopt(pool, cache, range(20)).kv_len == 4


def test_the_last_token_is_left_to_compute(pool: PagePool, cache: PrefixCache) -> None:
    """Without a token to compute there would be no logits to generate from."""
    publish(pool, cache, range(9))
    assert adopt(pool, cache, range(8)).kv_len == 4
    assert adopt(pool, cache, range(9)).kv_len == 8
    assert adopt(pool, cache, []).kv_len == 0


def test_a_page_counts_only_behind_the_same_pages(pool: PagePool, cache: PrefixCache) -> None:
    """Equal tokens at equal positions are another page when what comes before differs: their KV has seen it."""
    publish(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert adopt(pool, cache, [0, 2, 3, 4, 5, 6, 7, 8, 9]).kv_len == 0
    assert adopt(pool, cache, [1, 2, 3, 4, 5, 6, 7, 0, 9]).kv_len == 4


def test_prefixes_branch(pool: PagePool, cache: PrefixCache) -> None:
    stem = [1, 2, 3, 4]
    first = publish(pool, cache, [*stem, 10, 11, 12, 13, 0])
    second = publish(pool, cache, [*stem, 20, 21, 22, 23, 0])
    assert adopt(pool, cache, [*stem, 10, 11, 12, 13, 9]).pages == first[:2]
    assert adopt(pool, cache, [*stem, 20, 21, 22, 23, 9]).pages == [first[0], second[1]]


def test_what_is_known_already_is_not_kept_twice(pool: PagePool, cache: PrefixCache) -> None:
    publish(pool, cache, range(9))
    publish(pool, cache, range(9))
    assert len(cache.pages) == pool.num_used == 2


def test_a_session_that_adopted_may_publish_more(pool: PagePool, cache: PrefixCache) -> None:
    publish(pool, cache, range(9))
    table = adopt(pool, cache, range(14))
    assert table.reserve(13)
    table.kv_len = 13
    cache.publish(table, context_of(range(14)))
    table.truncate(0)
    assert not table.pages
    table = adopt(pool, cache, range(14))
    assert table.kv_len == 12
    pool.check_integrity([table.pages], cache.pages)


def test_contexts_with_embeddings_are_not_shared(pool: PagePool, cache: PrefixCache) -> None:
    """An embedding's place holds the id 0: two different embeddings would look alike."""
    context = context_of([1, 2, 3])
    context.append_embeds(torch.ones(6, 2))
    table = computed(pool, 8)
    cache.publish(table, context)
    table.truncate(0)
    assert not cache.pages
    publish(pool, cache, [1, 2, 3, 0, 0, 0, 0, 0, 0])
    other = PageTable(pool)
    cache.adopt(other, context)
    assert other.kv_len == 0


def test_eviction_begins_at_the_end_of_a_prefix(pool: PagePool, cache: PrefixCache) -> None:
    """Without the pages before it a page is of no use, so the last one goes first."""
    pages = publish(pool, cache, range(13))
    evict(pool, 1)
    assert adopt(pool, cache, range(13)).pages == pages[:2]


def test_eviction_begins_with_the_prefix_used_longest_ago(pool: PagePool, cache: PrefixCache) -> None:
    first = publish(pool, cache, range(9))
    publish(pool, cache, range(100, 109))
    adopt(pool, cache, range(9)).truncate(0)
    evict(pool, 3)
    assert adopt(pool, cache, range(100, 109)).kv_len == 0
    assert adopt(pool, cache, range(9)).pages == first[:1]


def test_a_page_that_a_session_uses_is_not_evicted_since_nothing_would_come_free(
    pool: PagePool, cache: PrefixCache
) -> None:
    publish(pool, cache, range(9))
    publish(pool, cache, range(50, 59))
    table = adopt(pool, cache, range(9))
    evict(pool, num_evictable(pool))
    assert pool.num_free == 14
    assert adopt(pool, cache, range(9)).pages == table.pages
    assert adopt(pool, cache, range(50, 59)).pages == []


def test_half_a_surrogate_pair_is_a_salt_too(pool: PagePool, cache: PrefixCache) -> None:
    """It can stand in JSON and not in UTF-8: the session's START failed once it had replaced what lived there."""
    cache.publish(computed(pool, 8), context_of(range(9)), "\ud800")
    table = PageTable(pool)
    cache.adopt(table, context_of(range(9)), "\ud800")
    assert table.kv_len == 8


def test_pages_are_shared_only_among_those_of_the_same_salt(pool: PagePool, cache: PrefixCache) -> None:
    """How long a first turn takes would tell a stranger what others have said."""
    for salt in ("ours", ""):
        table = computed(pool, 8)
        cache.publish(table, context_of(range(9)), salt)
    for salt, kv_len in (("ours", 8), ("", 8), ("theirs", 0)):
        table = PageTable(pool)
        cache.adopt(table, context_of(range(9)), salt)
        assert table.kv_len == kv_len


def test_what_was_evicted_is_kept_again_when_it_comes_again(pool: PagePool, cache: PrefixCache) -> None:
    publish(pool, cache, range(13))
    evict(pool, 1)
    publish(pool, cache, range(13))
    assert adopt(pool, cache, range(13)).kv_len == 12


# ---- layers with a window of their own -------------------------------------------------------------------------------

# Beside a group of layers that see all, two groups that see six tokens: two pages of four at most.
KINDS = (Track(), Track(num_groups=2, window=6))


def of_kinds(pool: PagePool, num_tokens: int = 0) -> PageTable:
    table = PageTable(pool, KINDS)
    assert table.reserve(num_tokens)
    table.kv_len = num_tokens
    return table


@pytest.fixture
def long_prefix() -> tuple[PagePool, PrefixCache, PageTable]:
    """A first turn of 20 tokens, which gave nothing up before it ended, and then all that is not seen any more."""
    pool = PagePool(40, PAGE_SIZE)
    cache, table = PrefixCache(pool), of_kinds(pool, 20)
    cache.publish(table, context_of(range(21)))
    table.slide(21)
    return pool, cache, table


@pytest.mark.parametrize(("num_same", "kv_len", "num_pages"), [(21, 20, 5 + 4), (14, 12, 3 + 4), (6, 4, 1 + 2)])
def test_of_layers_with_a_window_the_last_pages_are_shared(
    long_prefix: tuple[PagePool, PrefixCache, PageTable], num_same: int, kv_len: int, num_pages: int
) -> None:
    pool, cache, table = long_prefix
    other = of_kinds(pool)
    cache.adopt(other, context_of([*range(num_same), *range(100, 110)]))
    assert (other.kv_len, len(other.pages)) == (kv_len, num_pages)
    other.check_integrity()
    pool.check_integrity([table.pages, other.pages], cache.pages)
    (_, all_kept), (_, last) = other.seen(0)
    (_, theirs), _ = table.seen(0)
    assert all_kept.tolist() == theirs[: len(all_kept)].tolist()
    assert not set(last.tolist()) & set(all_kept.tolist())


def test_what_only_layers_with_a_window_have_seen_gives_way_though_the_session_lives(
    long_prefix: tuple[PagePool, PrefixCache, PageTable],
) -> None:
    """Or a long first prompt would be held whole for as long as its session lives."""
    pool, cache, table = long_prefix
    evict(pool, num_evictable(pool))
    assert pool.num_used == len(table.pages) == 5 + 4
    whole, part = of_kinds(pool), of_kinds(pool)
    cache.adopt(whole, context_of(range(30)))
    assert whole.kv_len == 20, "the pages that are seen behind it are still there"
    cache.adopt(part, context_of(range(14)))
    assert part.is_empty, "what would be seen behind a part of it is gone"
    pool.check_integrity([table.pages, whole.pages], cache.pages)
