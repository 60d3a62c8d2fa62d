"""Tests of snapshots.directory: claims, and secrets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from microturn.errors import FailedPrecondition, InternalError, NotFound
from microturn.kv.table_state import TableState
from microturn.offload.copies import KVCopy
from microturn.snapshots.directory import SnapshotDirectory, TakenUp
from microturn.snapshots.snapshot import Snapshot
from support.snapshot_directory import Now, snapshot_of
from support.snapshot_places import KINDS, SECRET, Place
from support.tiers import make_kv


@pytest.fixture
def directory(place: Place, now: Now) -> SnapshotDirectory:
    return SnapshotDirectory(place.storage, ttl_s=60, now=now)


def test_of_many_servers_that_claim_at_once_one_gets_it(directory: SnapshotDirectory, place: Place, now: Now) -> None:
    for epoch in range(1, 6):
        directory.save(snapshot_of(5, directory, epoch))
        found = directory.find(5)
        assert found is not None
        servers = [SnapshotDirectory(place.storage, ttl_s=60, now=now) for _ in range(8)]
        together = threading.Barrier(len(servers))

        def claim(server: SnapshotDirectory, snapshot: Snapshot = found, together: threading.Barrier = together) -> int:
            together.wait()
            try:
                server.claim(snapshot)
            except (NotFound, FailedPrecondition):
                return 0
            return 1

        with ThreadPoolExecutor(len(servers)) as threads:
            assert sum(threads.map(claim, servers)) == 1
        assert directory.find(5) is None


def test_a_claim_is_undone_unless_there_is_a_newer_copy(directory: SnapshotDirectory) -> None:
    directory.save(snapshot_of(5, directory, 1))
    directory.claim(snapshot_of(5, directory, 1))
    directory.put_back(5)
    directory.claim(snapshot_of(5, directory, 1))
    directory.save(snapshot_of(5, directory, 2))
    directory.put_back(5)
    found = directory.find(5)
    assert found is not None
    assert found.header.epoch == 2


def test_a_claim_expires_with_its_server(directory: SnapshotDirectory, place: Place, now: Now) -> None:
    """A server that dies between a claim and the first turn has the session; what is left goes when it has expired."""
    directory.save(snapshot_of(5, directory))
    directory.claim(snapshot_of(5, directory))
    assert directory.find(5) is None
    directory.purge()
    assert place.suffixes == [".claimed"]
    now.now_s += 61
    directory.purge()
    assert place.names == []
    directory.save(snapshot_of(5, directory))
    assert directory.find(5) is not None


@pytest.mark.parametrize("has_kv", [False, True])
def test_a_claimed_file_keeps_its_header_alone(directory: SnapshotDirectory, place: Place, has_kv: bool) -> None:
    snapshot = snapshot_of(5, directory, 3)
    directory.save(snapshot, KVCopy(TableState(4, 8), make_kv(8).read([3, 4])) if has_kv else None)
    size = len(place.get(place.names[0]))
    directory.claim(snapshot).drop_content()
    assert place.suffixes == [".claimed"]
    assert len(place.get(place.names[0])) < size
    with pytest.raises(TakenUp):
        directory.save(snapshot)
    directory.save(replace(snapshot, base_epoch=3))
    with pytest.raises(FailedPrecondition, match="out of date"):
        directory.claim(snapshot)


def test_what_was_claimed_again_keeps_its_content(directory: SnapshotDirectory, place: Place) -> None:
    directory.save(snapshot_of(5, directory, 1))
    older = directory.claim(snapshot_of(5, directory, 1))
    directory.save(snapshot_of(5, directory, 2))
    directory.claim(snapshot_of(5, directory, 2))
    whole = place.get(place.names[0])
    older.drop_content()
    assert place.get(place.names[0]) == whole


@pytest.mark.parametrize(("writes", "reads"), [(SECRET, None), (None, SECRET), (SECRET, "another letters!")])
def test_what_does_not_decrypt_is_as_if_it_were_damaged(
    place: Place, now: Now, writes: str | None, reads: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = (SnapshotDirectory(place.with_secret(text), ttl_s=60, now=now) for text in (writes, reads))
    one.save(snapshot_of(5, one))
    assert one.find(5) is not None
    with pytest.raises(InternalError, match="its file is damaged"):
        other.find(5)
    reason = "name the file" if reads is None else "not encrypted" if writes is None else "another secret"
    assert reason in caplog.text
    assert (other.find(5), one.find(5)) == (None, None)
    assert place.suffixes == [".damaged"]


@pytest.mark.parametrize("place", [kind for kind in KINDS if kind.startswith("encrypted")], indirect=True)
def test_nothing_of_a_session_can_be_read_without_the_secret(directory: SnapshotDirectory, place: Place) -> None:
    snapshot = replace(snapshot_of("their name", directory), state={"said": "a secret of theirs"})
    directory.save_next(snapshot, KVCopy(TableState(4, 8), make_kv(8).read([3, 4])), None, is_wanted=lambda: True)
    (folder, name) = place.names
    for file in (f"{folder}/1", name):
        content = place.get(file)
        assert not any(text in content for text in (b"their", b"secret", b"epoch", b"__metadata__", b"kv."))
