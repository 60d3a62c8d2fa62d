"""The sessions of APIs that send conversations whole, found by what they hold: a branch of a conversation is a session.

    A ── B ── C     one session: each request went on from where the one before had ended
         └── D      asked behind B again, while C stays: a fork of the session, rewound to what both begin with

No request waits for another: a session that answers is forked as it was before the answer. One that is being told its
conversation is not: a rewind could not take back what has arrived of it and has left no token yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from microturn_client import MicroturnError
from microturn_gateway.caller import Caller
from microturn_gateway.context import HeldContext, Message
from microturn_gateway.places import Places, no_place
from microturn_gateway.prefix_tree import PrefixTree
from microturn_gateway.sessions import Sessions

Described = tuple[Mapping[str, Any], ...]

_REAP_EVERY_S = 5.0


class Branch:
    """A session, and what it holds.

    Attributes:
        session: on the server.
        context: what it holds.
        caller: whose it is.
        tools: of the session.
        hint: of the last request on it.
        is_busy: a request is on it.
        num_forks: those that are being made of it.
        is_lost: its context is unknown.
        used_at_s: when the last request on it ended.

    Args:
        tree: where others find it, once it is offered.
    """

    def __init__(self, sessions: Sessions, tree: PrefixTree[Branch], caller: Caller, tools: Described) -> None:
        self._sessions = sessions
        self._tree = tree
        self._owner = _owner(caller, tools)
        self.session = sessions.open(tools=tools)
        self.context = HeldContext()
        self.caller = caller
        self.tools = tools
        self.hint: int | None = None
        self.is_busy = False
        self.num_forks = 0
        self.is_lost = False
        self.used_at_s = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nobody would notice a change of it."""
        return not self.is_busy and not self.num_forks

    def offer(self) -> None:
        """Others may go on from what it holds: no input is on its way to it, at most an answer runs."""
        self._tree.put(self, self._owner, self.context.pieces)

    def withdraw(self) -> None:
        """They may not any more."""
        self._tree.remove(self)

    def goes_on_with(self, conversation: Sequence[Message]) -> bool:
        """Whether a conversation goes on where it ends; what of its last answer was not heard does not count."""
        return self.context.goes_on_with(self.context.recognised(conversation))

    async def renew(self) -> None:
        """Goes on with another session, which holds nothing yet."""
        await self.session.close()
        self.session, self.context = self._sessions.open(tools=self.tools), HeldContext()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """While the block runs, no other request is given this branch to go on from."""
        self.num_forks += 1
        try:
            yield
        finally:
            self.num_forks -= 1

    async def fork(self, branch: Branch) -> None:
        """Gives a new branch a session that holds what this one's does; where that fails, it keeps its own."""
        if self not in self._tree:
            return  # its session was lost meanwhile, and another is being told
        context = self.context.branched(is_answering=self.is_busy)
        try:
            forked = await self.session.fork()
        except MicroturnError:
            return  # everything is told to the session that the branch has
        await branch.session.close()  # nothing was said on it
        branch.session, branch.context = forked, context


