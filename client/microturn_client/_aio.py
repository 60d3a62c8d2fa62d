"""The client for asyncio: ``AsyncClient``, ``AsyncSession``, ``AsyncTurn``. A shell around the session core."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn_client._aio_stream import AsyncStream
from microturn_client._errors import MicroturnError, SessionClosed, from_grpc
from microturn_client._events import Event, Status, TurnEnd
from microturn_client._inputs import TurnInput, encode_input
from microturn_client._model_info import ModelInfo, parse_model_info
from microturn_client._options import AppendOptions, SessionOptions, TurnOptions
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import DEFAULT_CLOSE_TIMEOUT_S, DEFAULT_TIMEOUT_S, SessionCore
from microturn_client._wire import CHANNEL_OPTIONS, ModelInferRequest, SessionId, new_session_id, stream_metadata


class AsyncTurn(AsyncIterator[Event]):
    """The events of one turn as they come: any number of :class:`Tokens`, then one :class:`TurnEnd`.

    The turn is on its way already. Leave the iterator at any time: the server finishes the turn, what still comes is
    dropped, and the next turn sees only its own events.
    """

    def __init__(self, session: AsyncSession, pending: PendingTurn) -> None:
        self._session = session
        self._pending = pending

    async def __anext__(self) -> Event:
        """Waits for the next event.

        Raises:
            MicroturnError: when the turn failed; :class:`TurnTimeout` when it did not end within its ``timeout_s``.
        """
        event = await self._session._stream.next_event(self._pending)
        if event is None:
            raise StopAsyncIteration
        return event

    async def wait(self) -> Status:
        """Lets the turn end and drops what it says on the way.

        Raises:
            MicroturnError: as iterating does.
            ValueError: when the end was handed out before, or the turn was closed.
        """
        async for event in self:
            if isinstance(event, TurnEnd):
                return event.status
        raise ValueError("the end of this turn was handed out before")

    def close(self) -> None:
        """Leaves the turn; happens by itself when nobody holds it any more."""
        self._session._stream.leave(self._pending)

    def __del__(self) -> None:
        self._pending.abandon()


class AsyncSession:
    """One streaming session: a context that lives on the server and grows turn by turn.

    Made by :meth:`AsyncClient.session`; use it in an ``async with`` block. Several tasks of one event loop may use it:
    turns are answered in the order in which they were begun, each to its own iterator. While a program holds it, it is
    kept alive.
    """

    def __init__(self, client: AsyncClient, core: SessionCore, timeout_s: float) -> None:
        self._client = client
        self._core = core
        self._timeout_s = timeout_s
        self._stream = AsyncStream(core, client._open_stream)
        weakref.finalize(self, self._stream.cancel)

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

    def turn(
        self, input: TurnInput = None, /, *, timeout_s: float | None = None, **options: Unpack[TurnOptions]
    ) -> AsyncTurn:
        """Begins a turn: appends the input and generates. Not awaited itself; iterate over what it returns.

        Args:
            input: text (or its UTF-8 bytes); token ids as a sequence or an integer array ``[n]``; embeddings as a
                floating array ``[n, hidden]``; None to go on generating (with ``max_tokens``) or only to keep alive.
            timeout_s: seconds from now in which the turn must end; the session's unless told.
            options: see :class:`TurnOptions`.

        Raises:
            InvalidArgument, TypeError: when the turn has no form on the wire.
            MicroturnError: when the session is closed or lost. What the server refuses is raised by the iterator.
        """
        tensor = encode_input(input)
        pending = self._core.begin_turn(tensor, options, self._timeout_s if timeout_s is None else timeout_s)
        self._stream.flush()
        return AsyncTurn(self, pending)

    async def append(
        self, input: TurnInput, /, *, timeout_s: float | None = None, **options: Unpack[AppendOptions]
    ) -> Status:
        """Appends the input, generates nothing, and waits until that is done.

        Raises:
            MicroturnError: when the turn failed, in which case nothing was appended.
        """
        return await self.turn(input, timeout_s=timeout_s, max_tokens=0, **options).wait()

    async def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> Status | None:
        """Ends the session on the server, behind the turns that are on the wire, and closes its stream.

        Returns:
            The server's last status; None when it did not confirm within ``timeout_s`` seconds, or held no session. It
            ends by itself then, when its idle time is over.
        """
        end = self._core.begin_close(timeout_s)
        self._stream.flush()
        try:
            return None if end is None else await AsyncTurn(self, end).wait()
        except (MicroturnError, ValueError):
            return None
        finally:
            await self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class AsyncClient:
    """A connection to one server, for the tasks of one event loop. Each session has a stream of its own on it.

    Args:
        address: ``host:port`` of the server's gRPC endpoint.
        model: name of the model on the server.
        timeout_s: seconds in which a turn must end, for sessions and turns that do not say.
        credentials: of the channel; without them it is plain text.
    """

    def __init__(
        self,
        address: str,
        *,
        model: str = "streaming_llm",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._address = address
        self._model = model
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._is_closed = False
        self._sessions: weakref.WeakSet[AsyncSession] = weakref.WeakSet()

    def session(
        self,
        *,
        session_id: SessionId | None = None,
        timeout_s: float | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession:
        """A new session; the server hears of it with the first turn.

        Args:
            session_id: integer in [1, 2**63) or printable text of 1 to 128 characters; a random integer unless told.
                Use an id once.
            timeout_s: seconds in which a turn of this session must end, for turns that do not say.
            options: see :class:`SessionOptions`.

        Raises:
            InvalidArgument: for an id of another form, or an option of turns.
            SessionClosed: when the client is closed.
        """
        if self._is_closed:
            raise SessionClosed("the client is closed: make another one")
        core = SessionCore(self._model, new_session_id() if session_id is None else session_id, options)
        session = AsyncSession(self, core, self._timeout_s if timeout_s is None else timeout_s)
        self._sessions.add(session)
        return session

    async def model_info(self) -> ModelInfo:
        """Asks which model the server has and what it allows; no session is needed.

        Raises:
            MicroturnError: when the server does not say so within the client's ``timeout_s``.
        """
        request = service_pb2.ModelConfigRequest(name=self._model)
        try:
            return parse_model_info((await self._stub.ModelConfig(request, timeout=self._timeout_s)).config)
        except grpc.RpcError as failure:
            raise from_grpc(failure.code(), failure.details()) from failure

    async def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Closes all sessions, together within ``timeout_s`` seconds, then the connection."""
        self._is_closed = True
        try:
            await asyncio.gather(*(session.close(timeout_s) for session in list(self._sessions)))
        finally:
            if self._channel is not None:
                await self._channel.close()

    def _open_stream(self, session_id: SessionId, requests: AsyncIterator[ModelInferRequest]) -> Any:
        return self._stub.ModelStreamInfer(requests, metadata=stream_metadata(session_id))

    @property
    def _stub(self) -> Any:
        if self._channel is None:  # made late, since it belongs to the event loop that runs now
            if self._credentials is None:
                self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self._address, self._credentials, options=CHANNEL_OPTIONS)
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
