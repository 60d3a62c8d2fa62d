"""Releases Triton's sequence slots: sends the control requests that `sequence_slots` orders, from within the model.

A model can send requests to itself (Triton's "business logic scripting"). They pass the sequence batcher like a
client's and reach `execute`, where `take` recognises them.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from microturn.errors import InvalidArgument, MicroturnError
from microturn.hosts.triton.sequence_slots import Control, SequenceSlots
from microturn.sessions.turn import SessionId, TurnOutput, TurnSink

log = logging.getLogger(__name__)

# A control request takes half a millisecond; two at a time keep up with any number of clients.
_NUM_SENDERS = 2
# Timeout of a START, which would wait for ever if no slot is free.
_START_TIMEOUT_US = 1_000_000
_OVERDUE_POLL_S = 0.25


def num_slots_of(model_config: Mapping[str, Any]) -> int:
    """The number of Triton's sequence slots in the model configuration that `initialize` gets.

    Raises:
        InvalidArgument: the model has no sequence batcher with the "oldest" strategy.
    """
    try:
        return int(model_config["sequence_batching"]["oldest"]["max_candidate_sequences"])
    except KeyError as error:
        raise InvalidArgument("the model's config.pbtxt has no sequence_batching { oldest { … } }") from error


class SlotKeeper:
    """Tracks Triton's sequence slots and releases them.

    Args:
        triton: `triton_python_backend_utils`.
        num_slots: how many there are.
        model_name: that of this model in Triton's repository.
        model_version: likewise.

    Attributes:
        slots: the state of the slots.
    """

    def __init__(self, triton: Any, num_slots: int, model_name: str, model_version: int) -> None:
        self._triton = triton
        self.slots = SequenceSlots(num_slots, self._order)
        self._model = {"model_name": model_name, "model_version": model_version}
        # Secret, so that no client can send it.
        self._names = {control: f"microturn-{control.name}-{secrets.token_hex(16)}" for control in Control}
        self._orders: queue.SimpleQueue[tuple[SessionId, Control] | None] = queue.SimpleQueue()
        self._is_stopping = threading.Event()
        self._threads = [threading.Thread(target=self._send_orders, daemon=True) for _ in range(_NUM_SENDERS)]
        self._threads.append(threading.Thread(target=self._release_overdue, daemon=True))
        for thread in self._threads:
            thread.name = "microturn-slots"
            thread.start()

    def take(self, request: Any) -> bool:
        """Notes a request's sequence flags; returns True for a control request, which is not a turn."""
        flags = Control(request.flags() & (Control.START | Control.END))
        if not flags:
            return False
        session_id = request.correlation_id()
        if request.request_id() == self._names.get(flags):
            request.get_response_sender().send(flags=self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self.slots.arrived(session_id, flags)
            return True
        if flags & Control.END:
            self.slots.end_seen(session_id)
        else:
            self.slots.start_seen(session_id)
        return False

    def sink_of(self, request: Any, sink: TurnSink) -> TurnSink:
        """The sink for a turn's answer; if the turn opens a sequence, it reports to the slots first."""
        opens = request.flags() & (Control.START | Control.END) == Control.START
        return _OpeningSink(sink, request.correlation_id(), self.slots) if opens else sink

    def stop(self) -> None:
        """Ends the threads and sends all waiting answers."""
        self._is_stopping.set()
        for _ in range(_NUM_SENDERS):
            self._orders.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)
        self.slots.release_overdue(max_wait_s=0.0)

    def _order(self, session_id: SessionId, control: Control) -> None:
        self._orders.put((session_id, control))

    def _send_orders(self) -> None:
        while not self._is_stopping.is_set():
            order = self._orders.get()
            if order is None:
                return
            session_id, control = order
            try:
                error = self._send(session_id, control)
            except Exception as raised:
                log.exception("failed to release Triton's slot of session %s", session_id)
                error = str(raised)
            if error is not None:
                self.slots.failed(session_id)

    def _send(self, session_id: SessionId, control: Control) -> str | None:
        """Sends a control request and waits for the model's answer. Returns Triton's error, if any."""
        request = self._triton.InferenceRequest(
            request_id=self._names[control],
            correlation_id=session_id,
            flags=int(control),
            timeout=_START_TIMEOUT_US if control is Control.START else 0,
            inputs=[self._triton.Tensor("input_ids", np.empty((1, 0), np.int32))],
            requested_output_names=[],
            **self._model,
        )
        errors = [str(response.error().message()) for response in request.exec(decoupled=True) if response.has_error()]
        return errors[0] if errors else None

    def _release_overdue(self) -> None:
        while not self._is_stopping.wait(_OVERDUE_POLL_S):
            self.slots.release_overdue()


class _OpeningSink:
    """Reports the outcome of a START to the slots; a refusal is sent once its slot has been released."""

    def __init__(self, sink: TurnSink, session_id: SessionId, slots: SequenceSlots) -> None:
        self._sink = sink
        self._session_id = session_id
        self._slots = slots
        self._is_decided = False

    def put(self, output: TurnOutput) -> None:
        if not self._is_decided:
            self._is_decided = True
            self._slots.accepted(self._session_id)
        self._sink.put(output)

    def fail(self, error: MicroturnError) -> None:
        if self._is_decided:
            self._sink.fail(error)
        else:
            self._is_decided = True
            self._slots.refused(self._session_id, lambda: self._sink.fail(error))
