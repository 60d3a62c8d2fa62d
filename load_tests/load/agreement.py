"""Do Locust, the client and the server tell the same story? Each leaves something out of a turn's latency:

* *client, from due* is the whole of it: from when a turn was due to its end.
* *Locust* is told the same numbers and rounds them: to 1 ms below 100 ms, then to two digits. Turns that were given up
  count with what they had waited, here as in the client's p50 and p99 beside it.
* *client, from sent* leaves out the time before a turn was sent: it waits for the one before, or for this program.
* *server, status* is what the status of the same turns says. It leaves out also what is around the engine: network,
  Triton, adapter, client, and on a busy machine the wait of each of these for a core.
* *server, /metrics* is the server's histogram, of every turn that ended well, openings included. It is held against
  what the client measured of the same turns from sending them, and leaves out what is around the engine.

What is left out is measured turn by turn. Its median is added, and then p50 and p99 should be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
    sent, on_server = times["turn_sent"], times["turn_server"]
    if not sent.num:
        return []
    with_given_up, whole, every = (
        (times[name].percentile(50), times[name].percentile(99)) for name in ("turn", "turn_answered", "every_sent")
    )
    held_up_ms, around_ms = times["held_up"].percentile(50), times["around"].percentile(50)
    rows = [
        Row("Locust", *locust_ms, 0.0, *with_given_up),
        Row("client, from sent", sent.num, sent.percentile(50), sent.percentile(99), held_up_ms, *whole),
        Row(
            "server, status",
            on_server.num,
            on_server.percentile(50),
            on_server.percentile(99),
            held_up_ms + around_ms,
            *whole,
        ),
    ]
    if server is not None and server.num:
        p50_ms, p99_ms = (1e3 * server.percentile(percent) for percent in (50, 99))
        rows.append(Row("server, /metrics", server.num, p50_ms, p99_ms, around_ms, *every))
    return rows
