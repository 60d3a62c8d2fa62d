"""What a turn yields of a tool call: that it began, its arguments as they come, and the whole of it. Frozen data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from microturn_client._errors import InvalidArgument


@dataclass(frozen=True)
class ToolCallBegun:
    """The model calls a tool.

    Attributes:
        id: of the call; the model's own where it writes one.
        name: of the tool, as the model wrote it.
    """

    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """A piece of a call's arguments.

    Attributes:
        id: of the call.
        json: the next characters of their JSON.
    """

    id: str
    json: str


@dataclass(frozen=True)
class ToolCall:
    """A call that has ended; give its result to the session's ``tool_result``.

    Attributes:
        id: of the call.
        name: of the tool, as the model wrote it.
        arguments: by name; None where they are no JSON object, or the answer ended before they did.
        json: their JSON, as far as it came.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] | None
    json: str


ToolEvent = ToolCallBegun | ToolArguments | ToolCall


def result_text(call: ToolCall, result: object) -> str:
    """A result as the model reads it.

    Raises:
        InvalidArgument: it is neither text nor JSON.
    """
    try:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"the result of '{call.name}' is neither text nor JSON: {error}") from None
