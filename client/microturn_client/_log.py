"""What the client logs, as ``logging.getLogger("microturn_client")``: failures, by session. No words, ids or secrets.

INFO tells what was survived unchanged, WARNING what was not, DEBUG each further attempt. What a server says of a turn
may quote it, so of an error the code alone is told, and of a stream that ended gRPC's reason.
"""

from __future__ import annotations

import logging

from microturn_client._errors import ConnectionLost, MicroturnError
from microturn_client._wire import SessionId

_LOGGER = logging.getLogger("microturn_client")
_LOGGER.addHandler(logging.NullHandler())  # a program that configures no logging sees nothing


def no_stream(session_id: SessionId, error: MicroturnError, *, is_first: bool) -> None:
    """The session has no stream, and another one will be tried."""
    _LOGGER.log(logging.INFO if is_first else logging.DEBUG, "session %r: no stream (%s)", session_id, _told(error))


def goes_on(session_id: SessionId, *, is_same: bool, reason: str) -> None:
    """A failure was survived."""
    if is_same:
        _LOGGER.info("session %r goes on: %s", session_id, reason)
    else:
        _LOGGER.warning("session %r goes on otherwise: %s", session_id, reason)


def is_lost(session_id: SessionId, error: MicroturnError) -> None:
    """The session takes no more turns."""
    _LOGGER.warning("session %r is lost (%s)", session_id, _told(error))


def _told(error: MicroturnError) -> str:
    return f"{error.code}: {error}" if isinstance(error, ConnectionLost) else error.code
