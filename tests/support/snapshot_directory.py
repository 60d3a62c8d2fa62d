"""What a `SnapshotDirectory` is tested with: its clock, and snapshots of nothing but an id and an epoch."""

from __future__ import annotations

from microturn.sessions.ownership import KeyHash
from microturn.sessions.turn import SessionId
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.snapshot import Header, Snapshot


class Now:
    """Seconds since 1970, as a test says."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


def snapshot_of(session_id: SessionId, directory: SnapshotDirectory, epoch: int = 1) -> Snapshot:
    """Of a session that came with the epoch before."""
    header = Header(session_id, epoch, "", directory.expires_s, KeyHash.of(None), None)
    return Snapshot(header, {"epoch": epoch}, {}, base_epoch=epoch - 1)
