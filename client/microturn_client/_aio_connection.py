"""The gRPC channel of a client, for asyncio.

What the client does differently for asyncio than for threads is here and in ``_aio_stream``; ``_sync_connection`` and
``_sync_stream`` have the same names for threads. All else is generated for threads (``client/generate_sync.py``).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from microturn_client._aio_stream import AsyncStream, OpenCall, TellRef
from microturn_client._endpoint import Endpoint
from microturn_client._session_core import SessionCore
from microturn_client._stub import InferenceStub

if TYPE_CHECKING:
    import grpc

    from microturn_client._aio_session import AsyncSession


class AsyncConnection:
    """The gRPC channel of a client, and the sessions on it, which it holds weakly.

    Attributes:
        is_closed: ``close`` was called.

    Args:
        endpoint: the server.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        import grpc.aio  # noqa: F401  # here and not on the event loop: it takes a while

        self.is_closed = False
        self._endpoint = endpoint
        self._channel: grpc.aio.Channel | None = None
        self._sessions: weakref.WeakSet[AsyncSession] = weakref.WeakSet()

    @property
    def stub(self) -> InferenceStub:
        """For calls of the server."""
        if self._channel is None:  # made late, since it belongs to the event loop that runs now
            import grpc

            to = self._endpoint
            if to.credentials is None:
                self._channel = grpc.aio.insecure_channel(to.address, options=to.channel_options)
            else:
                self._channel = grpc.aio.secure_channel(to.address, to.credentials, options=to.channel_options)
        return InferenceStub(self._channel)

    def stream(self, core: SessionCore, open_call: OpenCall, tell: TellRef) -> AsyncStream:
        """Streams for one session, which is told what befalls it."""
        return AsyncStream(core, open_call, tell)

    def watch(self, session: AsyncSession) -> None:
        """Adds a session."""
        self._sessions.add(session)

    def sessions(self) -> list[AsyncSession]:
        """The sessions that the program still holds."""
        return list(self._sessions)

    async def close(self, closing: Iterable[Callable[[], Awaitable[object]]]) -> None:
        """Closes the channel once each of ``closing`` has returned; they run at the same time."""
        self.is_closed = True
        try:
            outcomes = await asyncio.gather(*(close() for close in closing), return_exceptions=True)
        finally:
            if self._channel is not None:
                await self._channel.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
