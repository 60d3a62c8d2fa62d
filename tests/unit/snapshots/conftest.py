"""Fixtures of the tests of snapshots: a directory, and the server before a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import FakeDriver


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory(tmp_path, ttl_s=60)


@pytest.fixture
def before() -> FakeDriver:
    """The server that saves."""
    return FakeDriver(max_context=256)
