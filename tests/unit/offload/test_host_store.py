"""Tests of host_store."""

from __future__ import annotations

from microturn.kv.stored import StoredImage
from microturn.kv.table_state import TableState
from microturn.offload.host_store import HostStore


def image(num_bytes: int) -> StoredImage:
    return StoredImage(TableState(1, 1), num_bytes, lambda _: None, None)


def test_it_holds_so_many_bytes() -> None:
    store = HostStore(100)
    assert store.has_room(100)
    assert not store.has_room(101)
    first = image(60)
    store.add(first)
    assert store.has_room(40)
    assert not store.has_room(41)
    store.remove(first)
    assert store.has_room(100)
    store.check_integrity()


def test_the_one_that_came_first_is_named_first() -> None:
    store = HostStore(100)
    images = [image(10), image(20), image(30)]
    for each in images:
        store.add(each)
    store.remove(images[1])
    store.add(images[1])
    assert list(store) == [images[0], images[2], images[1]]
    assert store.used_bytes == 60
    store.check_integrity()
