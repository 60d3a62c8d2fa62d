"""The only file that speaks to Triton: requests become turns, a turn's answer becomes responses.

`execute` reads what came, posts it to the engine and returns. One thread sends the responses and watches for clients
that have gone, so that neither costs the engine's thread anything.
"""

from __future__ import annotations

import gc
import json
import logging
import queue
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils  # noqa: TID251

from microturn.admin.operations import Operations
from microturn.admin.socket_server import AdminSocket
from microturn.engine import Engine
from microturn.errors import InternalError, InvalidArgument, MicroturnError
from microturn.loading import start_engine
from microturn.options import SessionOptions, parse_parameters
from microturn.settings import Settings
from microturn.slot_keeper import SlotKeeper, num_slots_of
from microturn.telemetry.log_lines import LogThread
from microturn.telemetry.reporting import Reporting
from microturn.turn import EmbedInput, TextInput, TokenInput, Turn, TurnInput, TurnOutput, TurnRequest, TurnSink

log = logging.getLogger(__name__)

Answer = TurnOutput | MicroturnError

_START, _END = 1, 2

# How often the sender asks whether clients are still there. Asking costs Triton 60 µs a turn.
_CANCEL_POLL_S = 0.1

# Keys of config.pbtxt's parameters that tell clients something and the engine nothing.
_ABOUT = ("protocol_version", "model_name", "model_fingerprint")
_PUBLISHED = (*_ABOUT, "limits")


class TritonPythonModel:
    """What Triton's Python backend loads."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the model; Triton calls the instance ready when this returns."""
        self._log = LogThread(sys.stderr)
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
            self._engine = start_engine(settings)
            self._slots = SlotKeeper(pb_utils, num_slots, args["model_name"], int(args["model_version"]))
            self._engine.watch_sessions(self._slots.slots)
            self._reporting = Reporting(
                self._engine, settings, self._log, pb_utils.MetricFamily, args["model_name"], about, self._slots.slots
            )
            self._admin = (
                AdminSocket(Path(settings.admin_socket), Operations(self._engine).answer)
                if settings.admin_socket
                else None
            )
        except MicroturnError as error:
            self._log.close()
            raise pb_utils.TritonModelException(str(error)) from error
        self._responses = ResponseThread(self._engine, self._reporting)
        # What libraries and the model brought stays for good. To look through it for garbage takes 165 ms, in which
        # nobody's turn goes on.
        gc.collect()
        gc.freeze()

    def execute(self, requests: list[Any]) -> None:
        """Posts the turns of several sessions."""
        for request in requests:
            if self._slots.take(request):
                continue
            stream = ResponseStream(request.get_response_sender(), self._responses)
            sink = self._slots.sink_of(request, stream)
            turn = Turn(_turn_request(request, sink, self._engine.clock()))
            self._responses.watch(stream, turn)
            self._engine.submit(turn)

    def finalize(self) -> None:
        """Ends the turns that run, and the threads."""
        if self._admin is not None:
            self._admin.close()
        self._engine.stop()
        self._slots.stop()
        self._responses.stop()
        self._reporting.stop()
        self._log.close()


def _turn_request(request: Any, sink: TurnSink, arrived_s: float) -> TurnRequest:
    """Reads a request; what is wrong with it travels on as a refusal, in the order of the session's turns."""
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


class ResponseStream:
    """The answer of one turn on its way to the client; the turn's sink."""

    def __init__(self, sender: Any, thread: ResponseThread) -> None:
        self._sender = sender
        self._thread = thread

    def put(self, output: TurnOutput) -> None:
        self._thread.post(self, output)

    def fail(self, error: MicroturnError) -> None:
        self._thread.post(self, error)

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
    if output.appended_ids is not None:
        tensors.append(pb_utils.Tensor("appended_ids", np.array([output.appended_ids], np.int32)))
    if output.status is not None:
        tensors.append(pb_utils.Tensor("status", np.array([[json.dumps(asdict(output.status)).encode()]], np.object_)))
    return tensors


def _packed(answers: list[Answer]) -> Answer:
    """What a turn answered since the last response, as one response."""
    last = answers[-1]
    if isinstance(last, MicroturnError):
        return last  # what was generated before it is rolled back
    return TurnOutput.joined([answer for answer in answers if isinstance(answer, TurnOutput)])


class ResponseThread:
    """Sends what turns answer, packing what is ready together, and tells the engine of clients that have gone.

    Args:
        engine: is told which turns nobody waits for any more.
        reporting: is told which turns were answered.
    """

    def __init__(self, engine: Engine, reporting: Reporting) -> None:
        self._engine = engine
        self._reporting = reporting
        self._posts: queue.SimpleQueue[tuple[ResponseStream, Turn | Answer] | None] = queue.SimpleQueue()
        self._unanswered: dict[ResponseStream, Turn] = {}
        self._next_poll_s = 0.0
        self._thread = threading.Thread(target=self._run, name="microturn-responses", daemon=True)
        self._thread.start()

    def watch(self, stream: ResponseStream, turn: Turn) -> None:
        """Asks from now on whether the turn's client is still there."""
        self._posts.put((stream, turn))

    def post(self, stream: ResponseStream, answer: Answer) -> None:
        """Hands on a piece of an answer."""
        self._posts.put((stream, answer))

    def stop(self) -> None:
        """Ends the thread, after it has sent what was posted."""
        self._posts.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_stopping = False
        while not is_stopping:
            ready: dict[ResponseStream, list[Answer]] = {}
            for post in self._take_posts():
                if post is None:
                    is_stopping = True
                    continue
                stream, item = post
                if isinstance(item, Turn):
                    self._unanswered[stream] = item
                else:
                    ready.setdefault(stream, []).append(item)
            for stream, answers in ready.items():
                self._send(stream, answers)
            self._poll_cancelled()

    def _take_posts(self) -> list[tuple[ResponseStream, Turn | Answer] | None]:
        """Waits for a post and takes what came with it; nothing when it is time to ask about clients."""
        posts: list[tuple[ResponseStream, Turn | Answer] | None] = []
        try:
            posts.append(self._posts.get(timeout=_CANCEL_POLL_S if self._unanswered else None))
            while True:
                posts.append(self._posts.get_nowait())
        except queue.Empty:
            return posts

    def _send(self, stream: ResponseStream, answers: list[Answer]) -> None:
        answer = _packed(answers)
        begun_s = self._engine.clock()
        try:
            stream.send(answer)
        except Exception:
            # The turn has ended in the engine; only its client can be affected.
            log.exception("a response could not be sent")
        end = answer if isinstance(answer, MicroturnError) else answer.status
        if end is not None:
            turn = self._unanswered.pop(stream, None)
            if turn is not None:
                self._reporting.answered(turn, end, begun_s)

    def _poll_cancelled(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + _CANCEL_POLL_S
        for stream, turn in self._unanswered.items():
            if stream.is_cancelled():
                self._engine.cancel(turn)
