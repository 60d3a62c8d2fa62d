"""What a session does about a turn that the server refuses: it waits for room, sends it again, or tells its reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microturn_client._errors import (
    Expired,
    FailedPrecondition,
    MicroturnError,
    NotFound,
    ResourceExhausted,
    SessionClosed,
)
from microturn_client._lifecycle import CLOSED_BEFORE, SessionState
from microturn_client._pending_turn import PendingTurn

if TYPE_CHECKING:
    from microturn_client._session_core import SessionCore


def refused(core: SessionCore, turn: PendingTurn, request_id: str, error: MicroturnError) -> None:
    """The server has answered a turn with an error."""
    if core.survival is not None and core.survival.is_remedied(core, turn, request_id, error):
        return
    core.outbox.is_answered(request_id)
    expected = error.details.get("turn") if isinstance(error, FailedPrecondition) else None
    if turn.number is not None and expected is None and _must_wait_for_room(core, turn, error):
        expected = turn.number
    is_sent_again = (
        expected is not None and turn.number is not None and (expected < turn.number or turn.refusal is error)
    )
    if is_sent_again and core.lifecycle.end is not None:
        error = SessionClosed(CLOSED_BEFORE)  # END is before it now
    elif is_sent_again and expected is not None:
        # The server has not taken it: there is nothing that an interrupt could undo.
        core.outbox.left_gap(turn, expected)
        turn.release()
        if turn.is_cut:
            core.cuts.is_unsent()
        return
    turn.fail(error)
    turn.release()
    core.outbox.is_void(turn)
    if turn.is_cut:
        core.cuts.is_refused()
    if turn is core.lifecycle.end:
        core.lifecycle.state = SessionState.CLOSED
    elif turn is core.lifecycle.opener:
        if core.survival is not None and core.lifecycle.state is SessionState.RESUMING:
            core.lifecycle.has_opened()
            core.survival.lives(core)
        else:
            core.lifecycle.opener = None
            core.lifecycle.state = SessionState.NEW
    elif isinstance(error, NotFound | Expired) and core.lifecycle.state is SessionState.OPEN:
        core.lifecycle.has_gone(error)
        for waiting in core.outbox.give_up_unsent():
            waiting.fail(error)


def _must_wait_for_room(core: SessionCore, turn: PendingTurn, error: MicroturnError) -> bool:
    """Whether a numbered turn was refused since others of its session wait: it is sent again later."""
    if not isinstance(error, ResourceExhausted) or error.retry_after_ms is None:
        return False
    if core.lifecycle.state is not SessionState.OPEN or turn.is_end or turn.is_passing or not core.outbox.has_sent_any:
        return False
    turn.refusal = error
    core.outbox.retry_at = core.clock() + error.retry_after_ms / 1e3
    return True
