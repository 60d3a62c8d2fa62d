"""Whether there is room for one more session."""

from __future__ import annotations

from microturn.errors import ResourceExhausted
from microturn.session_table import SessionTable
from microturn.settings import Settings


def check_room(settings: Settings, sessions: SessionTable, tenant: str | None) -> None:
    """Checks that a session more may be here.

    Args:
        settings: the limits.
        sessions: those that live.
        tenant: whose it would be.

    Raises:
        ResourceExhausted: it may not.
    """
    if sessions.num_places >= settings.max_sessions:
        raise ResourceExhausted(
            f"{settings.max_sessions} sessions are open: close one or try again", retry_after_ms=1000
        )
    if tenant is not None and sessions.num_of_tenant(tenant) >= settings.max_sessions_per_tenant:
        raise ResourceExhausted(
            f"{settings.max_sessions_per_tenant} sessions of this tenant are open: close one or try again",
            retry_after_ms=1000,
        )
