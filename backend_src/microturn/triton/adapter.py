"""The Triton model: converts requests to turns, and a turn's answers to responses.

`execute` reads requests, posts them to the engine and returns; `responses` sends the answers.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # noqa: TID251
from transformers.utils.logging import disable_progress_bar

from microturn.admin.fleet import Fleet
from microturn.admin.operations import Operations
from microturn.admin.saver import Saver
from microturn.admin.socket_server import AdminSocket
from microturn.engine.engine import Engine
from microturn.engine.loading import start_engine
from microturn.errors import InternalError, InvalidArgument, MicroturnError
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput, TurnInput
from microturn.sessions.options import SessionOptions, parse_parameters
from microturn.sessions.turn import Turn, TurnOutput, TurnRequest, TurnSink
from microturn.settings import Settings
from microturn.telemetry.log_lines import LogThread
from microturn.triton.reporting import Reporting
from microturn.triton.responses import Answer, Responses, ResponseStream, ResponseThread
from microturn.triton.slot_keeper import SlotKeeper, num_slots_of

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
            self._fleet = Fleet.of(settings)
            peers = None if self._fleet is None else self._fleet.peers
            engine = start_engine(settings, None if peers is None else peers.fetch)
            slots = SlotKeeper(pb_utils, num_slots, args["model_name"], int(args["model_version"]))
            engine.watch_sessions(slots.slots)
            self._reporting = Reporting(
                engine, settings, self._log, pb_utils.MetricFamily, args["model_name"], about, slots.slots
            )
            self._saver = (
                Saver(engine, engine.snapshots, settings.snapshot_every_s)
                if engine.snapshots is not None and settings.snapshot_every_s
                else None
            )
            operations = Operations(engine, peers, self._stop_moving)
            self._admin = AdminSocket(Path(settings.admin_socket), operations.answer) if settings.admin_socket else None
            if self._fleet is not None:
                self._fleet.join(engine)
        except MicroturnError as error:
            self._log.close()
            raise pb_utils.TritonModelException(str(error)) from error
        self.serve(engine, Responses(engine.cancel, self._reporting.answered, engine.clock), slots)
        self._reporting.watch(self._responses)
        self._response_thread = ResponseThread(self._responses)
        # Objects of libraries and the model are permanent. Scanning them for garbage stops all turns for 165 ms.
        gc.collect()
        gc.freeze()
        gc.enable()

    def _stop_moving(self) -> None:
        """Sessions are neither saved nor moved any more but for whoever called this."""
        if self._saver is not None:
            self._saver.close()
        if self._fleet is not None:
            self._fleet.stop_rebalancing()

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
        self._stop_moving()
        if self._fleet is not None:
            self._fleet.leave()
        if self._admin is not None:
            self._admin.close()
        self._engine.stop()
        self._slots.stop()
        self._response_thread.stop()
        self._reporting.stop()
        self._log.close()


def _turn_request(request: Any, sink: TurnSink, arrived_s: float) -> TurnRequest:
    """Reads a request; an error in it is passed on as a refusal, to keep the order of the session's turns."""
    flags = request.flags()
    given: TurnInput = TokenInput(())
    options: dict[str, Any] = {}
    session_options = SessionOptions()
    refusal = None
    try:
        options, session_options = parse_parameters(request.parameters(), start=bool(flags & _START))
        given = _read_input(request)
    except MicroturnError as error:
        refusal = error
    except Exception as error:
        log.exception("a request could not be read")
        refusal = InternalError(f"the request could not be read: {error}")
    return TurnRequest(
        session_id=request.correlation_id(),
        input=given,
        sink=sink,
        arrived_s=arrived_s,
        start=bool(flags & _START),
        end=bool(flags & _END),
        options=options,
        session_options=session_options,
        refusal=refusal,
    )


def _read_input(request: Any) -> TurnInput:
    inputs = {tensor.name(): tensor for tensor in request.inputs()}
    if len(inputs) != 1:
        raise InvalidArgument(f"a turn has one input, not {len(inputs)} ({', '.join(sorted(inputs))}): send one")
    name, tensor = inputs.popitem()
    array = tensor.as_numpy()
    num_dims = 3 if name == "input_embeds" else 2
    if array.ndim != num_dims or array.shape[0] != 1:
        raise InvalidArgument(f"{name} has shape {list(array.shape)}: it is [1, n{', hidden' * (num_dims - 2)}]")
    match name:
        case "input_ids":
            return TokenInput(tuple(array[0].tolist()))
        case "input_embeds":
            return EmbedInput(torch.from_numpy(array[0].copy()))
        case _:
            return TextInput(_read_text(array))


def _read_text(array: Any) -> str:
    if array.size != 1:
        raise InvalidArgument(f"text_input has {array.size} elements: send one string")
    try:
        return str(array.item().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"text_input is not UTF-8 at byte {error.start}: send whole characters") from None


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
            is_final = True
        else:
            response = pb_utils.InferenceResponse(output_tensors=_tensors(answer))
            is_final = answer.status is not None
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0)


def _tensors(output: TurnOutput) -> list[Any]:
    tensors = []
    if output.token_ids:
        tensors.append(pb_utils.Tensor("output_ids", np.array([output.token_ids], np.int32)))
        tensors.append(pb_utils.Tensor("output_position", np.array([[output.position]], np.int32)))
    if output.text:
        tensors.append(pb_utils.Tensor("text_output", np.array([[output.text.encode()]], np.object_)))
    if output.logprobs:
        tensors.append(pb_utils.Tensor("logprobs", np.array([output.logprobs], np.float32)))
    if output.top_logprobs:
        top = np.array(output.top_logprobs)[None]  # [1, tokens, likeliest, 2]
        tensors.append(pb_utils.Tensor("top_ids", top[..., 0].astype(np.int32)))
        tensors.append(pb_utils.Tensor("top_logprobs", top[..., 1].astype(np.float32)))
    if output.appended_ids is not None:
        tensors.append(pb_utils.Tensor("appended_ids", np.array([output.appended_ids], np.int32)))
    if output.status is not None:
        tensors.append(pb_utils.Tensor("status", np.array([[json.dumps(asdict(output.status)).encode()]], np.object_)))
    return tensors
