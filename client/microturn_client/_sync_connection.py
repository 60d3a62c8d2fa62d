"""The gRPC channel of a client, and its timer, for threads. The same names as in ``_aio_connection``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from microturn_client._endpoint import Endpoint
from microturn_client._session_core import SessionCore
from microturn_client._stub import InferenceStub
from microturn_client._sync_stream import OpenCall, Stream, TellRef
from microturn_client._timer import TimerThread

if TYPE_CHECKING:
    import grpc

    from microturn_client._sync_session import Session


class Connection:
    """The gRPC channel of a client, and the sessions on it, which it holds weakly.

    Attributes:
        stub: for calls of the server.

    Args:
        endpoint: the server.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        import grpc  # with the first client, since it takes longer than all that is here

        options = endpoint.channel_options
        if endpoint.credentials is None:
            channel = grpc.insecure_channel(endpoint.address, options=options)
        else:
            channel = grpc.secure_channel(endpoint.address, endpoint.credentials, options=options)
        self.stub = InferenceStub(channel)
        self._timer = TimerThread()
        self._release = weakref.finalize(self, _release, self._timer, channel)

    @property
    def is_closed(self) -> bool:
        return not self._release.alive

    def stream(self, core: SessionCore, open_call: OpenCall, tell: TellRef) -> Stream:
        """Streams for one session, which is told what befalls it."""
        return Stream(core, open_call, tell, self._timer.wake_at)

    def watch(self, session: Session) -> None:
        """Adds a session."""
        self._timer.watch(session)

    def sessions(self) -> list[Session]:
        """The sessions that the program still holds."""
        return self._timer.sessions()

    def close(self, closing: Iterable[Callable[[], object]]) -> None:
        """Closes the channel once each of ``closing`` has returned or raised."""
        with ExitStack() as stack:
            stack.callback(self._release)
            for close in closing:
                stack.callback(close)


def _release(timer: TimerThread, channel: grpc.Channel) -> None:
    timer.stop()
    channel.close()
