"""Removes the files of snapshots that have expired: what is in them is plain text until then."""

from __future__ import annotations

import logging
from pathlib import PurePath

from microturn.offload.image_file import DamagedFile
from microturn.snapshots.file import read_header
from microturn.snapshots.names import KV, SUFFIXES
from microturn.snapshots.storage import Listed, Storage

log = logging.getLogger(__name__)


def purge(storage: Storage, *, ttl_s: float, now_s: float) -> None:
    """Removes expired files, including partly written ones.

    Args:
        storage: has snapshots.
        ttl_s: how long one can be restored.
        now_s: the time, in seconds since 1970.

    Raises:
        OSError: the storage cannot be read.
    """
    for listed in storage.files():
        suffix = PurePath(listed.name).suffix
        is_unfinished = listed.name.startswith(".") and any(f"{one}." in listed.name for one in SUFFIXES)
        try:
            # No snapshot can be restored to whose KV nothing was added for so long.
            if suffix == KV and listed.written_s + 2 * ttl_s <= now_s:
                storage.keep_only(listed.name)
            elif suffix in SUFFIXES or is_unfinished:
                _purge_snapshot(storage, listed, listed.written_s + ttl_s, now_s)
        except FileNotFoundError:
            continue  # another server was faster
        except OSError as error:
            log.error("cannot check whether %s has expired: %s", storage.place_of(listed.name), error)


def _purge_snapshot(storage: Storage, listed: Listed, expires_s: float, now_s: float) -> None:
    """Removes a snapshot if it has expired; `expires_s` is of one that does not say when."""
    file_id = storage.id_of(listed.name)
    try:
        with storage.open(listed.name) as file:
            expires_s = read_header(file).expires_s
    except DamagedFile:
        pass
    # Meanwhile the session may have been saved again under the same name.
    if file_id is not None and expires_s <= now_s:
        storage.remove(listed.name, file_id)
