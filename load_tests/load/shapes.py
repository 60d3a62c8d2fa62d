"""How many people there are over the time of a run. Knows no Locust: `shapefile.py` tells it."""

from __future__ import annotations

import math
from collections.abc import Callable

# Takes the seconds since the beginning, the most users and the seconds of the whole run; None when it is over.
Shape = Callable[[float, int, float], int | None]


def ramp(elapsed_s: float, most_users: int, run_s: float) -> int | None:
    """One more in each of as many equal steps as there may be users."""
    if elapsed_s >= run_s:
        return None
    return min(most_users, 1 + int(elapsed_s * most_users / run_s))


def soak(elapsed_s: float, most_users: int, run_s: float) -> int | None:
    """All for a long time; they come during the first twentieth of it and leave during the last."""
    if elapsed_s >= run_s:
        return None
    edge_s = run_s / 20
    share = min(1.0, elapsed_s / edge_s, (run_s - elapsed_s) / edge_s)
    return max(1, math.ceil(share * most_users))


def spike(elapsed_s: float, most_users: int, run_s: float) -> int | None:
    """A quarter of them, and all of them at once for a tenth of the run, twice."""
    if elapsed_s >= run_s:
        return None
    at = elapsed_s / run_s
    is_spike = 0.3 <= at < 0.4 or 0.6 <= at < 0.7
    return most_users if is_spike else max(1, most_users // 4)


SHAPES: dict[str, Shape] = {"ramp": ramp, "soak": soak, "spike": spike}
