"""Exports the spans of turns to an OpenTelemetry collector, from a separate thread."""

from __future__ import annotations

import logging
import time

from microturn.telemetry.batch_thread import BatchThread
from microturn.telemetry.otlp import PATIENCE_S, Collector
from microturn.telemetry.spans import AnsweredTurn, spans_of

log = logging.getLogger(__name__)

_MAX_WAITING = 4096
_MAX_AT_ONCE = 256
# How long turns are collected before they are sent.
_PAUSE_S = 1.0


class SpanExporter:
    """Sends the spans of answered turns.

    Args:
        collector: where to.
        model: whose turns they are.
    """

    def __init__(self, collector: Collector, model: str) -> None:
        self._collector = collector
        self._model = model
        self._turns = BatchThread(
            "microturn-spans", self._send, pause_s=_PAUSE_S, max_waiting=_MAX_WAITING, max_at_once=_MAX_AT_ONCE
        )

    @property
    def num_dropped(self) -> int:
        """Turns whose spans were dropped because the collector did not take them in time."""
        return self._turns.num_dropped

    def put(self, answered: AnsweredTurn) -> None:
        """Queues a turn without blocking."""
        self._turns.put(answered)

    def stop(self) -> None:
        """Sends the queued turns, without retry; a collector that does not answer is not waited for."""
        self._turns.close(PATIENCE_S)

    def _send(self, answered: list[AnsweredTurn]) -> None:
        to, unix_offset_s = self._collector, time.time() - time.monotonic()
        spans = [span for one in answered for span in spans_of(one, unix_offset_s, self._model)]
        message = {
            "resourceSpans": [{"resource": to.resource, "scopeSpans": [{"scope": to.scope, "spans": spans}]}],
        }
        trouble = to.send(message, self._turns.is_closing)
        if trouble is not None:
            self._turns.num_dropped += len(answered)
            log.warning("spans of %d turns are lost: %s: %s", len(answered), to.url, trouble)
