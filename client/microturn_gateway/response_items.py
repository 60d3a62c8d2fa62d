"""The items of a conversation as the Responses API has them, and the messages that they are for the model.

items       user "Weather?"   call a   call b   result b   result a   assistant "Fine."
messages    user              assistant         tool a     tool b     assistant
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from microturn_client import MessageRole
from microturn_gateway.chat_request import as_lines
from microturn_gateway.chat_tools import NO_RESULT, call_text
from microturn_gateway.context import Message
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields, read_text

_ROLES: dict[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_PART_TYPES = ("input_text", "output_text", "text", "refusal")
# Of an item, what a client sends back as it came and what no chat template reads.
_WITHOUT_MEANING = ("id", "status", "phase", "namespace", "caller", "created_by")


@dataclass(frozen=True, slots=True)
class Said:
    """A message."""

    role: MessageRole
    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """The model's call of a function, with its arguments as JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Returned:
    """What a function gave back."""

    call_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """An item of an earlier response, which a request names in its place.

    Attributes:
        item_id: of the item.
        path: where the request says so.
    """

    item_id: str
    path: str


ConversationItem = Said | Called | Returned
InputItem = ConversationItem | Reference


def parse_input(value: str | list[object]) -> tuple[InputItem, ...]:
    """The input of a request: a user's text, or items.

    Raises:
        Refusal: an item is of a kind that is not here, or not of the right shape.
    """
    if isinstance(value, str):
        return (Said("user", value),) if value else ()
    parsed = (_parse_item(Fields(item, f"input.{index}")) for index, item in enumerate(value))
    return tuple(item for item in parsed if item is not None)


def output_item(shown: Mapping[str, Any]) -> ConversationItem | None:
    """An item of a response's output, as clients see it; None for a call that was cut short before its end."""
    if shown["type"] == "message":
        return Said("assistant", shown["content"][0]["text"])
    if shown["status"] == "completed":
        return Called(shown["call_id"], shown["name"], shown["arguments"])
    return None


def num_chars_of(items: Sequence[ConversationItem]) -> int:
    """How much text they hold."""
    return sum(len(item.arguments) if isinstance(item, Called) else len(item.text) for item in items)


def gone_on(earlier: Sequence[ConversationItem], items: Sequence[ConversationItem]) -> tuple[ConversationItem, ...]:
    """The items of a response, then those of a request that goes on from it.

    LiveKit Agents repeats the answer that the earlier ones end with: its calls, and of its text what was heard. So no
    call stands there twice, and a first text with which the answer begins takes the place of the answer's.
    """
    called = {item.call_id for item in earlier if isinstance(item, Called)}
    new = [item for item in items if not isinstance(item, Called) or item.call_id not in called]
    start = next((place for place in range(len(earlier), 0, -1) if _kind(earlier[place - 1]) != "answer"), 0)
    answer = [item for item in earlier[start:] if isinstance(item, Said)]
    if answer and new and isinstance(new[0], Said) and new[0].role == "assistant":
        whole, heard = answer[-1].text.strip(), new[0].text.strip()
        if heard and whole.startswith(heard):
            said = answer[-1] if heard == whole else new[0]
            return (*(said if item is answer[-1] else item for item in earlier), *new[1:])
    return (*earlier, *new)


def check_results(items: Sequence[ConversationItem]) -> None:
    """Checks that each result is of a call that stands before it: a chat template could not say what it answers.

    Raises:
        Refusal: one is of none.
    """
    call_ids: set[str] = set()
    for item in items:
        if isinstance(item, Called):
            call_ids.add(item.call_id)
        elif isinstance(item, Returned) and item.call_id not in call_ids:
            message = f"there is no call '{item.call_id}' for this output to answer"
            raise Refusal("invalid_value", message, param="input")


def messages_of(instructions: str | None, items: Sequence[ConversationItem]) -> list[Message]:
    """What the model's context shall hold.

    What the model said and called in one answer is one message; results are in the order of the calls, since a chat
    template does not tell them apart.
    """
    messages = [Message("system", instructions)] if instructions else []
    call_ids: list[str] = []
    for kind, group in groupby(items, _kind):
        run = list(group)
        if kind == "answer":
            call_ids = [item.call_id for item in run if isinstance(item, Called)]
            messages += _answer(run)
        elif kind == "results":
            messages += _results(run, call_ids)
        else:
            messages += [Message(item.role, item.text) for item in run if isinstance(item, Said)]
    return as_lines(messages)


def _parse_item(fields: Fields) -> InputItem | None:
    """An item; None for one that no chat template shows to the model."""
    kind = fields.take("type", str, "message")
    if kind == "item_reference":
        reference = Reference(fields.take("id", str), fields.path("id"))
        fields.end()
        return reference
    fields.ignore(*_WITHOUT_MEANING)
    item: ConversationItem
    if kind == "message":
        role = fields.take("role", str)
        if role not in _ROLES:
            path = fields.path("role")
            raise Refusal("invalid_value", f"'{path}' must be one of {', '.join(_ROLES)}", param=path)
        item = Said(_ROLES[role], _take_text(fields, "content"))
    elif kind == "function_call":
        item = Called(fields.take("call_id", str), fields.take("name", str), fields.take("arguments", str))
        fields.ignore("parsed_arguments")
    elif kind == "function_call_output":
        item = Returned(fields.take("call_id", str), _take_text(fields, "output"))
        fields.ignore("name")  # the call says it
    elif kind == "reasoning":
        return None
    else:
        message = f"items of type '{kind}' are not supported here"
        raise Refusal("unsupported_parameter", message, param=fields.path("type"))
    fields.end()
    return item


def _take_text(fields: Fields, name: str) -> str:
    value: str | list[object] = fields.take(name, (str, list))
    return value if isinstance(value, str) else read_text(value, fields.path(name), _PART_TYPES)


def _kind(item: ConversationItem) -> str:
    if isinstance(item, Returned):
        return "results"
    return "answer" if isinstance(item, Called) or item.role == "assistant" else "others"


def _answer(run: Sequence[ConversationItem]) -> Iterator[Message]:
    """The messages of an answer; one with calls is written as `GeneratedText.piece` has it."""
    texts = [item.text for item in run if isinstance(item, Said)]
    calls = [call_text(item.name, item.arguments) for item in run if isinstance(item, Called)]
    if calls:
        yield Message("assistant", "".join(texts).strip() + "".join(calls))
    else:
        yield from (Message("assistant", text) for text in texts)


def _results(run: Sequence[ConversationItem], call_ids: Sequence[str]) -> Iterator[Message]:
    returned = [item for item in run if isinstance(item, Returned)]
    returned.sort(key=lambda item: call_ids.index(item.call_id) if item.call_id in call_ids else len(call_ids))
    yield from (Message("tool", item.text or NO_RESULT) for item in returned)
