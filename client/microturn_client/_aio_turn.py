"""One turn, for asyncio: ``AsyncTurn``, the iterator over its events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from microturn_client._errors import MicroturnError
from microturn_client._events import Answer, Event, Resumed, Status, Tokens, TurnEnd, answer_of
from microturn_client._pending_turn import PendingTurn
from microturn_client._tool_events import ToolArguments, ToolCall, ToolCallBegun, ToolEvent

if TYPE_CHECKING:
    from microturn_client._aio_turns import AsyncTurns


class AsyncTurn(AsyncIterator[Event]):
    """The events of one turn as they come: any number of :class:`Tokens`, then one :class:`TurnEnd`.

    In a session with tools the answer's calls come between them: for each a :class:`ToolCallBegun`, its
    :class:`ToolArguments`, and a :class:`ToolCall`.

    The turn is on its way already. Where a failure befell the session and was survived, a :class:`Resumed` says so.
    Leave the turn at any time: the answer is cut behind the last token that was handed out, and the next turn goes on
    from there. Leaving an ``async with`` block, :meth:`close`, and an exception in the task that waits for an event
    leave it at once; a ``break`` does so when the program holds the turn no more.
    """

    def __init__(self, session: AsyncTurns, pending: PendingTurn) -> None:
        self._session = session
        self._pending = pending
        self._missed: deque[Resumed] | None = None

    async def __anext__(self) -> Event:
        """Waits for the next event.

        Raises:
            MicroturnError: when the turn failed; :class:`TurnTimeout` when nothing came for its ``timeout_s``, or it
                did not end within its ``total_timeout_s``.
        """
        if self._missed is None:
            self._missed = self._session._core.news.take_unread()
        if self._missed and not self._pending.is_left:
            return self._missed.popleft()
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def wait(self) -> Status:
        """Lets the turn end and drops what it says on the way.

        Raises:
            MicroturnError: as iterating does.
            ValueError: when the end was handed out before, or the turn was closed.
        """
        return (await self.collect()).status

    async def text(self) -> str:
        """Lets the turn end and returns all of its text that was not handed out before.

        Raises:
            MicroturnError, ValueError: as :meth:`wait`.
        """
        return (await self.collect()).text

    async def collect(self) -> Answer:
        """Lets the turn end and returns all that was not handed out before.

        Raises:
            MicroturnError, ValueError: as :meth:`wait`.
        """
        events: list[Tokens | ToolEvent] = []
        while (event := await self._next()) is not None:
            match event:
                case Tokens() | ToolCallBegun() | ToolArguments() | ToolCall():
                    events.append(event)
                case Resumed():
                    self._session._core.news.unread.append(event)
                case TurnEnd():
                    return answer_of(events, event.status)
        raise ValueError("the end of this turn was handed out before")

    async def _next(self, until_s: float = math.inf) -> Event | None:
        try:
            return await self._session._stream.next_event(self._pending, until_s)
        except MicroturnError:
            raise
        except BaseException:  # a cancelled task, or Ctrl-C: the reader is gone, whoever still holds the turn
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """Whether the last event was handed out, or the turn was left."""
        return self._pending.is_spent

    def close(self) -> None:
        """Leaves the turn at once; happens by itself when nobody holds it any more."""
        self._session._stream.leave(self._pending)

    # ---- asyncio alone ----
    async def aclose(self) -> None:
        """The same as :meth:`close`, by the name that ``contextlib.aclosing`` calls."""
        self.close()

    # ---- both ----
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._pending.is_spent:
            self._pending.leave()
            self._session._stream.flush_soon()
