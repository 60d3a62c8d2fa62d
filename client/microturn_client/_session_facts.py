"""What a program may ask of a session without any turn: the same for ``Session`` and ``AsyncSession``."""

from __future__ import annotations

from microturn_client._events import Resumed
from microturn_client._opening import token_of
from microturn_client._session_core import SessionCore
from microturn_client._wire import SessionId


class SessionFacts:
    """What is known here of one session."""

    def __init__(self, core: SessionCore) -> None:
        self._core = core

    @property
    def id(self) -> SessionId:
        """The session's id on the server."""
        return self._core.id

    @property
    def context_len(self) -> int:
        """Absolute length of the context in tokens, as of the last turn that ended."""
        return self._core.context_len

    @property
    def seed(self) -> int | None:
        """The seed that sampling uses; None before the server has told it."""
        return self._core.seed

    @property
    def resumed(self) -> tuple[Resumed, ...]:
        """What befell the session and was survived, the oldest first; the last hundred."""
        return tuple(self._core.news.past)

    @property
    def token(self) -> str:
        """The session as one text, by which a client's ``attach`` takes it up again, in another process too.

        It holds the session's key: who has it may use the session.
        """
        return token_of(self._core.requests)
