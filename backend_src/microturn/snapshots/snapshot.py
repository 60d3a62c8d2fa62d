"""A saved session: its header and its content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from microturn.sessions.ownership import KeyHash
from microturn.sessions.turn import SessionId
from microturn.snapshots.kv_part import KVPart


@dataclass(frozen=True)
class Header:
    """The header of a snapshot.

    Attributes:
        session_id: of the session.
        epoch: the copy of a session with the higher epoch is newer; see `sessions.environment.next_epoch`.
        model_fingerprint: of the model.
        expires_s: when it expires, in seconds since 1970.
        key: that a client needs to resume it.
        tenant: that the client must belong to.
    """

    session_id: SessionId
    epoch: int
    model_fingerprint: str
    expires_s: float
    key: KeyHash
    tenant: str | None

    def as_json(self) -> dict[str, Any]:
        """The header as `json.dumps` takes it."""
        key = {"salt": self.key.salt.hex(), "digest": self.key.digest.hex()}
        return {**vars(self), "key": key}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Self:
        """Reads a header that `as_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: it is not one.
        """
        key = {name: bytes.fromhex(digits) for name, digits in written["key"].items()}
        return cls(**{**written, "key": KeyHash(**key)})


@dataclass(frozen=True)
class Snapshot:
    """A saved session.

    Attributes:
        header: readable without the content.
        state: all of the session but arrays of numbers, as `json.dumps` takes it.
        tensors: its arrays of numbers by name; see `session_state`.
        kv: where its KV is in the file, if the snapshot was read and has KV.
        format_version: to write: the lowest one that can hold its content.
        base_epoch: to write: the session's when it came to this server.
    """

    header: Header
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    kv: KVPart | None = None
    format_version: int = 1
    base_epoch: int = 0
