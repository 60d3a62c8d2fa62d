"""Tests of snapshots.directory."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from microturn.errors import DeadlineExceeded, FailedPrecondition, InternalError, InvalidArgument, NotFound, Unavailable
from microturn.kv.table_state import TableState
from microturn.offload.copies import KVCopy
from microturn.sessions.turn import SessionId
from microturn.snapshots import purging
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.snapshot import Header
from microturn.snapshots.storage import OpenFile
from support.snapshot_directory import Now, snapshot_of
from support.snapshot_places import KINDS, Place
from support.tiers import make_kv


@pytest.fixture
def directory(place: Place, now: Now) -> SnapshotDirectory:
    return SnapshotDirectory(place.storage, ttl_s=60, now=now)


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "sessions").iterdir())


def test_it_is_made_for_its_owner_only(tmp_path: Path) -> None:
    SnapshotDirectory(tmp_path / "sessions", ttl_s=60)
    assert stat.S_IMODE((tmp_path / "sessions").stat().st_mode) == 0o700


def test_a_place_where_no_directory_can_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="snapshot_dir cannot be made"):
        SnapshotDirectory(tmp_path / "file" / "sessions", ttl_s=1)


@pytest.mark.parametrize("session_id", [5, "5", "../../etc/passwd", "a/b", "x" * 128, "\0\n", "ключ"])
def test_a_session_of_any_id_is_found_by_it(directory: SnapshotDirectory, place: Place, session_id: SessionId) -> None:
    directory.save(snapshot_of(session_id, directory))
    found = directory.find(session_id)
    assert found is not None
    assert found.header.session_id == session_id
    (name,) = place.names
    assert name.removesuffix(".snapshot").isalnum()


def test_an_integer_and_its_digits_are_different_ids(directory: SnapshotDirectory) -> None:
    directory.save(snapshot_of(5, directory))
    assert directory.find("5") is None
    assert directory.find(6) is None


def test_a_newer_copy_takes_the_place_of_an_older_one(directory: SnapshotDirectory, place: Place) -> None:
    directory.save(snapshot_of(5, directory, 1))
    directory.save(snapshot_of(5, directory, 2))
    found = directory.find(5)
    assert found is not None
    assert found.state == {"epoch": 2}
    assert len(place.names) == 1


def test_kv_is_added_to_what_is_saved(directory: SnapshotDirectory, place: Place) -> None:
    snapshot, kv = snapshot_of(5, directory), KVCopy(TableState(4, 8), make_kv(8).read([3, 4]))
    directory.save(snapshot)
    with pytest.raises(DeadlineExceeded):
        directory.add_kv(snapshot, kv, until_s=0)
    found = directory.find(5)
    assert found is not None
    assert found.kv is None
    assert directory.add_kv(snapshot, kv)
    found = directory.find(5)
    assert found is not None
    assert found.kv is not None
    whole = place.get(place.names[0])
    directory.claim(found)
    assert place.get(place.names[0]) == whole


def test_kv_is_not_added_to_what_somebody_has_taken_up(directory: SnapshotDirectory, place: Place) -> None:
    snapshot = snapshot_of(5, directory)
    directory.save(snapshot)
    directory.claim(snapshot)
    assert not directory.add_kv(snapshot, KVCopy(TableState(4, 8), make_kv(8).read([3, 4])))
    assert place.suffixes == [".claimed"]


def test_a_session_is_claimed_once(directory: SnapshotDirectory) -> None:
    directory.save(snapshot_of(5, directory))
    one, other = directory.find(5), directory.find(5)
    assert one is not None
    assert other is not None
    directory.claim(one)
    assert directory.find(5) is None
    with pytest.raises((NotFound, FailedPrecondition)):
        directory.claim(other)


def test_two_servers_that_share_a_directory_do_not_both_get_a_session(
    directory: SnapshotDirectory, place: Place, now: Now
) -> None:
    elsewhere = SnapshotDirectory(place.storage, ttl_s=60, now=now)
    directory.save(snapshot_of(5, directory))
    one, other = directory.find(5), elsewhere.find(5)
    assert one is not None
    assert other is not None
    (name,) = place.names
    place.raw.move(name, name.replace(".snapshot", ".taken"))  # the other one's claim, half done
    with pytest.raises(NotFound, match="restored elsewhere"):
        directory.claim(one)


def test_an_older_copy_that_is_put_back_is_refused(directory: SnapshotDirectory, place: Place) -> None:
    for epoch in (1, 2):
        directory.save(snapshot_of(5, directory, epoch))
        if epoch == 1:
            (name,) = place.names
            backup = place.get(name)
    newest = directory.find(5)
    assert newest is not None
    directory.claim(newest)
    place.put(name, backup)
    older = directory.find(5)
    assert older is not None
    assert older.header.epoch == 1
    with pytest.raises(FailedPrecondition, match="out of date"):
        directory.claim(older)
    directory.save(snapshot_of(5, directory, 3))
    newer = directory.find(5)
    assert newer is not None
    directory.claim(newer)


def test_a_damaged_file_is_an_error_once_and_is_put_aside(directory: SnapshotDirectory, place: Place) -> None:
    directory.save(snapshot_of(5, directory))
    (name,) = place.names
    place.put(name, place.get(name)[:-1])
    with pytest.raises(InternalError, match="its file is damaged"):
        directory.find(5)
    assert directory.find(5) is None
    assert place.suffixes == [".damaged"]


@pytest.mark.parametrize("place", KINDS[:2], indirect=True)
def test_a_file_that_cannot_be_read_now_is_left_alone(directory: SnapshotDirectory, tmp_path: Path) -> None:
    """As when the process has too many files open."""
    directory.save(snapshot_of(5, directory))
    (file,) = files(tmp_path)
    content = file.read_bytes()
    file.unlink()
    file.mkdir()
    with pytest.raises(Unavailable, match="cannot be read now: try again"):
        directory.find(5)
    file.rmdir()
    file.write_bytes(content)
    assert directory.find(5) is not None


def test_a_file_under_anothers_name_is_not_taken_for_it(directory: SnapshotDirectory, place: Place) -> None:
    directory.save(snapshot_of(5, directory))
    (name,) = place.names
    directory.save(snapshot_of(6, directory))
    (other,) = [one for one in place.names if one != name]
    place.put(other, place.get(name))
    with pytest.raises(InternalError):
        directory.find(6)


def test_what_has_expired_is_removed_and_nothing_else(directory: SnapshotDirectory, place: Place, now: Now) -> None:
    for session_id in (1, 2):
        directory.save(snapshot_of(session_id, directory))
    claimed = directory.find(2)
    assert claimed is not None
    directory.claim(claimed)
    place.put("notes.txt", b"not ours")
    directory.purge()
    assert len(place.names) == 3
    now.now_s += 30
    directory.save(replace(snapshot_of(3, directory)))
    now.now_s += 30
    kept = directory.find(1)
    assert kept is not None
    assert directory.is_expired(kept.header)
    directory.purge()
    assert directory.find(1) is None
    left = directory.find(3)
    assert left is not None
    assert not directory.is_expired(left.header)
    assert set(place.suffixes) == {".txt", ".snapshot"}


def test_what_a_killed_server_was_writing_goes_when_it_has_expired(
    directory: SnapshotDirectory, place: Place, now: Now
) -> None:
    directory.save(snapshot_of(1, directory))
    (name,) = place.names
    written = place.get(name)
    place.raw.remove(name)
    place.put(f".{name}.12ab34cd", written)
    directory.purge()
    assert len(place.names) == 1
    now.now_s += 61
    directory.purge()
    assert place.names == []


@pytest.mark.parametrize("place", KINDS[:2], indirect=True)
def test_one_file_that_cannot_be_read_keeps_no_other(directory: SnapshotDirectory, tmp_path: Path, now: Now) -> None:
    for session_id in range(4):
        directory.save(snapshot_of(session_id, directory))
    spoilt = files(tmp_path)[0]
    spoilt.unlink()
    spoilt.mkdir()
    now.now_s += 61
    directory.purge()
    assert files(tmp_path) == [spoilt]


def test_what_is_saved_anew_while_the_old_copy_is_purged_stays(
    directory: SnapshotDirectory, now: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.save(snapshot_of(1, directory))
    now.now_s += 61
    read_header = purging.read_header

    def read(file: OpenFile) -> Header:
        header = read_header(file)
        directory.save(snapshot_of(1, directory, epoch=2))
        return header

    monkeypatch.setattr(purging, "read_header", read)
    directory.purge()
    monkeypatch.undo()
    found = directory.find(1)
    assert found is not None
    assert found.header.epoch == 2
