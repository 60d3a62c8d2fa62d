"""The Triton model: converts requests to turns, and a turn's answers to responses.

`execute` reads requests, posts them to the engine and returns; `responses` sends the answers.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from typing import Any

import triton_python_backend_utils as pb_utils  # noqa: TID251
from transformers.utils.logging import disable_progress_bar

from microturn.admin.fleet import Fleet
from microturn.engine.engine import Engine
from microturn.errors import MicroturnError
from microturn.hosts.answers import Answer, is_last, output_tensors
from microturn.hosts.hosted_engine import HostedEngine
from microturn.hosts.reporting import Reporting
from microturn.hosts.requests import turn_request
from microturn.hosts.triton.responses import Responses, ResponseStream, ResponseThread
from microturn.hosts.triton.slot_keeper import SlotKeeper, num_slots_of
from microturn.sessions.turn import Status, Turn, TurnRequest, TurnSink
from microturn.settings import Settings
from microturn.telemetry.log_lines import LogThread
from microturn.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_START, _END = 1, 2

# Parameters in config.pbtxt for clients, not for the engine.
_ABOUT = ("protocol_version", "model_name", "model_fingerprint")
_PUBLISHED = (*_ABOUT, "limits")


class TritonPythonModel:
    """The class that Triton's Python backend loads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the model; the instance is ready when this returns."""
        gc.freeze()  # what was imported
        self._log = LogThread(sys.stderr)
        disable_progress_bar()  # stderr is a log
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        values = {name: value["string_value"] for name, value in parameters.items() if name not in _PUBLISHED}
        about = {name: parameters[name]["string_value"] for name in _ABOUT if name in parameters}
        try:
            num_slots = num_slots_of(config)
            asked = Settings.from_strings(values)
            settings = asked.within_slots(num_slots)
            if settings.max_sessions < asked.max_sessions:
                log.warning("max_sessions is %d: there are %d sequence slots", settings.max_sessions, num_slots)
            self._hosted = HostedEngine(settings, Fleet.of(settings))
            engine = self._hosted.engine
            slots = SlotKeeper(pb_utils, num_slots, args["model_name"], int(args["model_version"]))
            engine.watch_sessions(slots.slots)
            engine.recorder.metrics.sequence_slots_limit.set(num_slots)
            self.serve(engine, Responses(engine.cancel, self._answered, engine.clock), slots)
            self._reporting = Reporting(
                engine, settings, self._log, pb_utils.MetricFamily, args["model_name"], about, self._measure
            )
            self._hosted.open()
        except MicroturnError as error:
            self._log.close()
            raise pb_utils.TritonModelException(str(error)) from error
        self._response_thread = ResponseThread(self._responses)

    def _answered(self, turn: Turn, answer: Status | MicroturnError, begun_s: float) -> None:
        self._reporting.answered(turn, answer, begun_s)

    def _measure(self, metrics: Metrics) -> None:
        """Sets what Triton's host adds to the metrics."""
        metrics.turns_withheld.set(self._responses.num_withheld)
        for state, num_slots in self._slots.slots.count().items():
            metrics.sequence_slots.set(num_slots, state)

    def serve(self, engine: Engine, responses: Responses, slots: SlotKeeper) -> None:
        """Sets the engine for turns, the responses for their answers, and the keeper of sequence slots."""
        self._engine = engine
        self._responses = responses
        self._slots = slots

    def execute(self, requests: list[Any]) -> None:
        """Posts requests of several sessions to the engine."""
        for request in requests:
            if self._slots.take(request):
                continue
            stream = ResponseStream(_TritonSender(request.get_response_sender()), self._responses)
            sink = self._slots.sink_of(request, stream)
            turn = Turn(_turn_request(request, sink, self._engine.clock()))
            self._responses.watch(stream, turn)
            self._engine.submit(turn)

    def finalize(self) -> None:
        """Ends running turns and the threads."""
        self._hosted.close()
        self._slots.stop()
        self._response_thread.stop()
        self._reporting.stop()
        self._log.close()


def _turn_request(request: Any, sink: TurnSink, arrived_s: float) -> TurnRequest:
    flags = request.flags()
    return turn_request(
        request.correlation_id(),
        start=bool(flags & _START),
        end=bool(flags & _END),
        parameters=request.parameters,
        tensors=lambda: {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
        sink=sink,
        arrived_s=arrived_s,
    )


class _TritonSender:
    """Triton's response sender of one request."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def end(self) -> None:
        """Sends the final flag without a response; visible only to clients that enable empty final responses."""
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def send(self, answer: Answer) -> None:
        """Sends a response; the one that ends the turn carries Triton's final flag."""
        if isinstance(answer, MicroturnError):
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(answer)))
        else:
            tensors = [pb_utils.Tensor(name, array) for name, array in output_tensors(answer).items()]
            response = pb_utils.InferenceResponse(output_tensors=tensors)
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last(answer) else 0)
