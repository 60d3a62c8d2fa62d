"""Tests of storage: which copy is in memory, which on disk, and which is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from microturn.kv.stored import Place, StoredImage
from microturn.offload import disk_store
from support.storages import KV, PAGE, Starter, add, fetch, pass_steps, places
from support.tiers import StorageDriver, contents_of


def test_without_tiers_nothing_can_be_kept(start: Starter) -> None:
    driver = start(0)
    assert not driver.storage.is_there
    assert not driver.storage.has_room(PAGE)
    assert not driver.storage.make_room(PAGE)


# ---- host memory ---------------------------------------------------------------------------------------------------


def test_in_memory_a_copy_is_at_hand(start: Starter) -> None:
    driver = start(4)
    image = add(driver, 1, 2)
    assert driver.storage.fetch(image, is_urgent=True)
    assert image.pages is not None
    assert contents_of(image.pages) == contents_of(KV.read([1, 2]))


def test_without_a_disk_those_used_longest_ago_are_lost(start: Starter) -> None:
    driver = start(4)
    images = [add(driver, 1), add(driver, 2), add(driver, 3, 4), add(driver, 5, 6)]
    assert places(*images) == ["LOST", "LOST", "HOST", "HOST"]
    assert driver.counters.dropped == 2
    assert driver.storage.fetch(images[0], is_urgent=True), "there is nothing to wait for"


def test_a_copy_that_is_larger_than_everything_costs_nobody_theirs(start: Starter) -> None:
    driver = start(2)
    image = add(driver, 1)
    assert not driver.storage.has_room(3 * PAGE)
    assert not driver.storage.make_room(3 * PAGE)
    assert places(image) == ["HOST"]


def test_a_copy_that_a_turn_waits_for_is_not_lost(start: Starter) -> None:
    driver = start(2)
    first, second = add(driver, 1), add(driver, 2)
    pass_steps(driver)
    fetch(driver, first)
    third = add(driver, 3)
    assert places(first, second, third) == ["HOST", "LOST", "HOST"]
    pass_steps(driver)
    fetch(driver, first)
    fetch(driver, third)
    assert not driver.storage.make_room(PAGE)
    pass_steps(driver)  # nobody asks any more
    assert driver.storage.make_room(PAGE)
    assert places(first, third) == ["LOST", "HOST"]


def test_what_nobody_needs_any_more_makes_room(start: Starter) -> None:
    driver = start(2)
    first, second = add(driver, 1), add(driver, 2)
    first.num_users = 0
    first.on_unused(first)
    add(driver, 3)
    assert places(second) == ["HOST"]
    assert driver.counters.dropped == 0


# ---- disk ----------------------------------------------------------------------------------------------------------


def test_beyond_a_share_of_memory_those_used_longest_ago_go_on_to_the_disk(start: Starter) -> None:
    driver = start(8, 100)
    images = [add(driver, number) for number in range(8)]
    driver.settle()
    assert places(*images) == ["DISK"] * 2 + ["HOST"] * 6
    assert (driver.counters.moved_to_disk, driver.counters.dropped) == (2, 0)


def test_without_memory_of_its_own_the_disk_gets_everything(start: Starter, tmp_path: Path) -> None:
    driver = start(0, 100, max_image_pages=2)
    images = []
    for number in range(6):
        images.append(add(driver, number, number + 1))
        driver.settle()
    assert places(*images) == ["DISK"] * 6
    assert driver.storage.host.used_bytes == 0
    assert len(list(tmp_path.glob("*/*"))) == 6


def test_who_can_wait_waits_for_the_disk_and_nothing_is_lost(start: Starter) -> None:
    """Copies nearly as large as the memory: there is room for one, and not too much is taken by it."""
    driver = start(3, 100, max_image_pages=2)
    first = add(driver, 1, 2)
    assert not driver.storage.has_room(2 * PAGE)
    assert places(first) == ["WRITING"]
    driver.settle()
    second = add(driver, 3, 4)
    assert places(first, second) == ["DISK", "HOST"]
    assert driver.counters.dropped == 0


def test_who_cannot_wait_has_room_made(start: Starter) -> None:
    driver = start(4, 100)
    first, second = add(driver, 1, 2), add(driver, 3, 4)
    assert places(first, second) == ["WRITING", "HOST"]
    assert driver.storage.make_room(2 * PAGE)
    assert places(first, second) == ["WRITING", "LOST"]
    assert not driver.storage.make_room(3 * PAGE), "what is being written is still in memory"
    driver.settle()
    assert places(first) == ["DISK"]


def test_a_copy_comes_back_from_the_disk_and_its_file_goes(start: Starter, tmp_path: Path) -> None:
    driver = start(0, 100)
    image = add(driver, 7, 5)
    driver.settle()
    assert image.pages is None
    fetch(driver, image)
    assert image.pages is not None
    assert contents_of(image.pages) == contents_of(KV.read([7, 5]))
    driver.settle()
    assert driver.counters.read_from_disk == 1
    assert list(tmp_path.glob("*/*")) == []


def test_a_copy_can_be_had_while_it_is_being_written(start: Starter, tmp_path: Path) -> None:
    driver = start(0, 100)
    image = add(driver, 1)
    assert places(image) == ["WRITING"]
    fetch(driver, image)
    image.num_users = 0
    image.on_unused(image)
    driver.settle()
    assert (places(image), list(driver.storage)) == (["LOST"], [])
    assert list(tmp_path.glob("*/*")) == []


def test_what_nobody_needs_any_more_while_it_is_read_is_forgotten(start: Starter) -> None:
    driver = start(0, 100)
    image = add(driver, 1)
    driver.settle()
    assert not driver.storage.fetch(image, is_urgent=True)
    image.num_users = 0
    image.on_unused(image)
    driver.settle()
    assert (places(image), list(driver.storage)) == (["LOST"], [])


def test_who_is_only_expected_gives_way_where_memory_is_full(start: Starter) -> None:
    driver = start(0, 100, max_image_pages=2)
    images = []
    for number in range(4):
        images.append(add(driver, number, number + 5))
        driver.settle()
    fetch(driver, images[0])
    assert not driver.storage.fetch(images[1], is_urgent=False)
    assert places(*images) == ["HOST", "DISK", "DISK", "DISK"]
    assert not driver.storage.fetch(images[1], is_urgent=True), "for a turn it is read all the same"
    assert places(*images) == ["HOST", "READING", "DISK", "DISK"]
    assert not driver.storage.fetch(images[2], is_urgent=True)
    assert not driver.storage.fetch(images[3], is_urgent=True)
    assert places(*images) == ["HOST", "READING", "READING", "DISK"], "but no more than two of the largest at a time"


def test_where_the_disk_is_full_those_written_longest_ago_are_lost(start: Starter, tmp_path: Path) -> None:
    driver = start(0, 3)
    images = []
    for number in range(5):
        images.append(add(driver, number))
        driver.settle()
    assert places(*images) == ["LOST", "LOST", "DISK", "DISK", "DISK"]
    assert driver.counters.dropped == 2
    assert len(list(tmp_path.glob("*/*"))) == 3


def test_a_copy_larger_than_the_disk_stays_in_memory(start: Starter) -> None:
    driver = start(4, 1)
    image = add(driver, 1, 2, 3, 4)
    driver.settle()
    assert places(image) == ["HOST"]


# ---- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "swap"])
def test_a_file_that_is_not_what_was_written_loses_the_copy(start: Starter, tmp_path: Path, damage: str) -> None:
    driver = start(0, 100)
    images = []
    for number in range(2):
        images.append(add(driver, number))
        driver.settle()
    file, other = sorted(tmp_path.glob("*/*"))
    content = file.read_bytes()
    if damage == "flip":
        file.write_bytes(content[:-7] + bytes([content[-7] ^ 1]) + content[-6:])
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "remove":
        file.unlink()
    else:
        file.write_bytes(other.read_bytes())
    fetch(driver, images[0])
    assert (places(*images), driver.counters.unreadable_files) == (["LOST", "DISK"], 1)
    fetch(driver, images[1])
    assert places(images[1]) == ["HOST"]


class Disk:
    """A disk that takes no file while `error` is set, or no more than so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self.max_files = 1000
        self._write = disk_store.write_image
        monkeypatch.setattr(disk_store, "write_image", self._write_if_it_can)

    def _write_if_it_can(self, path: Path, *args: Any) -> str:
        error = errno.ENOSPC if len(list(path.parent.iterdir())) >= self.max_files else self.error
        if error is not None:
            raise OSError(error, os.strerror(error), str(path))
        return self._write(path, *args)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def add_each(driver: StorageDriver, *pages: int) -> list[StoredImage]:
    """Adds copies of one page, one after the other."""
    images = []
    for page in pages:
        images.append(add(driver, page))
        driver.settle()
    return images


