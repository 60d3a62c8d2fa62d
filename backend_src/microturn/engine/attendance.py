"""Turns that nobody hears: a numbered one is paused, so that nothing is generated for a program that is gone.

A paused turn keeps its place and what it has generated. Its session is parked: it gives way to others, and expires.
"""

from __future__ import annotations

from microturn.engine.answers import AFTERMATH
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable


def attend(session: Session, running: dict[Session, None], sessions: SessionTable, now_s: float) -> None:
    """Pauses a session whose turns nobody hears any more, and goes on with a paused one that somebody hears again.

    Args:
        session: one that lives.
        running: the sessions whose turns are computed; changed.
        sessions: those that live.
        now_s: by the engine's clock.
    """
    turn = session.running
    if turn is None or session.held_as is not None or _is_unheard(session) == turn.is_paused:
        return
    turn.is_paused = not turn.is_paused
    if turn.is_paused:
        session.last_activity_s = now_s
        running.pop(session, None)
        with AFTERMATH:
            sessions.park(session)
    else:
        running[session] = None
        sessions.unpark(session)
        sessions.accounts.charge(session, turn.num_passes_left)


def _is_unheard(session: Session) -> bool:
    """Whether it generates for nobody: the clients of its turns have gone, and it does not close."""
    turn = session.running
    if turn is None or not turn.generates or session.is_closing or turn.request.end:
        return False
    return not any(open_turn.sinks for open_turn in session.open_turns)
