"""Tests of disk_store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from microturn.kv.image import KVImage
from microturn.kv.stored import StoredImage
from microturn.kv.table_state import TableState
from microturn.offload.disk_store import DiskStore
from microturn.offload.file_thread import Outcome, Priority
from microturn.offload.image_file import DamagedFile
from support.tiers import MODEL, Posts, contents_of, make_kv, wait_for_files

KV = make_kv(16)


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def store(tmp_path: Path, posts: Posts) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path, 10_000, MODEL, KV.new_image, posts.post)
    yield store
    store.close()
    assert list(tmp_path.iterdir()) == []


def image(*pages: int) -> StoredImage:
    copy = KV.read(pages)
    return StoredImage(TableState(4, 4 * len(pages)), copy.num_bytes, lambda _: None, copy)


def write(store: DiskStore, posts: Posts, stored: StoredImage) -> Exception | None:
    told: list[Exception | None] = []
    store.write(stored, told.append)
    wait_for_files(store.threads)
    assert told == [], "the engine's thread is told, not the file thread"
    posts.take()
    return told[0]


def read(store: DiskStore, posts: Posts, stored: StoredImage) -> Outcome[KVImage]:
    told: list[Outcome[KVImage]] = []
    store.threads.submit(store.reader(stored), told.append, Priority.AHEAD)
    wait_for_files(store.threads)
    posts.take()
    return told[0]


def files(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("*/*"))


def test_what_is_written_is_read_and_removed(store: DiskStore, posts: Posts, tmp_path: Path) -> None:
    stored = image(3, 1, 2)
    assert write(store, posts, stored) is None
    assert (len(files(tmp_path)), store.used_bytes) == (1, stored.num_bytes)
    outcome = read(store, posts, stored)
    assert outcome.error is None
    assert outcome.value is not None
    assert stored.pages is not None
    assert contents_of(outcome.value) == contents_of(stored.pages)
    store.remove(stored)
    wait_for_files(store.threads)
    assert (files(tmp_path), store.used_bytes, list(store)) == ([], 0, [])


def test_the_one_written_first_is_named_first(store: DiskStore, posts: Posts) -> None:
    images = [image(1), image(2, 3), image(4)]
    for stored in images:
        write(store, posts, stored)
    assert list(store) == images
    store.check_integrity()


def test_what_cannot_be_written_is_told_and_takes_no_room(store: DiskStore, posts: Posts) -> None:
    shutil.rmtree(store._directory.path)
    assert isinstance(write(store, posts, image(1)), FileNotFoundError)
    assert (len(store), store.used_bytes) == (0, 0)


def test_a_damaged_file_is_told(store: DiskStore, posts: Posts, tmp_path: Path) -> None:
    stored = image(1, 2)
    write(store, posts, stored)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    outcome = read(store, posts, stored)
    assert outcome.value is None
    assert isinstance(outcome.error, DamagedFile)


def test_without_a_bound_the_files_take_half_of_what_is_free(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    store = DiskStore(tmp_path, 0, MODEL, KV.new_image, Posts().post)
    assert store.capacity_bytes == pytest.approx(free / 2, rel=0.2)
    store.close()
