"""Tests of snapshots.claimed_kv."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from microturn.kv.table_state import TableState
from microturn.offload.copies import KVCopy
from microturn.sessions.ownership import KeyHash
from microturn.snapshots.claimed_kv import ClaimedFile, ClaimedKV
from microturn.snapshots.file import read_header, read_snapshot, write_snapshot
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.snapshot import Header, Snapshot
from support.tiers import contents_of, make_kv

KV = make_kv(8)
SNAPSHOT = Snapshot(Header(1, 1, "", 4e9, KeyHash.of(None), None), {}, {})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.claimed"
    write_snapshot(path, SNAPSHOT, KVCopy(TableState(4, 8), KV.read([3, 4])))
    return path


def kv_in(path: Path) -> ClaimedKV:
    part = read_snapshot(path).kv
    assert part is not None
    return ClaimedKV(ClaimedFile(FileStorage(path.parent), path.name), part)


def test_it_is_read_and_then_dropped(path: Path) -> None:
    kv = kv_in(path)
    assert kv.state == TableState(4, 8)
    pages = KV.new_image(2)
    kv.read(pages)
    assert contents_of(pages) == contents_of(KV.read([3, 4]))
    kv.drop()
    assert path.stat().st_size == 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("rb") as file:
        assert read_header(file) == SNAPSHOT.header
    kv.drop()


def test_what_has_taken_its_files_name_is_left_alone(path: Path) -> None:
    """The session was saved again, and another server has claimed it: the file of that name is that one's."""
    kv = kv_in(path)
    write_snapshot(path, SNAPSHOT, KVCopy(TableState(4, 12), KV.read([5, 6, 7])))
    kv.drop()
    pages = KV.new_image(3)
    kv_in(path).read(pages)
    assert contents_of(pages) == contents_of(KV.read([5, 6, 7]))


def test_what_cannot_be_dropped_is_logged(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = kv_in(path)
    path.unlink()
    with caplog.at_level(logging.WARNING):
        kv.drop()
    assert "keeps its content until it expires" in caplog.text
