"""The names of a session's files.

<digest of the id>.snapshot     can be restored
<digest of the id>.claimed      was restored: its header, with the epoch that a copy must exceed, and its KV until
                                that is read
<digest of the id>.damaged      could not be read; kept for inspection
<digest of the id>.kv/          the KV of a session that was saved while it goes on: see `kv_files`
"""

from __future__ import annotations

import hashlib
import json

from microturn.sessions.turn import SessionId

SUFFIXES = SAVED, CLAIMED, DAMAGED = ".snapshot", ".claimed", ".damaged"
KV = ".kv"


def name_of(session_id: SessionId, suffix: str) -> str:
    """The name of a session's file, or folder, with this suffix."""
    # As JSON, 5 and "5" are different ids; as a digest any id is a valid name, and the name does not tell it.
    return hashlib.blake2b(json.dumps(session_id).encode(), digest_size=16).hexdigest() + suffix


def kv_folder(name: str) -> str:
    """The folder beside a snapshot of this name."""
    return name.rpartition(".")[0] + KV
