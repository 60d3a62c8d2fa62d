"""One response of a realtime session: the model's answer as it comes, and the events that tell it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from microturn_client import Status, Tokens, ToolArguments, ToolCall, ToolCallBegun, ToolEvent
from microturn_gateway.chat_tools import call_text
from microturn_gateway.client_events import AnswerOptions
from microturn_gateway.context import Cut, Piece
from microturn_gateway.conversation import Item, called, new_id
from microturn_gateway.failures import Refusal

Event = dict[str, Any]

# How a turn ended, as the Realtime API says it: status of the response, and the reason where it is not complete.
_OUTCOMES: dict[str, tuple[str, str | None]] = {
    "stop": ("completed", None),
    "complete": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "deadline": ("incomplete", "deadline"),
    "interrupted": ("cancelled", "client_cancelled"),
    "cancelled": ("cancelled", "client_cancelled"),
}


class GeneratedText:
    """The text of an answer and where in the context it stands, for both APIs.

    Attributes:
        text: what was said.
        calls: what was called.
    """

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[ToolCall] = []
        self._cuts: list[Cut] = []

    def take(self, event: Tokens | ToolEvent) -> None:
        """Adds what came."""
        if isinstance(event, ToolCall):
            self.calls.append(event)
        if not isinstance(event, Tokens):
            return
        if not self._cuts:
            self._cuts.append(Cut(0, event.position))
        if event.text:  # without any, a token may be the first half of a character: no place to cut
            self.text += event.text
            self._cuts.append(Cut(len(self.text), event.position + len(event.ids)))

    def is_called_again_by(self, event: Tokens | ToolEvent) -> bool:
        """Whether a call begins with this event, behind another one."""
        return isinstance(event, ToolCallBegun) and bool(self.calls)

    def piece(self, status: Status) -> Piece:
        """What stays in the context: of an answer that a stop text ended, what comes before that text."""
        has_end = isinstance(status.stop_reason, int)  # its last token, which stands behind its text
        text_end = status.context_len - has_end
        if self.calls:  # it stays whole, or goes whole
            content = self.text.strip() + "".join(call_text(call.name, call.json) for call in self.calls)
            whole = Cut(len(content), text_end)
            return Piece("assistant", content, status.context_len, (*self._cuts[:1], whole), has_end)
        if isinstance(status.stop_reason, str) and self._cuts:
            last = self._cuts[-1]
            return Piece("assistant", self.text, last.position, tuple(self._cuts))
        cuts = tuple(replace(cut, position=min(cut.position, text_end)) for cut in self._cuts)
        return Piece("assistant", self.text, status.context_len, cuts, has_end)


class PromptCount:
    """How much of a prompt was in the KV cache already, over the turns that it took.

    Args:
        held_len: length of the context before the first of them.
    """

    def __init__(self, held_len: int) -> None:
        self._held_len = held_len
        self._computed = 0

    def take(self, status: Status) -> None:
        """Counts a turn."""
        self._computed += status.usage.computed_tokens - status.usage.output_tokens

    def totals(self, status: Status) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them nothing had to be computed for.

        Args:
            status: of the last turn, which answered.
        """
        prompt_len = status.context_len - status.usage.output_tokens
        return prompt_len, max(0, min(self._held_len, prompt_len - self._computed))


