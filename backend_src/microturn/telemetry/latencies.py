"""What a turn's client waited for, in seconds."""

from __future__ import annotations

from typing import NamedTuple

from microturn.sessions.turn import Status, Turn


class Latencies(NamedTuple):
    """Of a turn that ended well; None where it generated too little.

    Attributes:
        total_s: from its arrival to its end.
        first_token_s: from its arrival to its first token.
        output_token_s: from one token to the next, in the mean of all behind the first.
    """

    total_s: float
    first_token_s: float | None
    output_token_s: float | None


def latencies_of(turn: Turn, status: Status) -> Latencies | None:
    """Those of a turn with its status; None of one that did nothing here, counted only, or was cancelled."""
    if status.finish_reason == "cancelled" or turn.options.count_only or not (turn.num_input or turn.num_output):
        return None
    total_s, decode_s = status.timing_ms["total"] / 1e3, status.timing_ms["decode"] / 1e3
    if turn.first_token_s is None:
        return Latencies(total_s, None, None)
    num_later = turn.num_output - 1
    first_token_s = turn.first_token_s - turn.request.arrived_s
    return Latencies(total_s, first_token_s, decode_s / num_later if num_later > 0 else None)
