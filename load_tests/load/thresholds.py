"""What a run must reach; what it missed makes its exit code."""

from __future__ import annotations

from dataclasses import dataclass

from load_tests.load.record import Scene


@dataclass(frozen=True)
class Thresholds:
    """The limits.

    Attributes:
        min_on_time: smallest share of turns that meet their deadline, among all that had one.
        max_errors: largest share of turns and openings that fail.
        max_p99_ms: longest p99 of the turn latency; 0 for any.
    """

    min_on_time: float = 0.99
    max_errors: float = 0.0
    max_p99_ms: float = 0.0

    def missed(self, seen: Scene) -> list[str]:
        """What a run missed, in words; nothing when it passed."""
        num_turns, num_errors = seen.counts["turns"], sum(seen.errors.values())
        if not num_turns:
            return [f"no turn was answered ({num_errors} errors)"]
        missed = []
        due, on_time = seen.counts["due"], seen.counts["on_time"]
        if due and on_time < self.min_on_time * due:
            missed.append(f"{on_time / due:.2%} of {due} turns were on time, less than {self.min_on_time:.2%}")
        tried = num_turns + seen.counts["opened"] + num_errors
        if num_errors > self.max_errors * tried:
            codes = ", ".join(f"{num} {code}" for code, num in seen.errors.most_common())
            missed.append(
                f"{num_errors / tried:.2%} of {tried} requests failed, more than {self.max_errors:.2%}: {codes}"
            )
        p99_ms = seen.times["turn"].percentile(99)
        if self.max_p99_ms and p99_ms > self.max_p99_ms:
            missed.append(f"the p99 of turns was {p99_ms:.0f} ms, more than {self.max_p99_ms:.0f} ms")
        return missed
