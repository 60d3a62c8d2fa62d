"""The sessions of chat completions: kept between requests by a name, given up by age or when there are too many."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from typing import Any

from microturn_client import AsyncSession
from microturn_gateway.context import HeldContext
from microturn_gateway.failures import Refusal
from microturn_gateway.sessions import Sessions

# Requests of one session that wait for the one before.
_MAX_NUM_WAITING = 4
_REAP_EVERY_S = 5.0


class ChatSession:
    """One session and what is known of its context.

    Attributes:
        session: on the server.
        context: what it holds.
        tools: of the session.
        is_lost: its context is unknown: the next request takes another session.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.session: AsyncSession = sessions.open()
        self.context = HeldContext()
        self.tools: tuple[Mapping[str, Any], ...] = ()
        self.is_lost = False
        self.lock = asyncio.Lock()
        self.num_users = 0
        self.used_at_s = 0.0

    async def renew(self, tools: tuple[Mapping[str, Any], ...] = ()) -> None:
        """Goes on with another session, which has these tools and holds nothing yet."""
        await self.session.close()
        self.session, self.context, self.is_lost = self._sessions.open(tools=tools), HeldContext(), False
        self.tools = tools


class ChatSessions:
    """All of them.

    Args:
        sessions: where they come from.
        max_kept: how many are kept at once.
        idle_timeout_s: how long an unused one is kept, seconds.
    """

    def __init__(self, sessions: Sessions, max_kept: int, idle_timeout_s: float) -> None:
        self._sessions = sessions
        self._max_kept = max_kept
        self._idle_timeout_s = idle_timeout_s
        self._kept: OrderedDict[str, ChatSession] = OrderedDict()

    @contextlib.asynccontextmanager
    async def hold(self, name: str | None) -> AsyncIterator[ChatSession]:
        """A session for one request, which waits for those of the same name that came before.

        Args:
            name: None for one that ends with the request.

        Raises:
            Refusal: too many requests wait for it, or all places are taken by sessions in use.
        """
        if name is None:
            chat = ChatSession(self._sessions)
            try:
                yield chat
            finally:
                await chat.session.close()
            return
        unused = None if name in self._kept else self._make_room()
        chat = self._kept.setdefault(name, ChatSession(self._sessions))
        self._kept.move_to_end(name)
        if chat.num_users > _MAX_NUM_WAITING:
            raise Refusal("session_busy", f"too many requests wait for session '{name}'", http_status=429)
        chat.num_users += 1
        try:
            if unused is not None:
                await unused.session.close()
            async with chat.lock:
                if chat.is_lost:
                    await chat.renew()
                yield chat
        finally:
            chat.num_users -= 1
            chat.used_at_s = asyncio.get_running_loop().time()

    async def reap(self) -> None:
        """Ends unused sessions, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(min(_REAP_EVERY_S, self._idle_timeout_s))
            oldest_s = asyncio.get_running_loop().time() - self._idle_timeout_s
            for name, chat in list(self._kept.items()):
                if chat.num_users == 0 and chat.used_at_s < oldest_s:
                    del self._kept[name]
                    await chat.session.close()

    def _make_room(self) -> ChatSession | None:
        """Where all places are taken, gives up the session that was not used for longest."""
        if len(self._kept) < self._max_kept:
            return None
        unused = next((name for name, chat in self._kept.items() if chat.num_users == 0), None)
        if unused is None:
            raise Refusal("too_many_sessions", "all sessions are in use: try again later", http_status=429)
        return self._kept.pop(unused)
