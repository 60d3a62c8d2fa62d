"""Items of a realtime conversation as clients send them."""

from __future__ import annotations

from microturn_gateway.chat_tools import NO_RESULT
from microturn_gateway.conversation import Item, called, new_id
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields, read_text

_ROLES = ("user", "system", "assistant", "tool")
_PART_TYPES = ("input_text", "output_text", "text")
_MAX_ID_LEN = 128


def parse_item(value: object) -> Item:
    """A message, a call or the result of one.

    Raises:
        Refusal: it is none of these.
    """
    given = Fields(value, "item")
    given.ignore("object", "status")
    kind = given.take("type", str)
    item_id = _checked_id(given.take("id", str, new_id("item")), "item.id")
    if kind == "message":
        item = _message(given, item_id)
    elif kind == "function_call":
        name, arguments = given.take("name", str), given.take("arguments", str)
        item = called(item_id, given.take("call_id", str, new_id("call")), name, arguments)
    elif kind == "function_call_output":
        output = given.take("output", str) or NO_RESULT
        item = Item(item_id, "tool", output, call_id=given.take("call_id", str))
    else:
        message = "items are of type 'message', 'function_call' or 'function_call_output'"
        raise Refusal("unsupported_parameter", message, param="item.type")
    if not item.content:
        raise Refusal("missing_parameter", "an item needs text", param="item.content")
    given.end()
    return item


def _message(given: Fields, item_id: str) -> Item:
    role = given.take("role", str)
    if role not in _ROLES:
        raise Refusal("invalid_value", f"'item.role' must be one of {', '.join(_ROLES)}", param="item.role")
    return Item(item_id, role, read_text(given.take("content", list), "item.content", _PART_TYPES))


def _checked_id(value: str, param: str) -> str:
    if not 1 <= len(value) <= _MAX_ID_LEN or value == "root":
        raise Refusal("invalid_value", f"'{param}' must have 1 to {_MAX_ID_LEN} characters", param=param)
    return value
