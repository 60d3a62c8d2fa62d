"""Tests of incoming, through a storage: KV that sessions bring along stays in its file until it is in their pages."""

from __future__ import annotations

import errno
import math
import threading
import time
from typing import Any

import pytest

from microturn.kv.image import KVImage
from microturn.kv.stored import Place, StoredImage
from microturn.kv.table_state import TableState
from microturn.offload.image_file import DamagedFile
from support.storages import KV, PAGE, Starter, add, fetch, pass_steps, places
from support.tiers import StorageDriver, contents_of


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


class Refused(Source):
    """One in a bucket that refuses some requests."""

    def __init__(self, num_refused: float) -> None:
        super().__init__()
        self.num_refused = num_refused
        self.num_reads = 0

    def read(self, pages: KVImage) -> None:
        self.num_reads += 1
        if self.num_reads <= self.num_refused:
            raise OSError(errno.EIO, "503 Slow Down")
        super().read(pages)


def wait_for(driver: StorageDriver, image: StoredImage, for_s: float, **values: Any) -> float:
    """A turn waits for a copy until it is in memory or lost; returns for how long, at most `for_s`."""
    begun_s = driver.clock.now_s
    while not driver.storage.fetch(image, is_urgent=True, **values) and driver.clock.now_s < begun_s + for_s:
        if image.place is Place.READING:
            driver.settle()
        else:
            assert driver.storage.failed.next_s is not None
            driver.clock.now_s = driver.storage.failed.next_s
        driver.storage.begin_step()
    return driver.clock.now_s - begun_s


@pytest.mark.parametrize("sizes", [(0,), (4, 8)])
def test_a_source_that_is_refused_once_is_read_again(start: Starter, sizes: tuple[int, ...]) -> None:
    driver, source = start(*sizes), Refused(1)
    image, other = driver.storage.bring(source), driver.storage.bring(Source())
    assert not driver.storage.fetch(image, is_urgent=True)
    driver.settle()
    assert (places(image), driver.storage.host.used_bytes) == (["DISK"], 0)
    assert not driver.storage.fetch(image, is_urgent=True)
    fetch(driver, other)  # who waits for another one is not held up
    assert (places(image, other), source.num_reads) == (["DISK", "HOST"], 1)
    assert 0 < wait_for(driver, image, 100) < 1
    assert image.pages is not None
    assert contents_of(image.pages) == contents_of(KV.read([1, 2]))
    assert driver.counters.unreadable_files == 0
    assert not source.is_dropped
    assert driver.storage.failed.next_s is None


@pytest.mark.parametrize(("can_be_recomputed", "least_s"), [(True, 4), (False, 50)])
def test_a_source_that_is_always_refused_is_given_up(start: Starter, can_be_recomputed: bool, least_s: float) -> None:
    driver, source = start(0), Refused(math.inf)
    image = driver.storage.bring(source)
    waited_s = wait_for(driver, image, 1000, can_be_recomputed=can_be_recomputed)
    assert least_s < waited_s < 2 * least_s
    assert (places(image), driver.storage.host.used_bytes) == (["LOST"], 0)
    assert driver.counters.unreadable_files == 1
    assert driver.storage.failed.next_s is None
    driver.settle()
    assert source.is_dropped, "nobody can use it any more"


def test_who_comes_later_has_patience_of_its_own(start: Starter) -> None:
    """A turn was cancelled before a source that was refused could be read."""
    driver, source = start(0), Refused(6)
    image = driver.storage.bring(source)
    wait_for(driver, image, 1)
    assert source.num_reads == 2
    driver.settle()
    driver.clock.now_s += 1000
    assert driver.storage.failed.next_s is None, "nobody waits"
    wait_for(driver, image, 100)
    assert places(image) == ["HOST"]


def test_what_is_only_expected_is_not_lost_because_it_is_refused(start: Starter) -> None:
    driver, source = start(4), Refused(50)
    image = driver.storage.bring(source)
    for _ in range(50):
        assert not driver.storage.fetch(image, is_urgent=False)
        driver.settle()
        driver.clock.now_s += 1
    fetch(driver, image)
    assert places(image) == ["HOST"]


def test_what_nobody_needs_any_more_while_it_is_refused_is_dropped(start: Starter) -> None:
    driver, source = start(0), Refused(1)
    image = driver.storage.bring(source)
    assert not driver.storage.fetch(image, is_urgent=True)
    image.num_users = 0
    image.on_unused(image)
    driver.settle()
    assert (places(image), list(driver.storage), source.is_dropped) == (["LOST"], [], True)


class Hanging(Source):
    """One in a file that hangs until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def read(self, pages: KVImage) -> None:
        assert self.let_go.wait(30)
        super().read(pages)

    def drop(self) -> None:
        assert self.let_go.wait(30)
        super().drop()


@pytest.mark.parametrize("sizes", [(0,), (4,), (4, 8)])
def test_a_source_that_hangs_holds_up_no_other_turn_and_not_the_end(start: Starter, sizes: tuple[int, ...]) -> None:
    driver, hanging, sources = start(*sizes), Hanging(), [Source() for _ in range(3)]
    image, *others = (driver.storage.bring(source) for source in [hanging, *sources])
    assert not driver.storage.fetch(image, is_urgent=True)
    for other in others:
        give_up_s = time.monotonic() + 10
        while not driver.storage.fetch(other, is_urgent=True):
            assert time.monotonic() < give_up_s, "it waits for the one that hangs"
            time.sleep(0.001)
            driver.take_posts()
    assert places(image, *others) == ["READING", "HOST", "HOST", "HOST"]
    begun_s = time.monotonic()
    driver.incoming.close()
    assert time.monotonic() - begun_s < 5
    assert all(source.is_dropped for source in sources)
    hanging.let_go.set()


def test_at_the_end_slow_sources_are_dropped_at_the_same_time(start: Starter) -> None:
    class Slow(Source):
        def drop(self) -> None:
            time.sleep(0.05)
            super().drop()

    driver, sources = start(0), [Slow() for _ in range(40)]
    images = [driver.storage.bring(source) for source in sources]
    images[0].on_unused(images[0])
    begun_s = time.monotonic()
    driver.incoming.close()
    assert time.monotonic() - begun_s < 1.5, "two seconds one after the other"
    assert all(source.is_dropped for source in sources)


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
