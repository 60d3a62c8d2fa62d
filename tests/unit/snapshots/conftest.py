"""Fixtures of the tests of snapshots: a directory, and the servers before a restart and after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import FakeDriver
from support.snapshots import Restart


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory(tmp_path, ttl_s=60)


@pytest.fixture
def before() -> FakeDriver:
    """The server that saves."""
    return FakeDriver(max_context=256)


@pytest.fixture
def restart(directory: SnapshotDirectory) -> Iterator[Restart]:
    """Starts a server on what was saved, with settings of its own."""
    started = []

    def start(**values: Any) -> FakeDriver:
        started.append(FakeDriver(**{"max_context": 256, **values}, snapshots=directory))
        return started[-1]

    yield start
    for driver in started:
        driver.engine.stop()


@pytest.fixture
def after(restart: Restart) -> FakeDriver:
    """The server that is started next."""
    return restart()
