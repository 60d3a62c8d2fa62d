"""All metrics of an engine; `docs/metrics.md` describes each in full. Only the engine thread changes them."""

from __future__ import annotations

from collections.abc import Iterator

from microturn.errors import MicroturnError
from microturn.telemetry.families import Counter, Family, Gauge, Histogram, Sample


def _spaced(low: float, high: float, num_steps: int) -> list[float]:
    """Bounds with equal ratios, with three digits, without the first."""
    return [float(f"{low * (high / low) ** (step / num_steps):.3g}") for step in range(1, num_steps + 1)]


def _fine_decade(low: float) -> list[float]:
    """Bounds from `low` to ten times `low` in steps below 10 %, including its double and its fivefold."""
    return [*_spaced(low, 2 * low, 8), *_spaced(2 * low, 5 * low, 10), *_spaced(5 * low, 10 * low, 8)]


# A beat is 200 ms: it is a bound, and the bounds around it are close.
SECONDS = [
    *(0.001, 0.002, 0.005, 0.01),
    *_fine_decade(0.01),
    *_fine_decade(0.1),
    *(1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0),
]
_ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256]
_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]

FINISH_REASONS = ("length", "stop", "complete", "append", "interrupted", "cancelled", "deadline", "closed")
CODES = tuple(error.code for error in MicroturnError.__subclasses__())
_TIERS = ("device", "host", "disk")


class Metrics:
    """All metric families."""

    def __init__(self) -> None:
        self.draining = Gauge("microturn_draining", "1 while the server hands its sessions over because it stops.")

        self.sessions = Gauge(
            "microturn_sessions",
            "Living sessions by what they do and where their KV is.",
            state=("running", "parked", "closing"),
            kv=("device", "host", "disk", "tokens"),
        )
        self.sessions_limit = Gauge("microturn_sessions_limit", "Living sessions that there may be.")
        self.sequence_slots = Gauge(
            "microturn_sequence_slots",
            "Slots of Triton's sequence batcher in use, by the model's own count.",
            state=("session", "ended", "ending"),
        )
        self.sequence_slots_limit = Gauge("microturn_sequence_slots_limit", "Slots that there are.")
        self.sessions_opened = Counter(
            "microturn_sessions_opened_total", "Sessions that began to live here.", origin=("new", "fork", "resumed")
        )
        self.sessions_ended = Counter(
            "microturn_sessions_ended_total",
            "Sessions that ended.",
            reason=("closed", "replaced", "moved", "expired", "stopped", "failed"),
        )
        self.reaper_lag = Gauge(
            "microturn_reaper_lag_seconds",
            "By how much the longest silent session is past its idle time and still here.",
        )

        self.turns_open = Gauge("microturn_turns_open", "Turns that are not answered yet.", state=("running", "queued"))
        self.turns = Counter("microturn_turns_total", "Turns that ended well.", finish_reason=FINISH_REASONS)
        self.turn_errors = Counter("microturn_turn_errors_total", "Turns that ended with an error.", code=CODES)
        self.repetitions = Counter(
            "microturn_turn_repetitions_total", "Turns that came again and were answered without being done twice."
        )
        self.turns_withheld = Counter(
            "microturn_turns_withheld_total", "Turns that ended without a response: their client asked for too many."
        )
        self.deadlines = Counter(
            "microturn_turn_deadlines_total", "Turns with a deadline, by whether it was met.", outcome=("met", "missed")
        )
        self.turn_seconds = Histogram(
            "microturn_turn_seconds", "A turn that ended well, from its arrival to its end.", SECONDS
        )
        self.turn_phase_seconds = Histogram(
            "microturn_turn_phase_seconds",
            "Where the time of turns went.",
            SECONDS,
            phase=("queue", "restore", "prefill", "decode"),
        )
        self.first_token_seconds = Histogram(
            "microturn_turn_first_token_seconds", "From a turn's arrival to its first token.", SECONDS
        )
        self.output_token_seconds = Histogram(
            "microturn_turn_output_token_seconds", "From one token of a turn to the next, in the turn's mean.", SECONDS
        )
        self.turn_tokens = Counter(
            "microturn_turn_tokens_total",
            "Usage of the turns that ended well.",
            kind=("input", "output", "computed", "cached", "drafted", "accepted"),
        )
        self.rewinds = Counter("microturn_rewinds_total", "Turns that cut the context back.")
        self.rewound_tokens = Counter("microturn_rewound_tokens_total", "Tokens that turns cut off the context.")
        self.prefix_tokens = Counter(
            "microturn_prefix_tokens_total",
            "Tokens of first turns that might share a prefix, by whether their KV was there.",
            result=("hit", "miss"),
        )

        self.step_seconds = Histogram("microturn_step_seconds", "A forward pass with its sampling.", SECONDS)
        self.step_rows = Histogram("microturn_step_rows", "Sessions that had a part in a forward pass.", _ROWS)
        self.step_tokens = Histogram("microturn_step_tokens", "Tokens that a forward pass computed.", _TOKENS)
        self.step_failures = Counter("microturn_step_failures_total", "Forward passes that raised.")
        self.stalled_steps = Counter(
            "microturn_stalled_steps_total", "Steps that computed nothing though turns had tokens to compute."
        )

        self.pages = Gauge("microturn_pages", "Pages of the KV pool.", use=("free", "running", "parked", "prefix"))
        self.kv_bytes = Gauge("microturn_kv_bytes", "Bytes of KV.", tier=_TIERS)
        self.kv_capacity_bytes = Gauge(
            "microturn_kv_capacity_bytes", "Bytes of KV that there is room for.", tier=_TIERS
        )
        self.kv_evictions = Counter(
            "microturn_kv_evictions_total",
            "KV that left a tier for the next, or was given up.",
            to=("host", "disk", "tokens"),
        )
        self.kv_restores = Counter(
            "microturn_kv_restores_total",
            "KV that came back into the pool, for a turn or ahead of it.",
            source=("host", "disk", "tokens"),
            ahead=("true", "false"),
        )
        self.kv_preemptions = Counter(
            "microturn_kv_preemptions_total", "Sessions that lost their pages in the middle of a turn."
        )
        self.kv_rebuilds = Counter(
            "microturn_kv_rebuilds_total", "Turns that found KV lost and the inputs before the window forgotten."
        )
        self.input_bytes = Gauge("microturn_input_bytes", "Bytes of ids and embeddings that sessions keep.")
        self.kv_file_errors = Counter(
            "microturn_kv_file_errors_total",
            "Files of KV that could not be used or written.",
            operation=("read", "write"),
        )
        self.telemetry_dropped = Counter(
            "microturn_telemetry_dropped_total",
            "Log lines and spans dropped by a full queue.",
            kind=("log", "span"),
        )
        # The last, since they are published one after another: all other numbers are as new as this one, or newer.
        self.heartbeat = Gauge("microturn_heartbeat_timestamp_seconds", "When the engine last gave its figures.")

    def __iter__(self) -> Iterator[Family]:
        return iter(vars(self).values())

    def samples(self) -> dict[Sample, float]:
        """All numbers of all families."""
        return {sample: value for family in self for sample, value in family.samples().items()}
