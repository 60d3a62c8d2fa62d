"""Health turns against a gRPC service that answers as it is told; a real model answers them in tests/e2e/serve."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn.serve.health import Health
from microturn.serve.health_turns import HealthTurns

STATUS = service_pb2.ModelStreamInferResponse(
    infer_response=service_pb2.ModelInferResponse(
        outputs=[service_pb2.ModelInferResponse.InferOutputTensor(name="status", datatype="BYTES", shape=[1, 1])]
    )
)


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every turn with ``response``, or, while that is None, not at all."""

    def __init__(self) -> None:
        self.response: service_pb2.ModelStreamInferResponse | None = STATUS
        self.requests: list[service_pb2.ModelInferRequest] = []
        self.is_over = threading.Event()

    def ModelStreamInfer(  # noqa: N802
        self, request_iterator: Iterator[service_pb2.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[service_pb2.ModelStreamInferResponse]:
        for request in request_iterator:
            self.requests.append(request)
            while self.response is None and context.is_active() and not self.is_over.is_set():
                time.sleep(0.01)
            if self.response is not None:
                yield self.response


@pytest.fixture
def triton() -> Iterator[Triton]:
    yield (service := Triton())
    service.is_over.set()


@pytest.fixture
def address(triton: Triton) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    triton.is_over.set()
    server.stop(grace=None).wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def error(message: str) -> service_pb2.ModelStreamInferResponse:
    return service_pb2.ModelStreamInferResponse(error_message=message)


def test_a_turn_opens_and_closes_a_session_of_its_own(triton, address):
    with contextlib.closing(HealthTurns(address, timeout_s=1)) as turns:
        wait_for(lambda: len(triton.requests) >= 2)
        assert turns.is_healthy
    first, second = (request.parameters for request in triton.requests[:2])
    assert first["sequence_start"].bool_param
    assert first["sequence_end"].bool_param
    assert first["sequence_id"].string_param.startswith("health-")
    assert first["sequence_id"].string_param != second["sequence_id"].string_param
    assert first["timeout"].int64_param == 250_000
    assert list(triton.requests[0].inputs[0].shape) == [1, 0]


@pytest.mark.parametrize("message", ["RESOURCE_EXHAUSTED: no room", "timeout of the corresponding sequence has been …"])
def test_a_full_server_is_healthy_and_has_no_room(triton, address, message):
    triton.response = error(message)
    with contextlib.closing(HealthTurns(address, timeout_s=1)) as turns:
        assert turns.health is Health.DOWN
        wait_for(lambda: turns.is_healthy)
        assert turns.health is Health.FULL
        triton.response = STATUS
        wait_for(lambda: turns.health is Health.OPEN)


@pytest.mark.parametrize(
    ("response", "trouble"),
    [
        (error("Stub process 'streaming_llm_0_0' is not healthy."), "Stub process"),
        (service_pb2.ModelStreamInferResponse(), "the stream ended without a status"),
    ],
)
def test_any_other_answer_is_no_sign_of_life(triton, address, response, trouble):
    triton.response = response
    with contextlib.closing(HealthTurns(address, timeout_s=1)) as turns:
        wait_for(lambda: turns.trouble.startswith(trouble))
        assert not turns.is_healthy
        wait_for(lambda: turns.silent_for_s() > 0.5)  # reachable, but no model answers
        triton.response = STATUS
        wait_for(lambda: turns.is_healthy)
        assert turns.silent_for_s() < 0.5


def test_a_model_that_falls_silent_is_unhealthy_after_half_of_the_timeout(triton, address):
    with contextlib.closing(HealthTurns(address, timeout_s=1)) as turns:
        wait_for(lambda: turns.is_healthy)
        triton.response = None
        wait_for(lambda: turns.silent_for_s() > 0.5)
        assert not turns.is_healthy
        assert turns.trouble == "the last turn still waits for its answer"
        triton.response = STATUS  # a late answer is one
        wait_for(lambda: turns.is_healthy)


def test_a_server_that_is_not_there_yet_is_not_silent():
    with contextlib.closing(HealthTurns("127.0.0.1:1", timeout_s=0.2)) as turns:
        wait_for(lambda: turns.trouble.startswith("UNAVAILABLE"))
        time.sleep(0.3)
        assert turns.silent_for_s() == 0
        assert not turns.is_healthy


def test_closing_does_not_wait_for_a_turn_that_hangs(triton, address):
    triton.response = None
    turns = HealthTurns(address, timeout_s=60)
    wait_for(lambda: triton.requests != [])
    before_s = time.monotonic()
    turns.close()
    assert time.monotonic() - before_s < 3
