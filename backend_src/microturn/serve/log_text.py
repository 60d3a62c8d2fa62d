"""Log lines of the model process as text for a terminal. It writes them as JSON objects (see `telemetry.log_lines`)."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any


def as_text(line: str) -> str:
    """Formats one line: time of day, level unless it is info, last part of the logger's name, event, fields.

    Returns:
        Such as ``05:20:35 sessions: session opened  session=4711 origin=new``, with a traceback in lines of its own.
        Control characters are escaped. A line that is no such JSON object is returned unchanged.
    """
    if not line.startswith("{"):
        return line
    try:
        return _format(**json.loads(line))
    except (ValueError, TypeError, AttributeError, RecursionError):  # another program's JSON
        return line


def _format(*, time: str, level: str, logger: str, event: str, traceback: str = "", **fields: Any) -> str:
    time_of_day = datetime.fromisoformat(time).astimezone().strftime("%H:%M:%S")
    severity = "" if level == "info" else f"{level.upper()} "
    head = _printable(f"{time_of_day} {severity}{logger.rpartition('.')[2]}: {event}")
    pairs = " ".join(f"{_value(name)}={_value(value)}" for name, value in fields.items())
    below = "".join(f"\n    {_printable(frame)}" for frame in traceback.splitlines())
    return (f"{head}  {pairs}" if pairs else head) + below


def _value(value: object) -> str:
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(' "='):
        return value
    return json.dumps(value, ensure_ascii=not str(value).isprintable())


def _printable(text: str) -> str:
    # A client chooses what stands in some lines, and must not steer the terminal.
    return text if text.isprintable() else json.dumps(text)[1:-1]
