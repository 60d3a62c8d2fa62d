"""The log of the model process: a JSON object per line, written by a thread of its own.

Who logs only puts a record into a queue: writing to a pipe that somebody reads slowly holds up nobody. The queue is
bounded; what it does not hold is counted and lost. Lines wait for each other for a moment, except for what is grave: a
thread that woke for each would take Python's lock from the engine's just as often.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from datetime import UTC, datetime
from typing import TextIO

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
        return json.dumps(line, default=str)


class LogThread:
    """Takes all that this process logs, from `info` on.

    Args:
        stream: where the lines go.

    Attributes:
        num_dropped: lines that found the queue full, or could not be written.
    """

    def __init__(self, stream: TextIO) -> None:
        self.num_dropped = 0
        self._stream = stream
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
        self._is_closing = False
        self._is_urgent = threading.Event()
        self._handler = _Putting(self)
        self._handler.setFormatter(JsonLines())
        self._thread = threading.Thread(target=self._run, name="microturn-log", daemon=True)
        self._thread.start()
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(logging.INFO)

    def put(self, record: logging.LogRecord) -> None:
        """Hands a record on; never waits."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1
        if record.levelno >= logging.WARNING:
            self._is_urgent.set()

    def close(self) -> None:
        """Writes what waits, and logs no more; where nobody reads the lines, that is given up."""
        logging.getLogger().removeHandler(self._handler)
        self._is_closing = True
        self._is_urgent.set()
        self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._is_urgent.wait(_PAUSE_S)
            self._is_urgent.clear()
            is_last = self._is_closing
            records = [self._records.get_nowait() for _ in range(self._records.qsize())]
            self._write([self._handler.format(record) for record in records])

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        try:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads any more, or the stream is closed
            self.num_dropped += len(lines)


class _Putting(logging.Handler):
    """Hands a record on as it is: its text is made by who writes it."""

    def __init__(self, owner: LogThread) -> None:
        super().__init__()
        self._owner = owner

    def emit(self, record: logging.LogRecord) -> None:
        # An argument may change before the line is written.
        record.msg, record.args = record.getMessage(), None
        self._owner.put(record)
