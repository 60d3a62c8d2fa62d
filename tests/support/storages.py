"""Storages whose bytes are told in pages, and what their tests do with them."""

from __future__ import annotations

from collections.abc import Callable

from microturn.kv.stored import StoredImage
from microturn.kv.table_state import TableState
from support.tiers import StorageDriver, make_kv

KV = make_kv(16)
PAGE = KV.bytes_per_page

# Starts one: see the fixture `start`.
Starter = Callable[..., StorageDriver]


def add(driver: StorageDriver, *pages: int) -> StoredImage:
    """Adds a copy for which there must be room."""
    copy = KV.read(pages)
    assert driver.storage.has_room(KV.image_bytes(len(pages)))
    image = driver.storage.add(copy, TableState(4, 4 * len(pages)))
    driver.storage.check_integrity()
    return image


def fetch(driver: StorageDriver, image: StoredImage, *, is_urgent: bool = True) -> None:
    """Has a copy in memory."""
    driver.storage.begin_step()
    if not driver.storage.fetch(image, is_urgent=is_urgent):
        driver.settle()
        assert driver.storage.fetch(image, is_urgent=is_urgent)


def pass_steps(driver: StorageDriver) -> None:
    for _ in range(3):
        driver.storage.begin_step()


def places(*images: StoredImage) -> list[str]:
    return [image.place.name for image in images]
