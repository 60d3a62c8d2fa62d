"""The items of a realtime conversation, as a value: every edit gives another one."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from microturn_client import MessageRole
from microturn_gateway.chat_tools import call_text
from microturn_gateway.context import Content, Message
from microturn_gateway.failures import Refusal


def new_id(kind: str) -> str:
    """A random id, such as `item_4fd1…`."""
    return f"{kind}_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class Item:
    """One message, call or result of a call.

    Attributes:
        status: `completed`, `incomplete` (cut short) or `in_progress` (the text buffer's, not committed yet).
        call_id: of a call and of its result; empty for a message.
        name: of what is called; empty for all but calls.
        arguments: of a call, as the model wrote them.
    """

    id: str
    role: MessageRole
    content: Content
    status: str = "completed"
    call_id: str = ""
    name: str = ""
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        """The item in the shape of the Realtime API; token ids are a content part of our own."""
        of_item = {"id": self.id, "object": "realtime.item", "status": self.status}
        if self.name:
            told = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
            return {**of_item, "type": "function_call", **told}
        if self.call_id:
            return {**of_item, "type": "function_call_output", "call_id": self.call_id, "output": self.content}
        kind = "output_text" if self.role == "assistant" else "input_text"
        part: Mapping[str, object] = {"type": kind, "text": self.content}
        if not isinstance(self.content, str):
            part = {"type": "input_tokens", "token_ids": list(self.content)}
        return {**of_item, "type": "message", "role": self.role, "content": [part]}


def called(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> Item:
    """A call, which stands in the context as `GeneratedText.piece` has it."""
    return Item(item_id, "assistant", call_text(name, arguments), status, call_id, name, arguments)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Items in their order.

    Attributes:
        forgotten_role: of the message that stood before the first item; None where there was none, and where the
            first item is the end of one.
        forgotten_calls: ids of the calls that stood there and whose results are still here, in their order.
    """

    items: tuple[Item, ...] = ()
    forgotten_role: MessageRole | None = None
    forgotten_calls: tuple[str, ...] = ()

    def messages(self, instructions: str) -> list[Message]:
        """What the model's context shall hold.

        Items of one role that follow each other are lines of one message; answers go on where the one before ended.
        Calls are of one piece with the answer before them, and each result is a message. Results that follow each other
        are in the order of their calls, since a chat template does not tell them apart.
        """
        return [message for message, _ in self.told(instructions)]

    def told(self, instructions: str) -> list[tuple[Message, int]]:
        """The messages, each with the number of items until its end."""
        first = [Item("", "system", instructions)] if instructions else []
        told: list[tuple[Message, int]] = []
        for number, item in enumerate((*first, *self._items_as_told()), 1 - len(first)):
            content = item.content
            role_before = told[-1][0].role if told else self.forgotten_role
            if item.name and told and role_before == item.role and isinstance(content, str):
                before = told[-1][0].content
                if isinstance(before, str):
                    told[-1] = Message("assistant", before + content), number
                    continue
            if role_before == item.role and item.role not in ("assistant", "tool") and isinstance(content, str):
                content = "\n" + content
            if item.content:
                told.append((Message(item.role, content), number))
        return told

    def behind(self, num_items: int, role: MessageRole) -> Conversation:
        """Without the first so many items that are told; the last message of them was of this role."""
        gone = self._items_as_told()[:num_items]
        gone_ids = {item.id for item in gone}
        left = tuple(item for item in self.items if item.id not in gone_ids)
        answered = {item.call_id for item in left if _is_result(item)}
        calls = [*self.forgotten_calls, *(item.call_id for item in gone if item.name)]
        latest = dict.fromkeys(call_id for call_id in reversed(calls) if call_id in answered)
        return Conversation(left, role, tuple(reversed(latest)))

    def item(self, item_id: str) -> Item:
        """The item of this id.

        Raises:
            Refusal: there is none.
        """
        return self.items[self._index(item_id)]

    def has(self, item_id: str) -> bool:
        """Whether there is an item of this id."""
        return any(item.id == item_id for item in self.items)

    def id_before(self, item_id: str) -> str | None:
        """The id of the item before this one; None before the first."""
        index = self._index(item_id)
        return self.items[index - 1].id if index else None

    def with_item(self, item: Item, previous_id: str | None = None) -> Conversation:
        """With an item more: at the end, or behind another one; `root` is the beginning.

        Raises:
            Refusal: there is no such other one, or the id is taken.
        """
        if self.has(item.id):
            raise Refusal("invalid_value", f"the conversation has an item '{item.id}' already", param="item.id")
        at = len(self.items)
        if previous_id is not None:
            at = 0 if previous_id == "root" else self._index(previous_id) + 1
        return replace(self, items=(*self.items[:at], item, *self.items[at:]))

    def with_changed(self, item: Item) -> Conversation:
        """With this item in the place of the one of its id."""
        index = self._index(item.id)
        return replace(self, items=(*self.items[:index], item, *self.items[index + 1 :]))

    def without(self, item_id: str) -> Conversation:
        """With an item less.

        Raises:
            Refusal: there is none of this id.
        """
        index = self._index(item_id)
        return replace(self, items=(*self.items[:index], *self.items[index + 1 :]))

    def _items_as_told(self) -> list[Item]:
        told: list[Item] = []
        start = len(self.forgotten_calls)
        called_at = dict(zip(self.forgotten_calls, range(start), strict=True))
        for are_results, group in groupby(self.items, _is_result):
            run = list(group)
            if are_results:
                run.sort(key=lambda item: called_at.get(item.call_id, math.inf))
            called_at |= {item.call_id: index for index, item in enumerate(run, start + len(told)) if item.name}
            told += run
        return told

    def _index(self, item_id: str) -> int:
        for index, item in enumerate(self.items):
            if item.id == item_id:
                return index
        raise Refusal("item_not_found", f"the conversation has no item '{item_id}'", param="item_id", http_status=404)


def _is_result(item: Item) -> bool:
    return item.role == "tool"
