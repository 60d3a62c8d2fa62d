"""Secrets for browsers: short-lived, and worth no more than realtime sessions.

A browser cannot set headers of a WebSocket, and must not hold the gateway's token. Its program's server fetches a
secret with the token and hands it on. Only digests are kept, so that what is in memory opens nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from microturn_gateway.client_events import UpdateSession

PREFIX = "ek_"
_MAX_NUM_SECRETS = 4096


@dataclass(frozen=True)
class ClientSecret:
    """A secret as it is handed out, once.

    Attributes:
        expires_at_s: seconds since the epoch; sessions that were opened before may go on.
    """

    value: str
    expires_at_s: float


class ClientSecrets:
    """The secrets that are valid, at most 4,096 of them: the oldest goes first.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, UpdateSession]] = OrderedDict()

    def create(self, lifetime_s: float, session: UpdateSession) -> ClientSecret:
        """Makes a secret.

        Args:
            lifetime_s: seconds in which sessions can be opened with it, more than one.
            session: how they begin.
        """
        value = PREFIX + secrets.token_urlsafe(32)
        expires_at_s = self._clock() + lifetime_s
        self._known[_digest(value)] = (expires_at_s, session)
        if len(self._known) > _MAX_NUM_SECRETS:
            self._known.popitem(last=False)
        return ClientSecret(value, expires_at_s)

    def session(self, value: str) -> UpdateSession | None:
        """How a session begins that is opened with this secret; None where it is not valid (any more)."""
        digest = _digest(value)
        expires_at_s, session = self._known.get(digest, (0.0, None))
        if session is not None and self._clock() >= expires_at_s:
            del self._known[digest]
            return None
        return session


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode()).digest()
