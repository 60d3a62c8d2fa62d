"""Secrets for browsers: short-lived, and worth no more than realtime sessions.

A browser cannot set headers of a WebSocket, and must not hold the gateway's token. Its program's server fetches a
secret with the token and hands it on. A secret is signed, not remembered: it holds its expiry and how its sessions
begin, so every replica with the same key takes it, and none can take it back before it expires.

    ek_ base64url( HMAC-SHA256 (32 bytes) | expiry, seconds since the epoch (8 bytes) | session as JSON, compressed )
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from microturn_gateway.client_events import UpdateSession, parse_session
from microturn_gateway.failures import Refusal

PREFIX = "ek_"
_EXPIRY = struct.Struct(">Q")
_DIGEST_LEN = hashlib.sha256().digest_size
_MAX_LEN = 6144  # it must fit one header line of a handshake, which has 8,192 bytes
_SALT = b"microturn client secrets 1"  # another number for another layout


def signing_key(source: str | None) -> bytes:
    """The key that a text stands for; None draws one, which dies with the process.

    A secret lets its holder try sources offline. That is why it takes long to derive the key.
    """
    if source is None:
        return secrets.token_bytes(_DIGEST_LEN)
    return hashlib.scrypt(source.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=_DIGEST_LEN)


@dataclass(frozen=True)
class ClientSecret:
    """A secret as it is handed out.

    Attributes:
        expires_at_s: seconds since the epoch; sessions that were opened before may go on.
    """

    value: str
    expires_at_s: int


class ClientSecrets:
    """Makes secrets and reads them.

    Args:
        key: that signs them, the same in all replicas.
        clock: seconds since the epoch.
    """

    def __init__(self, key: bytes, clock: Callable[[], float]) -> None:
        self._key = key
        self._clock = clock

    def create(self, lifetime_s: float, session: Mapping[str, Any]) -> ClientSecret:
        """Makes a secret.

        Args:
            lifetime_s: seconds in which sessions can be opened with it, more than one.
            session: how they begin, as the client wrote it.

        Raises:
            Refusal: the session is too long.
        """
        expires_at_s = int(self._clock() + lifetime_s)
        begins = json.dumps(session, separators=(",", ":")).encode()
        value = self._signed(_EXPIRY.pack(expires_at_s) + zlib.compress(begins))
        if len(value) > _MAX_LEN:
            message = "'session' is too long for a client secret: send the rest of it as 'session.update'"
            raise Refusal("too_large", message, param="session", http_status=413)
        return ClientSecret(value, expires_at_s)

    def session(self, value: str) -> UpdateSession | None:
        """How a session begins that is opened with this secret; None where it is not valid (any more)."""
        try:
            payload = base64.urlsafe_b64decode(value.removeprefix(PREFIX).encode() + b"===")[_DIGEST_LEN:]
        except binascii.Error:
            return None
        # Compared as it is written, so that one secret has one spelling.
        if not hmac.compare_digest(self._signed(payload).encode(), value.encode()):
            return None
        (expires_at_s,) = _EXPIRY.unpack_from(payload)
        if self._clock() >= expires_at_s:
            return None
        session = parse_session(json.loads(zlib.decompress(payload[_EXPIRY.size :])))
        return None if session.refused else session  # a replica of another version may know less

    def _signed(self, payload: bytes) -> str:
        digest = hmac.digest(self._key, payload, "sha256")
        # Without padding: it is no character of a subprotocol's name.
        return PREFIX + base64.urlsafe_b64encode(digest + payload).decode().rstrip("=")
