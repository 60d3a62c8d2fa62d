"""Conversations as the protocols hold them, whoever answers: a turn brings token ids and wants so many back.

A session keeps what was said where it is computed. All others are *histories*: the client keeps the conversation and
sends the whole of it with every turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, Unpack

from microturn_client import AsyncClient, AsyncSession, GenerationOptions, Tokens


class Talk(Protocol):
    """One conversation."""

    async def turn(self, given: Sequence[int], num_output: int) -> None:
        """Takes a turn; returns when its last token is here.

        Raises:
            RuntimeError: when the answer has another length.
        """
        ...

    async def skip(self, tokens: Sequence[int]) -> None:
        """Lets the conversation have grown by these, by turns that nobody measures."""
        ...

    async def close(self) -> None:
        """Ends it."""
        ...


class Service(Protocol):
    """Whoever answers."""

    def open(self) -> Talk:
        """A new conversation; called on the event loop that will hold it."""
        ...


class SessionTalk:
    """A streaming session of ours.

    Args:
        address: of the server.
        options: of the session's turns.
    """

    def __init__(self, address: str, **options: Unpack[GenerationOptions]) -> None:
        self._client = AsyncClient(address, timeout_s=600)
        self._session = self._client.session(**options)

    async def turn(self, given: Sequence[int], num_output: int) -> None:
        """See `Talk.turn`."""
        require_len(await _generated(self._session, given, num_output), num_output)

    async def skip(self, tokens: Sequence[int]) -> None:
        """See `Talk.skip`."""
        await self._session.append(list(tokens))

    async def close(self) -> None:
        """See `Talk.close`."""
        await self._client.close()


Complete = Callable[[Sequence[int], int], Awaitable[list[int]]]


class HistoryTalk:
    """A conversation that its client sends whole, again and again.

    Args:
        complete: what goes on for so many tokens behind a prompt.
    """

    def __init__(self, complete: Complete) -> None:
        self._complete = complete
        self._history: list[int] = []

    async def turn(self, given: Sequence[int], num_output: int) -> None:
        """See `Talk.turn`."""
        self._history += given
        generated = await self._complete(self._history, num_output)
        require_len(generated, num_output)
        self._history += generated

    async def skip(self, tokens: Sequence[int]) -> None:
        """See `Talk.skip`."""
        self._history += tokens

    async def close(self) -> None:
        """See `Talk.close`; nobody keeps anything."""


class Requests(HistoryTalk):
    """A conversation with our server in which each turn is a request of its own.

    Args:
        address: of the server.
    """

    def __init__(self, address: str) -> None:
        super().__init__(self._request)
        self._client = AsyncClient(address, timeout_s=600)
        self._closing: list[asyncio.Task[object]] = []

    async def close(self) -> None:
        """See `Talk.close`."""
        await asyncio.gather(*self._closing)
        await self._client.close()

    async def _request(self, prompt: Sequence[int], num_output: int) -> list[int]:
        session = self._client.session()
        try:
            return await _generated(session, prompt, num_output)
        finally:
            # Not part of the turn: who asked has the answer.
            self._closing.append(asyncio.create_task(session.close()))


async def _generated(session: AsyncSession, given: Sequence[int], num_output: int) -> list[int]:
    generated: list[int] = []
    async for event in session.turn(list(given), max_tokens=num_output, ignore_eos=True):
        if isinstance(event, Tokens):
            generated += event.ids
    return generated


def require_len(generated: Sequence[int], num_output: int) -> None:
    """Holds an answer to the length that was asked for: a shorter one would look fast.

    Raises:
        RuntimeError: when it has another.
    """
    if len(generated) != num_output:
        raise RuntimeError(f"an answer of {len(generated)} tokens where {num_output} were asked for")
