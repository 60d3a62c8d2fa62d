"""The log of the model process: a JSON object per line, written by a separate thread.

A logging call only queues a record, so that a slowly read pipe blocks no other thread. The queue is bounded; records
beyond it are dropped and counted. Lines are collected for a moment, except for errors.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Protocol

from microturn.telemetry.batch_thread import BatchThread

_MAX_WAITING = 10_000
# How long lines are collected before they are written.
_PAUSE_S = 0.1
# How long `close` waits for a stuck writer.
_PATIENCE_S = 1.0


class JsonLines(logging.Formatter):
    """Formats a record as a line: time, level, logger, message, then its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LineStream(Protocol):
    """Where lines go."""

    def write(self, lines: str, /) -> object: ...

    def flush(self) -> None: ...


class LogThread:
    """Writes all that this process logs, from level `info` on.

    Args:
        stream: where the lines go.
    """

    def __init__(self, stream: LineStream) -> None:
        self._stream = stream
        self._lines = JsonLines()
        self._records = BatchThread(
            "microturn-log", self._write, pause_s=_PAUSE_S, max_waiting=_MAX_WAITING, max_at_once=_MAX_WAITING
        )
        self._handler = _Putting(self._records)
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(logging.INFO)

    @property
    def num_dropped(self) -> int:
        """Lines that were dropped because the queue was full or writing failed."""
        return self._records.num_dropped

    def close(self) -> None:
        """Writes the queued lines and stops logging; gives up if the stream is blocked."""
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()

    def _write(self, records: list[logging.LogRecord]) -> None:
        try:
            self._stream.write("".join(self._line_of(record) for record in records))
            self._stream.flush()
        except (OSError, ValueError):  # the reader has gone, or the stream is closed
            self._records.num_dropped += len(records)

    def _line_of(self, record: logging.LogRecord) -> str:
        try:
            return self._lines.format(record) + "\n"
        except Exception:  # a field that JSON cannot hold: the line is dropped
            self._handler.handleError(record)
            return ""


class _Putting(logging.Handler):
    """Queues a record unformatted: the writer thread formats it."""

    def __init__(self, records: BatchThread[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # An argument may change before the line is written.
            record.msg, record.args = record.getMessage(), None
        except Exception:  # wrong arguments must not fail in the logging caller
            self.handleError(record)
            return
        self._records.put(record, is_urgent=record.levelno >= logging.WARNING)

    def close(self) -> None:
        """Writes the queued lines; also called by `logging.shutdown`, before a process ends at once."""
        super().close()
        self._records.close(_PATIENCE_S)
