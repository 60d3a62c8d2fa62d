"""Do Locust, the client and the server tell the same story? Each leaves something out of a turn's latency.

* The *client* has it from when a turn was due (`turn`) and from when it was sent (`turn_sent`). Between the two is
  `held_up`: the wait for the turn before, and for this program.
* *Locust* is told the first of these and rounds it: to 1 ms below 100 ms, then to two digits. Of an even number of
  turns its median is the upper one of the two in the middle, ours the lower one; of few that can be far apart.
* *server, status* is what the status of the same turns says. It leaves out what is around the engine: network, Triton,
  adapter, client, and on a busy machine the wait of each of these for a core. So it is held against `turn_sent`.
* *server, /metrics* is the server's histogram, of every turn that ended well, openings included. It leaves out the
  same, and is held against what the client measured of the same turns from sending them, `every_sent`.

What is around the engine is measured turn by turn. With its median added, p50 and p99 should be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load_tests.load.histogram import Histogram
from load_tests.load.record import Scene
from load_tests.load.server_metrics import Buckets

TOLERANCE = 0.1


@dataclass(frozen=True)
class Row:
    """One source beside the client's own measurement.

    Attributes:
        source: whose numbers these are.
        num: turns.
        p50_ms: as it says.
        p99_ms: as it says.
        left_out_ms: median of what it leaves out.
        client_p50_ms: what the client measured of the same turns.
        client_p99_ms: likewise.
    """

    source: str
    num: int
    p50_ms: float
    p99_ms: float
    left_out_ms: float
    client_p50_ms: float
    client_p99_ms: float

    @property
    def deviation(self) -> float:
        """The larger of both percentiles' deviations from the client's, with what is left out added, as a share."""
        pairs = ((self.p50_ms, self.client_p50_ms), (self.p99_ms, self.client_p99_ms))
        return max(abs(ms + self.left_out_ms - client_ms) / client_ms for ms, client_ms in pairs)

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(self).items()}
        return {**rounded, "deviation": round(self.deviation, 4), "agrees": self.deviation <= TOLERANCE}


def compare(seen: Scene, locust_ms: tuple[int, float, float], server: Buckets | None) -> Sequence[Row]:
    """Holds all sources against the client; none where no turn was answered.

    Args:
        seen: by the client, of all scenarios.
        locust_ms: number, p50 and p99 of Locust's turns.
        server: its histogram of turns in seconds, where it was asked.
    """
    times = seen.times
    if not times["turn_sent"].num:
        return []
    around_ms = times["around"].percentile(50)
    on_server = times["turn_server"]
    rows = [
        Row("Locust", *locust_ms, 0.0, *_by_locust(times["turn"])),
        Row("server, status", on_server.num, *_p50_and_p99(on_server), around_ms, *_p50_and_p99(times["turn_sent"])),
    ]
    if server is not None and server.num:
        p50_ms, p99_ms = (1e3 * server.percentile(percent) for percent in (50, 99))
        every = _p50_and_p99(times["every_sent"])
        rows.append(Row("server, /metrics", server.num, p50_ms, p99_ms, around_ms, *every))
    return rows


def _by_locust(histogram: Histogram) -> tuple[float, float]:
    """p50 and p99 of the ranks that Locust takes."""
    return histogram.at_rank(histogram.num // 2 + 1), histogram.at_rank(histogram.num * 99 // 100 + 1)


def _p50_and_p99(histogram: Histogram) -> tuple[float, float]:
    return histogram.percentile(50), histogram.percentile(99)
