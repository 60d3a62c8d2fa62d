"""A gRPC stream with many turns under way at once, each answered by its request id, which may come more than once."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from typing import Self

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.raw import Answer, open_channel

_TIMEOUT_S = 60


class Pending:
    """A request that was sent; its answer grows until it has ended."""

    def __init__(self, request: service_pb2.ModelInferRequest) -> None:
        self.request = request
        self.answer = Answer()
        self.has_ended = threading.Event()
        self.has_begun = threading.Event()

    def wait(self) -> Answer:
        """The whole answer.

        Raises:
            AssertionError: it did not come in time.
        """
        assert self.has_ended.wait(_TIMEOUT_S), f"no answer to {self.request}"
        return self.answer


class PipelinedStream:
    """One ModelStreamInfer call of its own connection."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        self._pending: defaultdict[str, deque[Pending]] = defaultdict(deque)
        self._call = service_pb2_grpc.GRPCInferenceServiceStub(self._channel).ModelStreamInfer(
            iter(self._requests.get, None)
        )
        self._error: grpc.RpcError | None = None
        self._strays: list[service_pb2.ModelStreamInferResponse] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def send(self, request: service_pb2.ModelInferRequest) -> Pending:
        """Sends a request and returns at once."""
        pending = Pending(request)
        self._pending[request.id].append(pending)
        self._requests.put(request)
        return pending

    def finish(self) -> None:
        """Says that no more requests come, and waits until the server has ended the stream.

        Raises:
            AssertionError: it broke, did not end in time, or brought something that nobody had asked for.
        """
        self._requests.put(None)
        self._reader.join(_TIMEOUT_S)
        assert not self._reader.is_alive(), "the stream did not end"
        assert self._error is None, self._error
        assert self._strays == []

    def leave(self) -> None:
        """Breaks the stream, whatever is under way."""
        self._requests.put(None)
        self._call.cancel()
        self._reader.join()
        self._channel.close()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._take(response)
        except grpc.RpcError as error:
            self._error = error

    def _take(self, response: service_pb2.ModelStreamInferResponse) -> None:
        waiting = self._pending[response.infer_response.id]
        if not waiting:
            self._strays.append(response)
            return
        pending = waiting[0]
        has_ended = pending.answer.take(response)
        pending.has_begun.set()
        if has_ended:
            waiting.popleft()
            pending.has_ended.set()