class Branches:
    """All of them.

    Args:
        sessions: where they come from.
        max_open: how many there are at once.
        idle_timeout_s: how long an unused one is kept, seconds.
    """

    def __init__(self, sessions: Sessions, max_open: int, idle_timeout_s: float) -> None:
        self._sessions = sessions
        self._max_open = max_open
        self._places = Places(max_open)
        self._idle_timeout_s = idle_timeout_s
        self._open: dict[Branch, None] = {}  # the one unused for longest first
        self._tree = PrefixTree[Branch]()

    @property
    def num_open(self) -> int:
        """How many there are now."""
        return len(self._open)

    @contextlib.asynccontextmanager
    async def hold(
        self, caller: Caller, tools: Described, conversation: Sequence[Message], *, keeps: bool
    ) -> AsyncIterator[Branch]:
        """A branch for one request, with the longest beginning of its conversation that sessions of this caller hold.

        Args:
            caller: who asks; the sessions of others are not looked at.
            tools: that the model may call.
            conversation: that is to be answered.
            keeps: whether the next request may find it; otherwise it ends with this one.

        Raises:
            Refusal: requests in progress have all places, or all that are not kept for other callers.
        """
        with self._places.take(caller.token_hash):
            branch = await self._branch_for(caller, tools, conversation, keeps=keeps)
            try:
                yield branch
            finally:
                branch.is_busy, branch.used_at_s = False, _now_s()
                branch.offer()
                if branch.is_lost or not keeps or not branch.context.pieces:
                    await self._close(branch)

    async def close_all(self, connection: bytes) -> None:
        """Ends those of a connection that asks no more."""
        for branch in [branch for branch in self._open if branch.caller.connection == connection]:
            if branch in self._open:
                await self._close(branch)

    async def reap(self) -> None:
        """Ends unused ones, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(min(_REAP_EVERY_S, self._idle_timeout_s))
            oldest_s = _now_s() - self._idle_timeout_s
            for branch in [branch for branch in self._open if branch.is_idle and branch.used_at_s < oldest_s]:
                if branch.is_idle and branch in self._open:
                    await self._close(branch)

    async def _branch_for(
        self, caller: Caller, tools: Described, conversation: Sequence[Message], *, keeps: bool
    ) -> Branch:
        source = self._nearest(caller, tools, conversation)
        if source is None or not (keeps and source.is_idle and source.goes_on_with(conversation)):
            return await self._branch_off(source, caller, tools)
        self._use(source, caller)
        return source

    def _nearest(self, caller: Caller, tools: Described, conversation: Sequence[Message]) -> Branch | None:
        """Of those that share a beginning with the conversation, one that shares the longest, idle or answering."""
        nearest = self._tree.nearest(_owner(caller, tools), conversation)
        if caller.hint is not None:
            nearest = [branch for branch in nearest if branch.hint == caller.hint] or nearest
        return max(nearest, key=lambda branch: branch.is_idle, default=None)

    async def _branch_off(self, source: Branch | None, caller: Caller, tools: Described) -> Branch:
        unused = self._to_make_way(caller, source)
        if unused is not None and unused is source:
            self._use(source, caller)
            return source  # there is no room for both: what it holds behind the shared beginning makes way
        branch = Branch(self._sessions, self._tree, caller, tools)
        self._use(branch, caller)
        with contextlib.nullcontext() if source is None else source.unchanged():
            try:
                if unused is not None:
                    await self._close(unused)
                if source is not None:
                    await source.fork(branch)
            except BaseException:
                await self._close(branch)
                raise
        return branch

    def _use(self, branch: Branch, caller: Caller) -> None:
        branch.is_busy, branch.hint = True, caller.hint
        branch.withdraw()
        self._open.pop(branch, None)
        self._open[branch] = None

    def _to_make_way(self, caller: Caller, source: Branch | None) -> Branch | None:
        """Where all places are taken, the branch unused for longest of who has most places, and the source last."""
        if len(self._open) < self._max_open:
            return None
        idle = [branch for branch in self._open if branch.is_idle]
        if not idle:
            raise no_place()  # all but those in use are being forked
        num_places = Counter(branch.caller.token_hash for branch in self._open)
        num_places[caller.token_hash] += 1  # with the one that it asks for
        return max(idle, key=lambda branch: (num_places[branch.caller.token_hash], branch is not source))

    async def _close(self, branch: Branch) -> None:
        """Ends a branch; what was said on it can be told again elsewhere."""
        branch.withdraw()
        del self._open[branch]
        await branch.session.close()


def _owner(caller: Caller, tools: Described) -> tuple[Caller, str]:
    """Whose branches a request may go on from: those of this caller that have these tools."""
    return caller, json.dumps(tools, sort_keys=True)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