@pytest.mark.parametrize("host_pages", [0, 4])
@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO])
def test_a_disk_that_can_only_be_read_keeps_what_it_has(
    start: Starter, disk: Disk, host_pages: int, error: int
) -> None:
    """Each write that failed had removed the oldest file to make room for itself, until none was left."""
    driver = start(host_pages, 100)
    images = [image for image in add_each(driver, 0, 1, 2, 3, 4, 5) if image.place is Place.DISK]
    assert images
    disk.error = error
    add_each(driver, 6, 7, 8, 9)
    assert {image.place for image in images} == {Place.DISK}
    assert driver.counters.failed_writes == 1, "it is not tried again and again"
    for image in images:
        fetch(driver, image)
        assert image.place is Place.HOST


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_before_its_time_keeps_what_it_has(start: Starter, disk: Disk, error: int) -> None:
    """Somebody else filled it: copies stay in memory, and it is not tried again and again."""
    driver = start(4, 100)
    images = add_each(driver, 0, 1, 2, 3, 4, 5)
    assert places(*images) == ["DISK"] * 3 + ["HOST"] * 3
    disk.error = error
    images += add_each(driver, 6)
    assert driver.counters.failed_writes == 2, "as much as the first file took could have been free"
    images += add_each(driver, 7)
    assert driver.counters.failed_writes == 2
    assert places(*images) == ["LOST", "DISK", "DISK", "LOST"] + ["HOST"] * 4
    disk.error = None
    images += add_each(driver, 8)
    assert places(*images[4:]) == ["LOST"] + ["HOST"] * 4
    driver.clock.now_s += 61
    assert not driver.storage.has_room(PAGE), "after a while it is tried again"
    driver.settle()
    assert places(*images[4:]) == ["LOST", "DISK"] + ["HOST"] * 3


def test_where_others_fill_the_disk_the_files_written_longest_ago_make_room(start: Starter, disk: Disk) -> None:
    driver = start(0, 100)
    images = add_each(driver, 0, 1, 2)
    disk.max_files = 3
    images += add_each(driver, 3, 4, 5)
    assert places(*images) == ["LOST"] * 3 + ["DISK"] * 3
    assert driver.counters.failed_writes == 1


def test_a_file_that_could_not_be_written_and_nobody_needs_is_forgotten(start: Starter, tmp_path: Path) -> None:
    driver = start(0, 100)
    (directory,) = tmp_path.iterdir()
    assert driver.storage.disk is not None
    driver.storage.disk._directory.path = tmp_path / "gone"
    image = add(driver, 1)
    image.num_users = 0
    image.on_unused(image)
    driver.settle()
    assert (image.place, list(driver.storage)) == (Place.LOST, [])
    driver.storage.disk._directory.path = directory
