"""A saved session: what can be known of it without its content, and the content."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from microturn.ownership import KeyHash
from microturn.snapshots.kv_part import KVPart
from microturn.turn import SessionId


@dataclass(frozen=True)
class Header:
    """What is written openly in a snapshot.

    Attributes:
        session_id: whose it is.
        epoch: of two copies of a session the higher is the newer one; see `next_epoch`.
        model_fingerprint: of the model that its tokens are of.
        expires_s: when it may no longer be taken up, in seconds since 1970.
        key: what who takes it up must bring.
        tenant: and on whose behalf.
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
        """A header that `as_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: it did not.
        """
        key = {name: bytes.fromhex(digits) for name, digits in written["key"].items()}
        return cls(**{**written, "key": KeyHash(**key)})


@dataclass(frozen=True)
class Snapshot:
    """A saved session.

    Attributes:
        header: what is written openly.
        state: all of the session that is not numbers in rows, as `json.dumps` takes it.
        tensors: its numbers by name; see `session_state`.
        kv: of one that was read, where its KV stands in the file; None when it has none.
        format_version: of one that is to be written: the least that says all that it holds.
    """

    header: Header
    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    kv: KVPart | None = None
    format_version: int = 1


def next_epoch(epoch: int = 0) -> int:
    """An epoch above another and above all that were given before: the milliseconds since 1970.

    So a session that is opened under the id of an earlier one has a higher epoch than any copy of that one.
    """
    return max(epoch + 1, time.time_ns() // 1_000_000)
