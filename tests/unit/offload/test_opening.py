"""Tests of opening."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from microturn.errors import InvalidArgument
from microturn.offload.opening import open_storage
from microturn.offload.storage import Storage
from microturn.settings import Settings
from support.tiers import Posts, make_kv

KV = make_kv(8)


def opened(**settings: object) -> Storage:
    return open_storage(
        Settings(**settings),  # type: ignore[arg-type]
        KV,
        max_image_pages=6,
        model_fingerprint="a model",
        clock=time.monotonic,
        post=Posts().post,
    )


def test_there_are_no_tiers_unless_they_are_asked_for() -> None:
    storage = opened()
    assert not storage.is_there
    assert storage.disk is None


def test_host_memory_is_as_large_as_it_is_set() -> None:
    assert opened(host_tier_bytes=12345).host.capacity_bytes == 12345


def test_a_disk_alone_has_memory_for_one_copy_on_its_way(tmp_path: Path) -> None:
    storage = opened(disk_tier_dir=str(tmp_path / "kv"), disk_tier_bytes=1000)
    assert storage.host.capacity_bytes == 6 * KV.bytes_per_page
    assert storage.disk is not None
    assert storage.disk.capacity_bytes == 1000
    assert len(list((tmp_path / "kv").iterdir())) == 1
    storage.close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=r"setting 'disk_tier_dir' cannot be used: .*file"):
        opened(disk_tier_dir=str(tmp_path / "file" / "kv"))
