"""The sessions that responses were made on: a branch of a conversation is one session.

R1 ── R2 ── R3     one session: each response went on from the one before, which was its latest
  └── R4           R1 is not the latest of its session: a fork of it, rewound to what both conversations begin with
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from microturn_client import AsyncSession, MicroturnError
from microturn_gateway.context import HeldContext
from microturn_gateway.failures import Refusal
from microturn_gateway.sessions import Sessions

Described = tuple[Mapping[str, Any], ...]


class Branch:
    """A session, what it holds, and the responses that were made on it.

    Attributes:
        session: on the server.
        context: what it holds.
        tools: of the session.
        response_ids: of the stored ones, in their order.
        is_busy: a request is on it.
        is_lost: its context is unknown.
        is_closed: its place was given to another.
    """

    def __init__(self, session: AsyncSession, tools: Described) -> None:
        self.session = session
        self.context = HeldContext()
        self.tools = tools
        self.response_ids: list[str] = []
        self.is_busy = False
        self.is_lost = False
        self.is_closed = False


class Branches:
    """All of them.

    Args:
        sessions: where they come from.
        max_open: how many there are at once.
    """

    def __init__(self, sessions: Sessions, max_open: int) -> None:
        self._sessions = sessions
        self._max_open = max_open
        self._open: dict[Branch, None] = {}  # the one unused for longest first

    @contextlib.asynccontextmanager
    async def hold(
        self, source: Branch | None, response_id: str | None, tools: Described, *, keeps: bool
    ) -> AsyncIterator[Branch]:
        """A branch for one request; without a stored response it ends with it.

        Args:
            source: the branch of the response to go on from; None for a new conversation.
            response_id: of that response.
            tools: that the model may call.
            keeps: whether the new response will be stored, so that it may become the branch's latest.

        Raises:
            Refusal: requests in progress have all places.
        """
        if source is not None and (source.is_busy or source.is_closed or source.tools != tools):
            source = None  # the conversation is told again
        if source is not None:
            self._use(source)
        if source is not None and keeps and source.response_ids[-1] == response_id:
            branch = source
        else:
            branch = await self._branch_off(source, tools)
        branch.is_busy = True
        try:
            yield branch
        finally:
            branch.is_busy = False
            if branch.is_lost:
                await self.renew(branch)
            if not branch.response_ids:
                await self.close(branch)

    async def renew(self, branch: Branch) -> None:
        """Goes on with another session, which holds nothing yet."""
        await branch.session.close()
        branch.session, branch.context = self._sessions.open(tools=branch.tools), HeldContext()
        branch.is_lost = False

    async def close(self, branch: Branch) -> None:
        """Ends a branch; what was said on it can be told again elsewhere."""
        if not branch.is_closed:
            branch.is_closed = True
            del self._open[branch]
            await branch.session.close()

    async def _branch_off(self, source: Branch | None, tools: Described) -> Branch:
        unused = self._without_place()
        branch = Branch(self._sessions.open(tools=tools), tools)
        branch.is_busy = True
        self._use(branch)
        try:
            if unused is not None:
                await self.close(unused)
            if source is not None and not source.is_busy and not source.is_closed and source.context.context_len:
                await self._fork(source, branch)
        except BaseException:
            await self.close(branch)
            raise
        return branch

    async def _fork(self, source: Branch, branch: Branch) -> None:
        source.is_busy = True
        try:
            forked = await source.session.fork()
        except MicroturnError:
            return  # the session that was opened is told everything
        finally:
            source.is_busy = False
            if not source.response_ids:  # they were deleted meanwhile
                await self.close(source)
        await branch.session.close()  # nothing was said on it
        branch.session, branch.context = forked, source.context.branched()

    def _use(self, branch: Branch) -> None:
        self._open.pop(branch, None)
        self._open[branch] = None

    def _without_place(self) -> Branch | None:
        """Where all places are taken, the branch that was not used for longest."""
        if len(self._open) < self._max_open:
            return None
        unused = next((branch for branch in self._open if not branch.is_busy), None)
        if unused is None:
            raise Refusal("too_many_sessions", "all sessions are in use: try again later", http_status=429)
        return unused
