"""Fixtures of the tests of snapshots: where they are, and the servers before a restart and after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from microturn.snapshots.directory import SnapshotDirectory
from support.fake_runner import FakeDriver
from support.s3_server import S3Server, s3_with_bucket
from support.snapshot_directory import Now
from support.snapshot_places import KINDS, Place, make_place
from support.snapshots import Restart


@pytest.fixture(scope="session")
def serving_s3() -> Iterator[S3Server]:
    with s3_with_bucket() as server:
        yield server


@pytest.fixture
def s3(serving_s3: S3Server) -> Iterator[S3Server]:
    """A server that speaks S3; boto3's environment names it."""
    serving_s3.requests.clear()
    yield serving_s3
    serving_s3.trouble = None


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of storage, empty."""
    if request.param.endswith("s3"):
        request.getfixturevalue("s3")
    return make_place(request.param, tmp_path / "sessions")


@pytest.fixture
def now() -> Now:
    return Now()


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
