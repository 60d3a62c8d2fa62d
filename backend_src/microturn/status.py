"""How a turn ended, as its client is told."""

from __future__ import annotations

from microturn.session import Session
from microturn.turn import Status, Turn


def status_of(session: Session, turn: Turn, finish_reason: str, now_s: float, context_len: int | None = None) -> Status:
    """The status of a turn that ends now.

    Args:
        session: the turn's.
        turn: one that ran or waited.
        finish_reason: see the wire contract.
        now_s: by the engine's clock.
        context_len: what the turn left of the context; None is all that is there now.
    """
    context_len = len(session.context) if context_len is None else context_len
    arrived_s = turn.request.arrived_s
    begun_s = turn.begun_s or now_s
    first_token_s = now_s if turn.first_token_s is None else turn.first_token_s
    return Status(
        finish_reason=finish_reason,
        stop_reason=turn.stop_reason,
        turn=turn.number,
        context_len=context_len,
        kept_len=context_len - (0 if session.window is None else session.window.evicted(context_len)),
        usage={
            "input_tokens": turn.num_input,
            "output_tokens": turn.num_output,
            "computed_tokens": turn.num_computed,
            "cached_tokens": turn.num_cached,
        },
        timing_ms={
            "queue": (begun_s - arrived_s) * 1e3,
            "restore": turn.restore_s * 1e3,
            "prefill": (first_token_s - begun_s - turn.restore_s) * 1e3,
            "decode": (now_s - first_token_s) * 1e3,
            "total": (now_s - arrived_s) * 1e3,
        },
        expires_in_s=session.idle_timeout_s,
        seed=session.seed if turn.options.seed is None else turn.options.seed,
        rebuilt=session.is_rebuilt,
    )
