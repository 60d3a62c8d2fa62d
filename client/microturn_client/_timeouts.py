"""How long is waited: for the turns of a session, for its end, and between its keep-alives."""

from __future__ import annotations

import math
from typing import NamedTuple

# Seconds of silence that a turn's user waits through, and a closing session for the server's answer, unless told.
DEFAULT_TIMEOUT_S = 60.0
DEFAULT_CLOSE_TIMEOUT_S = 5.0

# Such a part of the idle time passes between two keep-alives: two may be lost before the session is.
KEEPALIVE_SHARE = 1 / 3


def call_timeout(timeout_s: float) -> float | None:
    """Seconds as gRPC wants them for a call: for ever is None, and infinity a time that has passed."""
    return None if timeout_s == math.inf else timeout_s


class Timeouts(NamedTuple):
    """How long the turns of a session may take: seconds without any message, and seconds in all."""

    silence_s: float
    total_s: float = math.inf

    def with_said(self, silence_s: float | None, total_s: float | None) -> Timeouts:
        """These, but for what is said of one turn."""
        return Timeouts(
            self.silence_s if silence_s is None else silence_s, self.total_s if total_s is None else total_s
        )
