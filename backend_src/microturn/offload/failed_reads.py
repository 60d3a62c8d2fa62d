"""Copies whose file could not be read for the moment: when they are tried again, and when they are given up.

    read ── OSError ──▶ pause ──▶ read again ──▶ … ──▶ given up, when a turn waits and its patience is over

A bucket that refuses one request, or a network disk that is away for a moment, says nothing about the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from microturn.kv.stored import StoredImage

_PAUSE_S = 0.5

# Seconds since the first failure after which a turn waits no longer: KV that can be computed again from all tokens, and
# KV whose session has forgotten some.
_PATIENCE_S = 5.0
_LONG_PATIENCE_S = 60.0

# A copy that nobody has tried to read for so long has failed for the first time when it fails again.
_FORGET_S = 60.0


@dataclass(frozen=True)
class _Failure:
    """When the first of the failures was, and when the copy is tried again."""

    first_s: float
    again_s: float


class FailedReads:
    """The copies, and since when each has failed.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: WeakKeyDictionary[StoredImage, _Failure] = WeakKeyDictionary()

    @staticmethod
    def may_pass(error: Exception | None) -> bool:
        """Whether what failed with an error may succeed later: it is neither damaged nor missing."""
        return isinstance(error, OSError) and not isinstance(error, FileNotFoundError)

    @property
    def next_s(self) -> float | None:
        """When the next copy may be tried again. Those that may already wait for a turn, or for memory."""
        now_s = self._clock()
        times_s = (failure.again_s for failure in self._failures.values())
        return min((again_s for again_s in times_s if again_s > now_s), default=None)

    def note(self, image: StoredImage) -> bool:
        """Notes a failure; returns whether it is the first one."""
        now_s, before = self._clock(), self._failures.get(image)
        first_s = now_s if before is None or now_s > before.again_s + _FORGET_S else before.first_s
        self._failures[image] = _Failure(first_s, now_s + _PAUSE_S)
        return first_s == now_s

    def forget(self, image: StoredImage) -> None:
        """Notes that a copy was read, or is lost."""
        self._failures.pop(image, None)

    def rests(self, image: StoredImage) -> bool:
        """Whether a copy failed a moment ago, and is not tried again yet."""
        failure = self._failures.get(image)
        return failure is not None and self._clock() < failure.again_s

    def is_over(self, image: StoredImage, *, can_be_recomputed: bool) -> bool:
        """Whether a turn that waits for a copy which rests has waited long enough."""
        patience_s = _PATIENCE_S if can_be_recomputed else _LONG_PATIENCE_S
        return self._clock() >= self._failures[image].first_s + patience_s
