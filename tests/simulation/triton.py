"""Triton's front: reads requests off streams, hands them to the model as the sequence batcher lets it, and writes back.

Knows the wire and the order of requests; knows no engine. What it does is what was measured of the real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import numpy as np

from microturn_client._messages_pb2 import ModelInferRequest, ModelStreamInferResponse
from simulation.batcher import SequenceBatcher, SequenceId
from simulation.network import Stream
from simulation.pb_utils import InferenceRequest, InferenceResponse, ResponseSender, Tensor
from simulation.world import World

NOT_HEALTHY = "Stub process 'streaming_llm_0_0' is not healthy."

_START, _END = 1, 2
_DTYPES = {"INT32": np.int32, "FP32": np.float32}


class Answered(Protocol):
    """Where the answers of a request go."""

    @property
    def is_cancelled(self) -> bool: ...

    def deliver(self, message: ModelStreamInferResponse) -> None: ...


@dataclass(eq=False)
class Control:
    """A request of the model's to itself, as Triton's business logic scripting has them.

    Attributes:
        on_error: is told that Triton did not take it.
    """

    message: ModelInferRequest
    sequence_id: SequenceId
    starts: bool
    on_error: Callable[[], None]
    is_cancelled: bool = False

    def deliver(self, message: ModelStreamInferResponse) -> None:
        """An answer came."""
        if message.error_message:
            self.on_error()


@dataclass(eq=False)
class Arrived:
    """A request that has come."""

    stream: Answered
    message: ModelInferRequest
    sequence_id: SequenceId
    starts: bool
    ends: bool

    @property
    def is_cancelled(self) -> bool:
        return self.stream.is_cancelled


class Triton:
    """The server before its model process.

    Attributes:
        batcher: its sequences.
        streams: those that are open here.
        is_stub_alive: whether the model process takes requests.

    Args:
        world: the clock.
        random: of its delays.
        num_slots: candidate slots of the sequence batcher.
        idle_s: its idle time.
        execute: the model's.
    """

    def __init__(
        self,
        world: World,
        random: Random,
        num_slots: int,
        idle_s: float,
        execute: Callable[[list[InferenceRequest]], None],
    ) -> None:
        self.batcher: SequenceBatcher[Arrived] = SequenceBatcher(num_slots, idle_s, self._refuse, self._end_empty)
        self.streams: dict[Stream, None] = {}
        self.is_stub_alive = True
        self.is_frozen = False
        self._world = world
        self._random = random
        self._idle_s = idle_s
        self._execute = execute
        self._is_due = False

    def receive(self, stream: Stream, message: ModelInferRequest) -> None:
        """A request has come on a stream."""
        self.streams[stream] = None
        said = message.parameters
        sequence_id = said["sequence_id"].string_param or said["sequence_id"].int64_param
        request = Arrived(
            stream, message, sequence_id, _flag(message, "sequence_start"), _flag(message, "sequence_end")
        )
        self._put(request)

    def receive_from_model(self, control: Control, timeout_s: float) -> None:
        """The model has sent itself a request, to end a sequence or to start one."""
        request = Arrived(control, control.message, control.sequence_id, control.starts, not control.starts)
        self._put(request)
        if control.starts:
            self._world.after(timeout_s, lambda: self.batcher.give_up(request, "Request timeout expired"))

    def _put(self, request: Arrived) -> None:
        if not self.is_stub_alive:
            self._refuse(request, NOT_HEALTHY)
        else:
            self.batcher.put(request, self._world.now_s)
            self._world.after(self._idle_s, self._reap)
            self.wake()

    def forget(self, stream: Stream) -> None:
        """A stream is known to be gone."""
        self.streams.pop(stream, None)
        self.wake()

    def wake(self) -> None:
        """There may be something to execute."""
        if not self._is_due and self.batcher.has_ready and not self.is_frozen:
            self._is_due = True
            self._world.after(self._random.uniform(1e-4, 1e-3), self._dispatch)

    def _dispatch(self) -> None:
        self._is_due = False
        if self.is_frozen or not self.is_stub_alive:
            return
        requests = [self._as_seen_by_model(request) for request in self.batcher.take()]
        if requests:
            self._execute(requests)
        self.wake()

    def _reap(self) -> None:
        self.batcher.reap(self._world.now_s)
        self.wake()

    def _as_seen_by_model(self, request: Arrived) -> InferenceRequest:
        sender = ResponseSender(
            lambda response, is_final: self._respond(request, response, is_final=is_final),
            lambda: request.stream.is_cancelled,
        )
        message = request.message
        return InferenceRequest(
            message.id,
            request.sequence_id,
            _START * request.starts | _END * request.ends,
            _options_of(message),
            _inputs_of(message),
            sender,
        )

    def _respond(self, request: Arrived, response: InferenceResponse, *, is_final: bool) -> None:
        if response.error is not None:
            self._refuse(request, str(response.error))
            return
        if not response.output_tensors and not _flag(request.message, "triton_enable_empty_final_response"):
            return  # a mere final flag is told only to who has asked for it
        message = ModelStreamInferResponse()
        message.infer_response.id = request.message.id
        message.infer_response.parameters["triton_final_response"].bool_param = is_final
        for tensor in response.output_tensors:
            array = tensor.as_numpy()
            message.infer_response.outputs.add(name=tensor.name(), shape=array.shape)
            message.infer_response.raw_output_contents.append(_bytes_of(array))
        request.stream.deliver(message)

    def _refuse(self, request: Arrived, error: str) -> None:
        message = ModelStreamInferResponse(error_message=error)
        message.infer_response.id = request.message.id
        request.stream.deliver(message)

    def _end_empty(self, request: Arrived) -> None:
        self._respond(request, InferenceResponse(), is_final=True)


def _flag(message: ModelInferRequest, name: str) -> bool:
    return name in message.parameters and bool(message.parameters[name].bool_param)


def _options_of(message: ModelInferRequest) -> str:
    said = {}
    for name, value in message.parameters.items():
        if not name.startswith(("sequence_", "triton_")) and name not in ("priority", "timeout"):
            said[name] = getattr(value, value.WhichOneof("parameter_choice"))
    return json.dumps(said)


def _inputs_of(message: ModelInferRequest) -> list[Tensor]:
    inputs = []
    for given, content in zip(message.inputs, message.raw_input_contents, strict=True):
        if given.datatype == "BYTES":
            array: Any = np.array([[content[4:]]], np.object_)
        else:
            array = np.frombuffer(content, _DTYPES[given.datatype]).reshape(tuple(given.shape))
        inputs.append(Tensor(given.name, array))
    return inputs


def _bytes_of(array: Any) -> bytes:
    if array.dtype != np.object_:
        return bytes(array.tobytes())
    text: bytes = array.item()
    return len(text).to_bytes(4, "little") + text
