"""The storage of snapshots that settings name."""

from __future__ import annotations

from pathlib import Path

from microturn.errors import InvalidArgument
from microturn.settings import S3_SCHEME, Settings, read_secret
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.encrypted_file import Secret
from microturn.snapshots.encrypted_storage import EncryptedStorage
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.storage import Storage


def open_snapshots(settings: Settings) -> SnapshotDirectory | None:
    """The directory of snapshots; None if there is none.

    Raises:
        InvalidArgument: it cannot be used, or its secret cannot be read.
    """
    secret = read_secret("snapshot_key_file", settings.snapshot_key_file)
    if not settings.snapshot_dir:
        if secret:
            raise InvalidArgument("setting 'snapshot_key_file' needs a snapshot_dir (--snapshot-dir)")
        return None
    place = settings.snapshot_dir
    storage = _open_s3(place) if place.startswith(S3_SCHEME) else FileStorage.made(Path(place))
    if secret:
        storage = EncryptedStorage(storage, Secret(secret))
    return SnapshotDirectory(storage, ttl_s=settings.snapshot_ttl_s)


def _open_s3(url: str) -> Storage:
    try:
        from microturn.snapshots.s3_storage import S3Storage  # what only the extra has
    except ImportError as error:
        raise InvalidArgument(f"snapshot_dir {url} needs the extra 'microturn[s3]': {error}") from error
    return S3Storage.at(url)
