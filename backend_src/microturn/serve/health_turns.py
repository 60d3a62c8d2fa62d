"""Health turns: real turns through the whole server, the only proof that the model process answers.

Each opens its own session and closes it in the same request, without tokens, so it costs other sessions nothing. This
file only reports; the supervisor decides.
"""

from __future__ import annotations

import secrets
import threading
import time

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn.hosts.kserve.envelope import MODEL_NAME
from microturn.serve.health import Health

_START_INTERVAL_S = 0.05
_CLOSE_TIMEOUT_S = 1.0

# Errors of a live server without room for another session: no reason to restart it. The second is Triton's, for a
# request that timed out before it got a sequence slot.
_FULL = ("RESOURCE_EXHAUSTED", "timeout of the corresponding sequence")


class HealthTurnError(Exception):
    """A health turn failed.

    Args:
        reason: the error, for the user.
        was_reached: whether Triton received the turn.
    """

    def __init__(self, reason: str, *, was_reached: bool = True) -> None:
        super().__init__(reason)
        self.was_reached = was_reached


class HealthTurns:
    """Sends health turns from its own thread: every 0.05 s until one is answered, then five per timeout.

    Args:
        address: ``host:port`` of Triton's gRPC endpoint.
        timeout_s: how long without an answer until the supervisor restarts the server; after half of it `is_healthy`
            is false.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # By default gRPC's delay between attempts to reach a starting server grows to two minutes.
        backoff = [(f"grpc.{which}_reconnect_backoff_ms", 50) for which in ("initial", "min", "max")]
        # By default channels share connections; one to the previous server must not be used again.
        self._channel = grpc.insecure_channel(address, options=[*backoff, ("grpc.use_local_subchannel_pool", 1)])
        self._triton = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._was_answered = False
        self._has_room = True
        self._silent_since_s: float | None = None
        self._failure: str | None = "not tried yet"
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health-turns", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether the last turn was answered, less than half the timeout ago."""
        return self._failure is None and self.silent_for_s() < self._timeout_s / 2

    @property
    def health(self) -> Health:
        """Of the server, by the last turn."""
        if not self.is_healthy:
            return Health.DOWN
        return Health.OPEN if self._has_room else Health.FULL

    @property
    def trouble(self) -> str:
        """The error of the last turn, for the user."""
        return self._failure or "the last turn still waits for its answer"

    def silent_for_s(self) -> float:
        """Seconds since a turn was answered; before the first answer, since Triton was reached; 0 before that."""
        return 0.0 if self._silent_since_s is None else time.monotonic() - self._silent_since_s

    def close(self) -> None:
        """Ends the thread; a turn in progress has another second, then it is cancelled."""
        self._is_closed.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._channel.close()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            sent_s = time.monotonic()
            try:
                self._take_turn()
            except HealthTurnError as failure:
                self._failure = str(failure)
                if failure.was_reached and self._silent_since_s is None:
                    self._silent_since_s = sent_s
            else:
                self._silent_since_s = time.monotonic()
                self._was_answered = True
                self._failure = None
            self._is_closed.wait(self._timeout_s / 5 if self._was_answered else _START_INTERVAL_S)

    def _take_turn(self) -> None:
        request = _health_request(slot_timeout_s=self._timeout_s / 4)
        try:
            # To the stream's end: leaving early cancels it, and that can keep Triton from ever unloading the model.
            responses = list(self._triton.ModelStreamInfer(iter([request]), timeout=self._timeout_s))
        except grpc.RpcError as error:
            is_up = error.code() is not grpc.StatusCode.UNAVAILABLE
            raise HealthTurnError(f"{error.code().name}: {error.details()}", was_reached=is_up) from error
        except ValueError as error:  # gRPC raises it for a closed channel
            raise HealthTurnError(str(error), was_reached=False) from error
        for response in responses:
            is_full = response.error_message.startswith(_FULL)
            if response.error_message and not is_full:
                raise HealthTurnError(response.error_message)
            if is_full or any(out.name == "status" for out in response.infer_response.outputs):
                self._has_room = not is_full
                return
        raise HealthTurnError("the stream ended without a status")


def _health_request(slot_timeout_s: float) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=MODEL_NAME, id="health")
    request.parameters["sequence_id"].string_param = f"health-{secrets.token_hex(8)}"
    request.parameters["sequence_start"].bool_param = True
    request.parameters["sequence_end"].bool_param = True
    # Microseconds. Without it a request beyond Triton's sequence slots waits for ever, as if the model were dead.
    request.parameters["timeout"].int64_param = int(slot_timeout_s * 1e6)
    request.inputs.add(name="input_ids", datatype="INT32", shape=[1, 0])
    request.raw_input_contents.append(b"")
    return request
