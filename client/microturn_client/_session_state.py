"""The states that a session can be in for its client, and the times that hold for all of them."""

from __future__ import annotations

import enum

# Seconds that a turn's user waits for its end, and a closing session for the server's answer, unless told.
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_CLOSE_TIMEOUT_S = 5.0

# Such a part of the idle time passes between two keep-alives: two may be lost before the session is.
KEEPALIVE_SHARE = 1 / 3


class SessionState(enum.Enum):
    """``SessionCore`` and ``Survival`` draw how they follow on each other."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    BROKEN = "broken"
    RESUMING = "resuming"
    REPLAYING = "replaying"
    GONE = "gone"
    LOST = "lost"
    CLOSED = "closed"
