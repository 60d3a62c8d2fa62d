"""The log of the model process: a JSON object per line, written by a thread of its own.

Who logs only puts a record into a queue: writing to a pipe that somebody reads slowly holds up nobody. The queue is
bounded; what it does not hold is counted and lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

_MAX_WAITING = 10_000


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

    Attributes:
        num_dropped: records that found the queue full.
    """

    def __init__(self, stream: TextIO) -> None:
        self.num_dropped = 0
        self._records: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING)
        writer = logging.StreamHandler(stream)
        writer.setFormatter(JsonLines())
        self._listener = QueueListener(self._records, writer)
        self._handler = _Putting(self._records, self)
        self._listener.start()
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(logging.INFO)

    def close(self) -> None:
        """Writes what waits, and logs no more."""
        logging.getLogger().removeHandler(self._handler)
        with contextlib.suppress(queue.Full):  # nobody reads the lines, and the thread goes with the process
            self._listener.stop()


class _Putting(QueueHandler):
    """Hands a record on as it is: its text is made by who writes it."""

    def __init__(self, records: queue.Queue[logging.LogRecord], owner: LogThread) -> None:
        super().__init__(records)
        self._owner = owner

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # An argument may change before the line is written, a traceback would keep its frames alive.
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            super().enqueue(record)
        except queue.Full:
            self._owner.num_dropped += 1
