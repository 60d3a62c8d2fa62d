"""A run as a mapping for its JSON file: what was seen, whether that is enough, and by the second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from load_tests.load.agreement import Row
from load_tests.load.histogram import Histogram
from load_tests.load.record import Record, Scene
from load_tests.load.thresholds import Thresholds

if TYPE_CHECKING:  # Locust replaces threads and sockets as it is imported
    from locust import User

_PERCENTILES = (50, 90, 99, 99.9)


def report(
    record: Record, thresholds: Thresholds, missed: Sequence[str], rows: Sequence[Row], server: Mapping[str, float]
) -> dict[str, Any]:
    """All that a run has to say.

    Args:
        record: of all workers.
        thresholds: that it had.
        missed: which of them it missed, in words.
        rows: how its sources agree.
        server: the server's own counts over the run.
    """
    return {
        "passed": not missed,
        "missed": list(missed),
        "thresholds": asdict(thresholds),
        "total": summary(record.total),
        "scenarios": {name: summary(scene) for name, scene in sorted(record.scenes.items())},
        "agreement": [row.as_json() for row in rows],
        "server": dict(server),
        "by_users": by_users(record),
        "seconds": [{"second": second, **asdict(of)} for second, of in sorted(record.seconds.items())],
    }


def summary(scene: Scene) -> dict[str, Any]:
    """What the people of a scenario saw, in numbers."""
    counts = scene.counts
    return {
        "counts": dict(sorted(counts.items())),
        "errors": dict(scene.errors),
        "on_time_share": round(counts["on_time"] / counts["due"], 5) if counts["due"] else None,
        "stall_ms": round(scene.times["stall"].total_ms, 1),
        "late_turn_ms": {part: round(ms / counts["late"], 2) for part, ms in scene.late_ms.items()},
        "ms": {name: _times(histogram) for name, histogram in sorted(scene.times.items()) if histogram.num},
    }


def by_users(record: Record) -> dict[str, dict[str, float]]:
    """For each number of people who were there together: turns that were due, and the share of them on time."""
    due: Counter[int] = Counter()
    on_time: Counter[int] = Counter()
    for second in record.seconds.values():
        due[second.num_users] += second.num_due
        on_time[second.num_users] += second.num_on_time
    return {
        str(num): {"due": due[num], "on_time": round(on_time[num] / due[num], 4)} for num in sorted(due) if due[num]
    }


def _times(histogram: Histogram) -> dict[str, float]:
    percentiles = {f"p{percent:g}": round(histogram.percentile(percent), 2) for percent in _PERCENTILES}
    return {"num": histogram.num, "mean": round(histogram.mean, 2), **percentiles, "max": round(histogram.max_ms, 2)}


def mix_line(people: Sequence[type[User]]) -> str:
    """Who comes, and in what shares."""
    whole = sum(one.weight for one in people)
    shares = (f"{one.__name__} {one.weight / whole:.0%}" for one in sorted(people, key=lambda one: -one.weight))
    return f"people: {', '.join(shares)}"


def progress_line(record: Record, num_users: int) -> str:
    """The state of a run, on a line."""
    total = record.total
    turn, counts = total.times["turn"], total.counts
    on_time = f"{counts['on_time'] / counts['due']:.1%} on time, " if counts["due"] else ""
    return (
        f"{num_users} users, {turn.num} turns, {on_time}"
        f"p50 {turn.percentile(50):.0f} ms, p99 {turn.percentile(99):.0f} ms, {sum(total.errors.values())} errors"
    )
