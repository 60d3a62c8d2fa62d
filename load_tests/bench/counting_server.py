"""A server that answers at once and computes nothing: what turns cost with it is their client's doing.

Tokens count up with their position. Each is a response of its own, as where an engine takes a step per token. Of a
session it keeps two numbers, so that its own memory and time stay the same for ever. It is to be had in two ways: as a
transport within the client's process, which says how long it took itself, and behind gRPC in a process of its own.

    python -m load_tests.bench.counting_server      prints its port, and ends when stdin does
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from microturn_client import AsyncClient
from microturn_client._messages_pb2 import ModelInferRequest, ModelStreamInferResponse
from microturn_client._wire import Metadata
from microturn_client.testing._messages import answer

_STATUS = {
    "finish_reason": "length",
    "stop_reason": None,
    "timing_ms": {"queue": 0.1, "restore": 0.0, "prefill": 4.5, "decode": 20.0, "total": 24.6},
    "expires_in_s": 60.0,
    "seed": 1234,
}


class _Session:
    """One session's answers."""

    def __init__(self) -> None:
        self._context_len = self._num_turns = 0

    def answers(self, request: ModelInferRequest) -> Iterator[ModelStreamInferResponse]:
        """To one turn of ids."""
        num_input, num_output = request.inputs[0].shape[1], int(request.parameters["max_tokens"].int64_param)
        first = self._context_len + num_input
        self._context_len = end = first + num_output
        for position in range(first, end - 1):
            yield answer(request.id, token_ids=[position], position=position, text=f" {position}")
        usage = {"input_tokens": num_input, "output_tokens": num_output, "computed_tokens": end, "cached_tokens": 0}
        yield answer(
            request.id,
            token_ids=[end - 1] if num_output else [],
            position=end - 1,
            text=f" {end - 1}" if num_output else "",
            status={**_STATUS, "turn": self._num_turns, "context_len": end, "kept_len": end, "usage": usage},
            appended_ids=memoryview(request.raw_input_contents[0]).cast("i"),
        )
        self._num_turns += 1


class CountingClient(AsyncClient):
    """A client whose streams lead to such a server within its own process.

    Attributes:
        server_s: processor time that the server has taken.
    """

    def __init__(self) -> None:
        super().__init__("127.0.0.1:9")  # nothing is ever sent there
        self.server_s = 0.0

    def _open_stream(self, _metadata: Metadata, requests: AsyncIterator[ModelInferRequest]) -> Any:
        return _Call(self, requests)


class _Call:
    """One stream. It ends with its requests."""

    def __init__(self, client: CountingClient, requests: AsyncIterator[ModelInferRequest]) -> None:
        self._client = client
        self._requests = requests

    def cancel(self) -> None:
        pass

    async def initial_metadata(self) -> Metadata:
        return ()

    async def __aiter__(self) -> AsyncIterator[ModelStreamInferResponse]:
        session = _Session()
        async for request in self._requests:
            begun_s = time.thread_time()
            messages = list(session.answers(request))
            self._client.server_s += time.thread_time() - begun_s
            for message in messages:
                await asyncio.sleep(0)  # they arrive one by one
                yield message


class _Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]  # grpc has no types
    async def ModelStreamInfer(  # noqa: N802  # gRPC's name
        self, requests: AsyncIterator[ModelInferRequest], _context: Any
    ) -> AsyncIterator[ModelStreamInferResponse]:
        session = _Session()
        async for request in requests:
            for message in session.answers(request):
                yield message


@contextmanager
def counting_server() -> Iterator[str]:
    """Serves in a process of its own until the block ends.

    Yields:
        The gRPC address.
    """
    command = [sys.executable, "-m", "load_tests.bench.counting_server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


async def _serve() -> None:
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(grace=None)


if __name__ == "__main__":
    asyncio.run(_serve())
