"""How often, and after which delays, a failing server is restarted."""

from __future__ import annotations

# The first restart is immediate, since sessions wait. Repeated failures are retried more slowly.
_DELAYS_S = (0.0, 0.5, 1.0, 2.0)
_CALM_S = 30.0


class RestartBudget:
    """Bounds the restarts of a server that fails shortly after each start."""

    def __init__(self) -> None:
        self._num_quick_failures = 0

    @property
    def num_quick_failures(self) -> int:
        """Consecutive failures, each before the server was ready or within 30 s after that."""
        return self._num_quick_failures

    def next_delay_s(self, ready_for_s: float) -> float | None:
        """Counts a failure.

        Args:
            ready_for_s: how long the server had been ready; 0 when it never was.

        Returns:
            How long to wait before the next start, or None when there should be none.
        """
        if ready_for_s > _CALM_S:
            self._num_quick_failures = 0
        self._num_quick_failures += 1
        if self._num_quick_failures > len(_DELAYS_S):
            return None
        return _DELAYS_S[self._num_quick_failures - 1]
