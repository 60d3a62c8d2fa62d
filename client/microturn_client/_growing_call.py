"""One tool call while it is read: it tells its events as its parts become known."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

from microturn_client._answer_reader import MalformedError
from microturn_client._tool_events import ToolArguments, ToolCall, ToolCallBegun, ToolEvent

_ID_LEN = 9  # of letters and digits, as Mistral's templates want it


class GrowingCall:
    """A call as it is read.

    Args:
        told: gets its events.

    Attributes:
        id: the model's own, if it has told one before its name.
        name: None before it is known.
        json: its arguments, as far as they have come.
    """

    def __init__(self, told: Callable[[ToolEvent], None]) -> None:
        self.id: str | None = None
        self.name: str | None = None
        self.json = ""
        self._told = told
        self._num_told = 0

    def begin(self, name: str) -> None:
        self.name = name
        self.id = self.id or _new_id()
        self._told(ToolCallBegun(self.id, name))
        self._tell()

    def add(self, text: str) -> None:
        """More of its arguments."""
        self.json += text
        self._tell()

    def end(self) -> None:
        """No more of it comes.

        Raises:
            MalformedError: it has no name.
        """
        if self.name is None:
            raise MalformedError
        assert self.id is not None
        if self.json.startswith('"'):
            self.json = string_of(self.json)
        if self.json in ("", "null"):
            self.json = "{}"
        self._tell()
        self._told(ToolCall(self.id, self.name, _as_object(self.json), self.json))

    def break_off(self) -> None:
        """It is cut short, or no call."""
        if self.name is not None:
            assert self.id is not None
            self._told(ToolCall(self.id, self.name, None, self.json))

    def _tell(self) -> None:
        # Some models write the JSON as a JSON string, or null: it is told once it is whole.
        is_held = self.json.startswith('"') or "null".startswith(self.json)
        if self.name is not None and len(self.json) > self._num_told and not is_held:
            assert self.id is not None
            self._told(ToolArguments(self.id, self.json[self._num_told :]))
            self._num_told = len(self.json)


def _new_id() -> str:
    """A random id."""
    return secrets.token_hex(_ID_LEN)[:_ID_LEN]


def string_of(value: str) -> str:
    """A JSON string's text; of other values, how they are written."""
    try:
        said = json.loads(value)
    except ValueError:
        raise MalformedError from None
    return said if isinstance(said, str) else value


def _as_object(text: str) -> dict[str, Any] | None:
    """The object that JSON is; None where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
