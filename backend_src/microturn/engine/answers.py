"""How a turn is answered at its end: its status, what its session keeps of it, and errors as clients see them."""

from __future__ import annotations

import logging
from dataclasses import replace

from microturn.errors import InternalError, MicroturnError, Unavailable
from microturn.sessions.session import Session
from microturn.sessions.turn import Status, Turn, TurnOutput

log = logging.getLogger(__name__)


def answer_end(
    session: Session,
    turn: Turn,
    reason: str,
    output: TurnOutput,
    now_s: float,
    context_len: int | None = None,
) -> None:
    """Answers a turn with its last output and its status, and keeps the answer for a repetition.

    Args:
        session: the turn's.
        turn: one that ran or waited.
        reason: the `finish_reason` of the wire contract.
        output: its last tokens and text.
        now_s: by the engine's clock.
        context_len: what the turn left of the context; None is all that is there now.
    """
    session.last_activity_s = now_s
    appended_ids = tuple(turn.appended_ids) if turn.options.return_appended_ids else None
    status = _status_of(session, turn, reason, now_s, context_len)
    if turn.request.opens:
        status = replace(status, model_fingerprint=turn.model_fingerprint)
    session.is_rebuilt = False
    with AFTERMATH:
        turn.put(output._replace(status=status, appended_ids=appended_ids), now_s)
    if turn.is_numbered:
        with AFTERMATH:
            session.results.record(turn)


def answer_cancelled(session: Session, turn: Turn, now_s: float) -> None:
    """Answers a turn of which nothing stays, as its client asked for."""
    if turn.checkpoint is None:  # it never ran
        turn.number = session.num_turns
    turn.put(TurnOutput(status=_status_of(session, turn, "cancelled", now_s)), now_s)


def _status_of(session: Session, turn: Turn, reason: str, now_s: float, context_len: int | None = None) -> Status:
    context_len = len(session.context) if context_len is None else context_len
    arrived_s = turn.request.arrived_s
    begun_s = turn.begun_s or now_s
    first_token_s = now_s if turn.first_token_s is None else turn.first_token_s
    return Status(
        finish_reason=reason,
        stop_reason=turn.stop_reason,
        turn=turn.number,
        context_len=context_len,
        kept_len=context_len - (0 if session.window is None else session.window.evicted(context_len)),
        usage=_usage_of(turn),
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


def _usage_of(turn: Turn) -> dict[str, int]:
    usage = {
        "input_tokens": turn.num_input,
        "output_tokens": turn.num_output,
        "computed_tokens": turn.num_computed,
        "cached_tokens": turn.num_cached,
    }
    if turn.options.speculate != "off":
        usage |= {"drafted_tokens": turn.num_drafted, "accepted_tokens": turn.num_accepted}
    return usage


class Aftermath:
    """Logs the faults of what follows an answer: neither the client nor the engine sees them."""

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("a fault behind the end of a turn; the turn has been answered", exc_info=error)
        return True


AFTERMATH = Aftermath()


def abandoned() -> Unavailable:
    """What a sink ends with whose client has gone, while the turn keeps its place."""
    return Unavailable("the client of this answer has gone: send the turn again, and it goes on")


def to_client_error(error: Exception) -> MicroturnError:
    """An error as its client sees it; one that is a fault of the server is logged."""
    if isinstance(error, MicroturnError):
        return error
    log.error("a turn failed", exc_info=error)
    return InternalError(f"nothing was appended, because of a fault of the server: {error}")
