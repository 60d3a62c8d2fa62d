"""Whose a session is: its tenant, and the key that its START set, kept as a salted hash only; and which
sessions may share a prefix, and so learn from `cached_tokens` what another one began with.

Sessions are saved to files; a key is learnt from them by trying keys only, so keys should be random.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Protocol, Self

from microturn.errors import PermissionDenied
from microturn.sessions.turn import TurnRequest


@dataclass(frozen=True, slots=True)
class KeyHash:
    """A key that can be recognised and not read. No key is a key that no request can bring.

    Attributes:
        salt: 16 random bytes, so that equal keys do not look equal.
        digest: BLAKE2b of the key with this salt, 32 bytes.
    """

    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, key: str | None) -> Self:
        """The hash of a key, or of none."""
        salt = secrets.token_bytes(hashlib.blake2b.SALT_SIZE)
        return cls(salt, _digest(key, salt))

    def matches(self, given: str | None) -> bool:
        """Whether this is the key; takes as long for any wrong one."""
        return hmac.compare_digest(_digest(given, self.salt), self.digest)


class Owned(Protocol):
    """A session, or a saved one."""

    @property
    def key(self) -> KeyHash: ...

    @property
    def tenant(self) -> str | None: ...


def is_owner(owned: Owned, request: TurnRequest) -> bool:
    """Whether a request comes from the tenant and brings the key."""
    return owns(owned, request.options.get("session_key"), request.options.get("tenant"))


def owns(owned: Owned, key: str | None, tenant: str | None) -> bool:
    """Whether a client with this key, of this tenant, is the owner."""
    return tenant == owned.tenant and owned.key.matches(key)


def check_owner(owned: Owned, request: TurnRequest) -> None:
    """Checks that a request may speak for a session.

    Raises:
        PermissionDenied: it may not. The message says nothing about the session.
    """
    if not is_owner(owned, request):
        raise PermissionDenied("the session belongs to somebody else: bring the session_key that its START set")


def sharing_salt(tenant: str | None, cache_salt: str) -> str:
    """What prefixes are hashed with: 32 hex digits, equal where tenant and salt are equal each.

    A hash, not the text: page keys are hashes as well, and no text that a client chooses may be one.
    """
    return hashlib.blake2b(json.dumps([tenant, cache_salt]).encode(), digest_size=16).hexdigest()


def _digest(key: str | None, salt: bytes) -> bytes:
    # Half a surrogate pair can stand in JSON, and not in UTF-8.
    said = b"" if key is None else b"=" + key.encode(errors="surrogatepass")
    return hashlib.blake2b(said, salt=salt, digest_size=32).digest()
