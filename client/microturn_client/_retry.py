"""When a client tries again, and how: the one rule for every call. Knows errors and delays; knows no session."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

from microturn_client._errors import (
    Expired,
    FailedPrecondition,
    InternalError,
    MicroturnError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)


@dataclass(frozen=True)
class Recovery:
    """How a session survives a stream that breaks and a server that restarts.

    Attributes:
        give_up_after_s: seconds without any answer after which the turns that wait fail.
        give_up_opening_s: the same for a session that no server has ever answered.
        first_delay_s: about the time before the first attempt; it doubles with each, up to ``max_delay_s``.
        max_delay_s: about the longest time between two attempts.
        ask_again_after_s: about the longest silence while a turn is out, before it is asked for again on a new stream:
            one may be dead, or an answer lost, without anybody saying so. It doubles with each time. A server that is
            only slow has the turn already, and goes on with it.
        max_transcript_bytes: how much of a session is kept here, to open it anew where no server has it any more: four
            bytes a token, the text as it was sent and answered, embeddings whole, 25 bytes a turn, four more for each
            token of an answer and 24 for each answer, also of what a window has evicted. One that has grown beyond
            that is not replayed, and its older half is forgotten.
    """

    give_up_after_s: float = 60.0
    give_up_opening_s: float = 2.0
    first_delay_s: float = 0.05
    max_delay_s: float = 2.0
    ask_again_after_s: float = 10.0
    max_transcript_bytes: int = 256 << 20


DEFAULT_RECOVERY = Recovery()


class Remedy(enum.Enum):
    """What is done about an error."""

    TELL = "whoever waits for the turn is told"
    RESUME = "the session is gone on with, on a new stream"
    REOPEN = "the session is opened anew and told all that it knew"


def remedy_for(error: MicroturnError, *, is_resuming: bool, num_faults: int = 0) -> Remedy:
    """What helps against an error that came instead of an answer.

    Args:
        error: what came.
        is_resuming: it answers the attempt to go on with the session after a loss.
        num_faults: how often the server has failed at this turn before.
    """
    if isinstance(error, Unavailable):
        return Remedy.RESUME
    if isinstance(error, InternalError):
        # Also where Triton has ended a sequence under a turn: its answer is empty then.
        return Remedy.TELL if num_faults else Remedy.RESUME
    if not is_resuming:
        # Triton forgets sequences that the server still has, so this may be said of a session that lives.
        return Remedy.RESUME if isinstance(error, NotFound | Expired) else Remedy.TELL
    if isinstance(error, ResourceExhausted):
        return Remedy.RESUME
    if isinstance(error, NotFound | Expired):
        return Remedy.REOPEN
    # A session that was saved and does not fit here, or is an older one; a turn that is refused names a position.
    is_of_the_turn = "position" in getattr(error, "details", {})
    return Remedy.REOPEN if isinstance(error, FailedPrecondition) and not is_of_the_turn else Remedy.TELL


class Backoff:
    """The delays between attempts: exponential, and random by half, so that clients do not come back all at once.

    Args:
        recovery: the settings.
        clock: seconds, monotonic.
        uniform: a random number in [0, 1).
    """

    def __init__(
        self, recovery: Recovery, clock: Callable[[], float], uniform: Callable[[], float] = random.random
    ) -> None:
        self._recovery = recovery
        self._clock = clock
        self._uniform = uniform
        self._num_failures = 0
        self._failing_since: float | None = None
        self._routes: set[str] = set()

    def next_attempt_at(self, retry_after_ms: int | None, route: str | None = None) -> float:
        """Notes a failure; returns when to try next, by the clock: at once on a route that was not tried since."""
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if route is not None and route not in self._routes:
            self._routes.add(route)
            return now
        settings = self._recovery
        delay_s = min(settings.max_delay_s, settings.first_delay_s * 2.0 ** min(self._num_failures, 30))
        self._num_failures += 1
        return now + max(delay_s * (0.5 + 0.5 * self._uniform()), (retry_after_ms or 0) / 1e3)

    def succeeded(self) -> None:
        """An answer came."""
        self._num_failures = 0
        self._failing_since = None
        self._routes.clear()

    def is_exhausted(self, patience_s: float) -> bool:
        """Whether attempts have failed for so long."""
        return self._failing_since is not None and self._clock() - self._failing_since >= patience_s


class Patience:
    """How long nothing may come while a turn is out. It doubles with each silence, since a server may only be slow.

    Attributes:
        seconds: that is, random by half like the delays of ``Backoff``.

    Args:
        recovery: the settings.
        uniform: a random number in [0, 1).
    """

    def __init__(self, recovery: Recovery, uniform: Callable[[], float] = random.random) -> None:
        self._first_s = recovery.ask_again_after_s
        self._uniform = uniform
        self.renew()

    def renew(self) -> None:
        """A turn has come to its end."""
        self.seconds = self._first_s * (1.0 + 0.5 * self._uniform())

    def was_in_vain(self) -> None:
        """Nothing came."""
        self.seconds *= 2.0
