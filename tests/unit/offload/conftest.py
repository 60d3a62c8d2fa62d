"""Fixtures of the tests of tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.storages import KV, PAGE, Starter
from support.tiers import StorageDriver


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts storages whose bytes are told in pages; with `disk_pages` they have files."""
    started = []

    def start(host_pages: float, disk_pages: int | None = None, max_image_pages: int = 4) -> StorageDriver:
        sizes: dict[str, Any] = {"kv": KV, "max_image_bytes": max_image_pages * PAGE}
        disk = {} if disk_pages is None else {"disk_dir": tmp_path, "disk_bytes": disk_pages * PAGE}
        started.append(StorageDriver(int(host_pages * PAGE), **disk, **sizes))
        return started[-1]

    yield start
    for driver in started:
        driver.storage.close()
    assert list(tmp_path.iterdir()) == []
