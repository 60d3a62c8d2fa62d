"""The client for threads: ``Client``, ``Session``, ``Turn``. A shell around the session core."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn_client._errors import MicroturnError, SessionClosed, from_grpc
from microturn_client._events import Event, Status, TurnEnd
from microturn_client._inputs import TurnInput, encode_input
from microturn_client._keepalive import KeepaliveThread
from microturn_client._model_info import ModelInfo, parse_model_info
from microturn_client._options import AppendOptions, SessionOptions, TurnOptions
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import DEFAULT_CLOSE_TIMEOUT_S, DEFAULT_TIMEOUT_S, SessionCore
from microturn_client._sync_stream import SyncStream
from microturn_client._wire import CHANNEL_OPTIONS, ModelInferRequest, SessionId, new_session_id, stream_metadata


class Turn(Iterator[Event]):
    """The events of one turn as they come: any number of :class:`Tokens`, then one :class:`TurnEnd`.

    The turn is on the wire already. Leave the iterator at any time: the server finishes the turn, what still comes is
    dropped, and the next turn sees only its own events.
    """

    def __init__(self, session: Session, pending: PendingTurn) -> None:
        self._session = session
        self._pending = pending

    def __next__(self) -> Event:
        """Waits for the next event.

        Raises:
            MicroturnError: when the turn failed; :class:`TurnTimeout` when it did not end within its ``timeout_s``.
        """
        event = self._session._stream.next_event(self._pending)
        if event is None:
            raise StopIteration
        return event

    def wait(self) -> Status:
        """Lets the turn end and drops what it says on the way.

        Raises:
            MicroturnError: as iterating does.
            ValueError: when the end was handed out before, or the turn was closed.
        """
        for event in self:
            if isinstance(event, TurnEnd):
                return event.status
        raise ValueError("the end of this turn was handed out before")

    def close(self) -> None:
        """Leaves the turn; happens by itself when nobody holds it any more."""
        self._session._stream.leave(self._pending)

    def __del__(self) -> None:
        self._pending.abandon()


class Session:
    """One streaming session: a context that lives on the server and grows turn by turn.

    Made by :meth:`Client.session`; use it in a ``with`` block. It may be used from several threads: turns are answered
    in the order in which they were begun, each to its own iterator. While a program holds it, it is kept alive.
    """

    def __init__(self, client: Client, core: SessionCore, timeout_s: float) -> None:
        self._client = client
        self._core = core
        self._timeout_s = timeout_s
        self._stream = SyncStream(core, client._open_stream, client._keepalive.wake_at)
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
    ) -> Turn:
        """Begins a turn: appends the input and generates.

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
        with self._stream.changed:
            pending = self._core.begin_turn(tensor, options, self._timeout_s if timeout_s is None else timeout_s)
            self._stream.flush()
        return Turn(self, pending)

    def append(
        self, input: TurnInput, /, *, timeout_s: float | None = None, **options: Unpack[AppendOptions]
    ) -> Status:
        """Appends the input, generates nothing, and waits until that is done.

        Raises:
            MicroturnError: when the turn failed, in which case nothing was appended.
        """
        return self.turn(input, timeout_s=timeout_s, max_tokens=0, **options).wait()

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> Status | None:
        """Ends the session on the server, behind the turns that are on the wire, and closes its stream.

        Returns:
            The server's last status; None when it did not confirm within ``timeout_s`` seconds, or held no session. It
            ends by itself then, when its idle time is over.
        """
        return self._finish_close(self._begin_close(timeout_s))

    def _keep_alive(self) -> float | None:
        """Sends a keep-alive if one is due; tells when to look again, or None while nothing is foreseen."""
        with self._stream.changed:
            self._core.begin_keepalive()
            self._stream.flush()
            return self._core.keepalive_at

    def _begin_close(self, timeout_s: float) -> PendingTurn | None:
        with self._stream.changed:
            end = self._core.begin_close(timeout_s)
            self._stream.flush()
            return end

    def _finish_close(self, end: PendingTurn | None) -> Status | None:
        try:
            return None if end is None else Turn(self, end).wait()
        except (MicroturnError, ValueError):
            return None
        finally:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """A connection to one server, for threads. Each session has a stream of its own on it.

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
        self._model = model
        self._timeout_s = timeout_s
        if credentials is None:
            channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._keepalive = KeepaliveThread()
        self._release = weakref.finalize(self, _release, self._keepalive, channel)

    def session(
        self,
        *,
        session_id: SessionId | None = None,
        timeout_s: float | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
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
        if not self._release.alive:
            raise SessionClosed("the client is closed: make another one")
        core = SessionCore(self._model, new_session_id() if session_id is None else session_id, options)
        session = Session(self, core, self._timeout_s if timeout_s is None else timeout_s)
        self._keepalive.watch(session)
        return session

    def model_info(self) -> ModelInfo:
        """Asks which model the server has and what it allows; no session is needed.

        Raises:
            MicroturnError: when the server does not say so within the client's ``timeout_s``.
        """
        request = service_pb2.ModelConfigRequest(name=self._model)
        try:
            return parse_model_info(self._stub.ModelConfig(request, timeout=self._timeout_s).config)
        except grpc.RpcError as failure:
            raise from_grpc(failure.code(), failure.details()) from failure

    def close(self, timeout_s: float = DEFAULT_CLOSE_TIMEOUT_S) -> None:
        """Closes all sessions, together within ``timeout_s`` seconds, then the connection."""
        ends = [(session, session._begin_close(timeout_s)) for session in self._keepalive.sessions()]
        for session, end in ends:
            session._finish_close(end)
        self._release()

    def _open_stream(self, session_id: SessionId, requests: Iterator[ModelInferRequest]) -> Any:
        return self._stub.ModelStreamInfer(requests, metadata=stream_metadata(session_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _release(keepalive: KeepaliveThread, channel: grpc.Channel) -> None:
    keepalive.stop()
    channel.close()
