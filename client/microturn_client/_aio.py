"""The client for asyncio: ``AsyncClient``. Holds the connection and its sessions."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from microturn_client._aio_connection import AsyncConnection
from microturn_client._aio_session import AsyncSession, OnResumed
from microturn_client._endpoint import endpoint
from microturn_client._errors import NotFound, SessionClosed, TurnTimeout, Unavailable, from_failure
from microturn_client._inputs import TurnInput
from microturn_client._messages_pb2 import ModelConfigRequest, ModelInferRequest, ModelReadyRequest
from microturn_client._model_info import ModelInfo, parse_model_info
from microturn_client._opening import attached_core, new_core
from microturn_client._options import MessageRole, SessionOptions
from microturn_client._retry import DEFAULT_RECOVERY, Recovery
from microturn_client._session_core import SessionCore
from microturn_client._timeouts import DEFAULT_CLOSE_TIMEOUT_S, DEFAULT_TIMEOUT_S, Timeouts, call_timeout
from microturn_client._wire import Metadata, SessionId

if TYPE_CHECKING:
    import grpc


class AsyncClient:
    """A connection to one server, for the tasks of one event loop. Each session has a stream of its own on it.

    Args:
        address: ``host:port`` of the server's gRPC endpoint, or what else gRPC takes as a target; by default that in
            the variable ``MICROTURN_ADDRESS``, or ``localhost:8001``.
        model: name of the model on the server.
        timeout_s: how many seconds of silence a turn survives, for sessions and turns that do not say: it fails where
            nothing came for its session for so long.
        total_timeout_s: seconds in which a turn must end, however much comes; unlimited unless told.
        recovery: how long and how often a session that was interrupted by a failure is taken up again, and how much of
            it is kept for that; None for sessions that end with their stream, whose turns are undone with it.
        token: a bearer token, sent with every call as ``authorization``; by default that in ``MICROTURN_TOKEN``.
            Beyond this machine it wants TLS.
        credentials: of the channel, gRPC's; by default TLS with the authorities of the PEM file ``MICROTURN_CA_FILE``,
            or without one plain text.
        metadata: headers of every call. A name that ends in ``-bin`` has bytes.
        channel_options: gRPC's, beside those that the client sets.

    Raises:
        InvalidArgument: metadata that cannot be sent, a token that would be sent in plain text beyond this machine, or
            a file of authorities that cannot be read.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        model: str = "streaming_llm",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        total_timeout_s: float = math.inf,
        recovery: Recovery | None = DEFAULT_RECOVERY,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
        channel_options: Mapping[str, int | str] | None = None,
    ) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._total_timeout_s = total_timeout_s
        self._recovery = recovery
        self._endpoint = endpoint(
            address, token=token, credentials=credentials, metadata=metadata, channel_options=channel_options
        )
        self._connection = AsyncConnection(self._endpoint)

    def session(
        self,
        *,
        session_id: SessionId | None = None,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        on_resumed: OnResumed | None = None,
        **options: Unpack[SessionOptions],
    ) -> AsyncSession:
        """A new session; the server hears of it with the first turn.

        Args:
            session_id: integer in [1, 2**63) or printable text of 1 to 128 bytes. Use an id once. Unless told it
                is a random integer, and the session has a random key, so that nobody else can use it.
            timeout_s: seconds of silence, for turns of this session that do not say.
            total_timeout_s: seconds in which a turn of this session must end, for turns that do not say.
            on_resumed: called with each :class:`Resumed`, as soon as it is known and whatever the program does: from
                the event loop, or from a thread of its own. Its branches call it too.
            options: see :class:`SessionOptions`.

        Raises:
            InvalidArgument: for an id of another form, or an option of turns.
            SessionClosed: when the client is closed.
        """
        self._check_open()
        core = new_core(self._model, session_id, options, self._recovery)
        return self._new_session(core, timeout_s, total_timeout_s, on_resumed)

    def attach(
        self,
        token: str,
        *,
        timeout_s: float | None = None,
        total_timeout_s: float | None = None,
        on_resumed: OnResumed | None = None,
    ) -> AsyncSession:
        """Takes up a session that was opened before, here or elsewhere; the first turn goes on with it.

        What it knows is on the server only: where the server loses it, it cannot be opened anew from here.

        Args:
            token: that of the session.
            timeout_s: as with :meth:`session`.
            total_timeout_s: as with :meth:`session`.
            on_resumed: as with :meth:`session`.

        Raises:
            InvalidArgument: it is no token.
            SessionClosed: when the client is closed.
        """
        self._check_open()
        return self._new_session(attached_core(token, {}, self._recovery), timeout_s, total_timeout_s, on_resumed)

    def _new_session(
        self,
        core: SessionCore,
        timeout_s: float | None,
        total_timeout_s: float | None,
        on_resumed: OnResumed | None,
    ) -> AsyncSession:
        timeouts = Timeouts(
            self._timeout_s if timeout_s is None else timeout_s,
            self._total_timeout_s if total_timeout_s is None else total_timeout_s,
        )
        session = AsyncSession(self, core, timeouts, on_resumed)
        self._connection.watch(session)
        return session

    def _check_open(self) -> None:
        if self._connection.is_closed:
            raise SessionClosed("the client is closed: make another one")

    async def model_info(self) -> ModelInfo:
        """Asks which model the server has and what it allows; no session is needed.

        Raises:
            MicroturnError: when the server does not say so within the client's ``timeout_s``.
            SessionClosed: when the client is closed.
        """
        self._check_open()
        request = ModelConfigRequest(name=self._model)
        ask = self._connection.stub.model_config
        try:
            response = await ask(request, timeout=call_timeout(self._timeout_s), metadata=self._endpoint.metadata)
        except Exception as failure:
            raise from_failure(failure) from failure
        return parse_model_info(response.config)

    async def count_tokens(
        self, input: TurnInput, /, *, role: MessageRole | None = None, parse_special: bool | None = None
    ) -> int:
        """How many tokens an input would be as the first of a session, by the server's tokenizer; nothing is computed.

        What the model puts before every context is counted, and with a ``role`` what its chat template puts around a
        message. A session's own :meth:`~AsyncSession.count_tokens` counts behind what that session knows.

        Args:
            input: text (or its UTF-8 bytes), token ids, or embeddings.
            role: whose message it is; without one it is plain text.
            parse_special: special tokens written inside the text count as such.

        Raises:
            ContextFull: it is longer than the longest context.
            MicroturnError: when the server does not say so.
            SessionClosed: when the client is closed.
        """
        async with self.session() as session:
            return await session.count_tokens(input, role=role, parse_special=parse_special)

    async def ready(self, timeout_s: float = 5.0) -> bool:
        """Asks whether the server is there and its model takes turns; no session is needed.

        Raises:
            PermissionDenied: a proxy on the way refused the question.
            MicroturnError: what answers is no inference server.
            SessionClosed: when the client is closed.
        """
        self._check_open()
        request = ModelReadyRequest(name=self._model)
        ask = self._connection.stub.model_ready
        try:
            response = await ask(request, timeout=call_timeout(timeout_s), metadata=self._endpoint.metadata)
        except Exception as failure:
            error = from_failure(failure)
            if isinstance(error, Unavailable | NotFound | TurnTimeout):
                return False
            raise error from failure
        return bool(response.ready)

    async def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Closes all sessions, together within ``timeout_s`` seconds, then the connection."""
        # All END requests are sent before the first answer is awaited.
        ends = [(session, session._begin_close(timeout_s)) for session in self._connection.sessions()]
        await self._connection.close(partial(session._finish_close, end) for session, end in ends)

    def _open_stream(self, metadata: Metadata, requests: AsyncIterator[ModelInferRequest]) -> Any:
        return self._connection.stub.stream_infer(requests, metadata=(*self._endpoint.metadata, *metadata))

    # ---- asyncio alone ----
    async def aclose(self) -> None:
        """The same as :meth:`close`, by the name that ``contextlib.aclosing`` calls."""
        await self.close()

    # ---- both ----
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
