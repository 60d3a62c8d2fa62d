"""What an interrupt does to the turns that wait: their inputs are appended, and nobody answers them."""

from __future__ import annotations

from microturn.engine.answers import to_client_error
from microturn.errors import MicroturnError
from microturn.sessions.accounts import Accounts
from microturn.sessions.intake import append_input
from microturn.sessions.session import Session
from microturn.sessions.turn import Turn


def append_queued(session: Session, accounts: Accounts) -> dict[Turn, MicroturnError | None]:
    """Appends the inputs of the turns that wait, without generating; says of each why it was refused, or None."""
    outcomes: dict[Turn, MicroturnError | None] = {}
    for turn in session.queued:
        outcomes[turn] = None
        try:
            append_input(session, turn, max_tokens=0, accounts=accounts)
        except Exception as error:
            outcomes[turn] = to_client_error(error)
    return outcomes