class Response:
    """One response.

    Args:
        options: those of its own event over those of the session.
        metadata: the client's, given back as it is.
        conversation_id: of the one conversation.
        has_tools: the answer may be calls, of which the message holds nothing.

    Attributes:
        has_surplus: the model goes on to call, beyond the one call that the answer may have: it is to be interrupted.
    """

    def __init__(self, options: AnswerOptions, metadata: Any, conversation_id: str, *, has_tools: bool) -> None:
        self.id = new_id("resp")
        self.item_id = new_id("item")
        self.options = options
        self.is_cancelled = False
        self.has_surplus = False
        self._metadata = metadata
        self._conversation_id = conversation_id
        self._generated = GeneratedText()
        self._has_tools = has_tools
        self._has_begun = False
        self._held: list[Event] = []
        self._index = 0
        self._num_outputs = 0
        self._calls: list[tuple[Item, int]] = []
        self._first_text_ms: float | None = None

    def created(self) -> list[Event]:
        """It was asked for."""
        return [{"type": "response.created", "response": self._as_json("in_progress")}]

    def take(self, event: Tokens | ToolEvent, elapsed_ms: float, previous_id: str | None) -> list[Event]:
        """Tokens came, or what they say of a call.

        Args:
            event: they.
            elapsed_ms: since its turn was sent.
            previous_id: of the item before it.
        """
        self._generated.take(event)  # the surplus, too, so that the context lets go of an answer that has any
        if not self.options.is_parallel:
            self.has_surplus |= self._generated.is_called_again_by(event)
        if self.has_surplus:
            return []
        if not isinstance(event, Tokens):
            return self._take_call(event, previous_id)
        if event.text and self._first_text_ms is None:
            self._first_text_ms = elapsed_ms
        told = {"token_ids": list(event.ids), "position": event.position}
        self._held.append({"delta": event.text, "microturn": told})
        # Tokens of a call have no text, nor is a blank before one a message.
        if self._has_tools and not self._generated.text.strip():
            return []
        return self._say_held(previous_id)

    def ended(
        self, status: Status, count: PromptCount, report: dict[str, Any], previous_id: str | None
    ) -> tuple[list[Event], Piece, list[Item]]:
        """Its turn has ended: the events, what stays in the context, and the items that it became."""
        outcome, reason = _OUTCOMES.get(status.finish_reason, ("incomplete", status.finish_reason))
        if self.has_surplus:
            outcome, reason = "completed", None
        said = self._generated
        events = self._say_held(previous_id) if self._held and not said.calls else []
        items, outputs = [], [(item, index) for item, index in self._calls]
        if self._has_begun:
            text = said.text.strip() if said.calls else said.text  # as it stands in the context
            item = Item(self.item_id, "assistant", text, "completed" if outcome == "completed" else "incomplete")
            part = {"type": "text", "text": text}
            events += [
                {"type": "response.output_text.done", **self._place, "text": text},
                {"type": "response.content_part.done", **self._place, "part": part},
                {"type": "response.output_item.done", **self._output, "item": item.as_json()},
                {"type": "conversation.item.done", "previous_item_id": previous_id, "item": item.as_json()},
            ]
            items.append(item)
            outputs.append((item, self._index))
        for call, index in self._calls:
            before = items[-1].id if items else previous_id
            output = {"response_id": self.id, "output_index": index}
            events += [
                {"type": "response.output_item.done", **output, "item": call.as_json()},
                {"type": "conversation.item.done", "previous_item_id": before, "item": call.as_json()},
            ]
            items.append(call)
        done = self._as_json(outcome, reason, tuple(item for item, _ in sorted(outputs, key=lambda output: output[1])))
        done["usage"] = _usage(status, count)
        done["microturn"] = {**report, "first_text_ms": self._first_text_ms}
        return [*events, {"type": "response.done", "response": done}], said.piece(status), items

    def _say_held(self, previous_id: str | None) -> list[Event]:
        events = [] if self._has_begun else self._begin(previous_id)
        held, self._held = self._held, []
        return [*events, *({"type": "response.output_text.delta", **self._place, **delta} for delta in held)]

    def _take_call(self, event: ToolEvent, previous_id: str | None) -> list[Event]:
        if isinstance(event, ToolCallBegun):
            item = Item(new_id("item"), "assistant", "", "in_progress", event.id, event.name)
            before = self._calls[-1][0].id if self._calls else self.item_id if self._has_begun else previous_id
            self._calls.append((item, self._num_outputs))
            self._num_outputs += 1
            return [
                {
                    "type": "response.output_item.added",
                    "response_id": self.id,
                    "output_index": self._calls[-1][1],
                    "item": item.as_json(),
                },
                {"type": "conversation.item.added", "previous_item_id": before, "item": item.as_json()},
            ]
        if isinstance(event, ToolArguments):
            place = self._place_of_call()
            return [{"type": "response.function_call_arguments.delta", **place, "delta": event.json}]
        item, index = self._calls[-1]
        status = "incomplete" if event.arguments is None else "completed"
        self._calls[-1] = (called(item.id, event.id, event.name, event.json, status), index)
        told = {"name": event.name, "arguments": event.json}
        return [{"type": "response.function_call_arguments.done", **self._place_of_call(), **told}]

    def _place_of_call(self) -> Event:
        item, index = self._calls[-1]
        return {"response_id": self.id, "output_index": index, "item_id": item.id, "call_id": item.call_id}

    def cancelled(self) -> list[Event]:
        """It was cancelled before its turn began."""
        return [{"type": "response.done", "response": self._as_json("cancelled", "client_cancelled")}]

    def failed(self, refusal: Refusal) -> list[Event]:
        """Its turn failed: nothing of it is in the context."""
        done = self._as_json("failed")
        done["status_details"]["error"] = refusal.as_json()
        return [{"type": "response.done", "response": done}]

    def _begin(self, previous_id: str | None) -> list[Event]:
        self._has_begun = True
        self._index, self._num_outputs = self._num_outputs, self._num_outputs + 1
        item = {**Item(self.item_id, "assistant", "", "in_progress").as_json(), "content": []}
        part = {"type": "text", "text": ""}
        return [
            {"type": "response.output_item.added", **self._output, "item": item},
            {"type": "conversation.item.added", "previous_item_id": previous_id, "item": item},
            {"type": "response.content_part.added", **self._place, "part": part},
        ]

    @property
    def _output(self) -> Event:
        return {"response_id": self.id, "output_index": self._index}

    @property
    def _place(self) -> Event:
        return {**self._output, "item_id": self.item_id, "content_index": 0}

    def _as_json(self, status: str, reason: str | None = None, items: tuple[Item, ...] = ()) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "realtime.response",
            "conversation_id": self._conversation_id,
            "status": status,
            "status_details": None if status in ("in_progress", "completed") else {"type": status, "reason": reason},
            "output": [item.as_json() for item in items],
            "output_modalities": ["text"],
            "max_output_tokens": self.options.max_output_tokens,
            "metadata": self._metadata,
            "usage": None,
        }


def _usage(status: Status, count: PromptCount) -> dict[str, Any]:
    prompt_len, cached_len = count.totals(status)
    output_len = status.usage.output_tokens
    return {
        "total_tokens": prompt_len + output_len,
        "input_tokens": prompt_len,
        "output_tokens": output_len,
        "input_token_details": {"text_tokens": prompt_len, "audio_tokens": 0, "cached_tokens": cached_len},
        "output_token_details": {"text_tokens": output_len, "audio_tokens": 0},
    }
