"""Tests of incoming, through a storage: KV that sessions bring along stays in its file until it is in their pages."""

from __future__ import annotations

import pytest

from microturn.kv.image import KVImage
from microturn.kv.table_state import TableState
from microturn.offload.image_file import DamagedFile
from support.storages import KV, PAGE, Starter, add, fetch, pass_steps, places
from support.tiers import contents_of


class Source:
    """The KV of pages 1 and 2, in what might be a file."""

    state = TableState(4, 8)

    def __init__(self, pages: KVImage | None = None) -> None:
        self.pages = pages
        self.is_dropped = False

    def read(self, pages: KVImage) -> None:
        pages.buffers[0].copy_(KV.read([1, 2]).buffers[0])

    def drop(self) -> None:
        self.is_dropped = True


@pytest.mark.parametrize("sizes", [(0,), (4,), (4, 8)])
def test_what_is_brought_along_comes_when_a_turn_wants_it(start: Starter, sizes: tuple[int, ...]) -> None:
    driver, source = start(*sizes), Source()
    image = driver.storage.bring(source)
    assert (places(image), driver.storage.host.used_bytes) == (["DISK"], 0)
    assert contents_of(driver.storage.reader(image)()) == contents_of(KV.read([1, 2]))
    assert not source.is_dropped
    fetch(driver, image)
    assert image.pages is not None
    assert contents_of(image.pages) == contents_of(KV.read([1, 2]))
    driver.settle()
    image.num_users = 0
    image.on_unused(image)
    driver.incoming.close()
    assert source.is_dropped


def test_what_came_for_a_turn_and_is_beyond_the_room_goes_with_the_turn(start: Starter) -> None:
    driver = start(0)
    image = driver.storage.bring(Source())
    fetch(driver, image)
    assert driver.storage.host.used_bytes == 2 * PAGE
    driver.storage.begin_step()
    assert places(image) == ["HOST"], "the turn may still be waiting"
    pass_steps(driver)
    assert (places(image), driver.storage.host.used_bytes, image.pages) == (["DISK"], 0, None)
    fetch(driver, image)
    assert places(image) == ["HOST"]


@pytest.mark.parametrize("disk_pages", [None, 8])
def test_where_memory_is_short_what_was_brought_along_is_left_in_its_file(
    start: Starter, disk_pages: int | None
) -> None:
    driver = start(4, disk_pages)
    image = driver.storage.bring(Source())
    fetch(driver, image)
    pass_steps(driver)
    others = [add(driver, 3), add(driver, 4, 5, 6)]
    driver.settle()
    assert places(image) == ["DISK"]
    assert image.pages is None
    assert driver.counters.dropped == 0
    assert "LOST" not in places(*others)
    driver.storage.check_integrity()


def test_what_nobody_ever_wanted_is_dropped(start: Starter) -> None:
    driver, sources = start(4), [Source(), Source()]
    one, _ = (driver.storage.bring(source) for source in sources)
    one.num_users = 0
    one.on_unused(one)
    assert places(one) == ["LOST"]
    driver.storage.check_integrity()
    driver.incoming.close()
    assert all(source.is_dropped for source in sources)


def test_a_source_that_cannot_be_read_is_lost(start: Starter) -> None:
    class Damaged(Source):
        def read(self, pages: KVImage) -> None:
            raise DamagedFile("a bit")

    driver = start(4)
    image = driver.storage.bring(Damaged())
    fetch(driver, image)
    assert places(image) == ["LOST"]
    assert driver.counters.unreadable_files == 1


@pytest.mark.parametrize("sizes", [(0,), (4, 8)])
def test_what_another_server_has_sent_is_ready_in_memory_that_is_not_the_tiers(
    start: Starter, sizes: tuple[int, ...]
) -> None:
    driver, source = start(*sizes), Source(KV.read([1, 2]))
    image = driver.storage.bring(source)
    pass_steps(driver)
    assert (places(image), driver.storage.host.used_bytes) == (["ARRIVED"], 0)
    assert driver.storage.fetch(image, is_urgent=False)
    assert contents_of(driver.storage.reader(image)()) == contents_of(KV.read([1, 2]))
    driver.storage.check_integrity()
    image.num_users = 0
    image.on_unused(image)
    assert (places(image), image.pages) == (["LOST"], None)
    driver.incoming.close()
    assert source.is_dropped
