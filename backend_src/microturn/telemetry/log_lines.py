"""The log of the model process: a JSON object per line, written by a thread of its own.

Who logs only puts a record into a queue: writing to a pipe that somebody reads slowly holds up nobody. The queue is
bounded; what it does not hold is counted and lost. Lines wait for each other for a moment, except for what is grave.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import TextIO

from microturn.telemetry.batch_thread import BatchThread

_MAX_WAITING = 10_000
# How long lines are collected before they are written.
_PAUSE_S = 0.1
# What closing waits for a writer that is stuck.
_PATIENCE_S = 1.0


class JsonLines(logging.Formatter):
    """A record as a line: when, how grave, who, what happened; then the fields that it brings."""

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


class LogThread:
    """Takes all that this process logs, from `info` on.

    Args:
        stream: where the lines go.
    """

    def __init__(self, stream: TextIO) -> None:
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
        """Lines that nobody took in time, or that could not be written."""
        return self._records.num_dropped

    def close(self) -> None:
        """Writes what waits, and logs no more; where nobody reads the lines, that is given up."""
        logging.getLogger().removeHandler(self._handler)
        self._records.close(_PATIENCE_S)

    def _write(self, records: list[logging.LogRecord]) -> None:
        try:
            self._stream.write("".join(self._line_of(record) for record in records))
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads any more, or the stream is closed
            self._records.num_dropped += len(records)

    def _line_of(self, record: logging.LogRecord) -> str:
        try:
            return self._lines.format(record) + "\n"
        except Exception:  # a field of no kind that JSON has: that line is lost, and the thread goes on
            self._handler.handleError(record)
            return ""


class _Putting(logging.Handler):
    """Hands a record on as it is: its text is made by who writes it."""

    def __init__(self, records: BatchThread[logging.LogRecord]) -> None:
        super().__init__()
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # An argument may change before the line is written.
            record.msg, record.args = record.getMessage(), None
        except Exception:  # arguments that do not fit the text are no reason to fail for who logs
            self.handleError(record)
            return
        self._records.put(record, is_urgent=record.levelno >= logging.WARNING)
