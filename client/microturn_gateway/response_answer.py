"""The answer of the Responses API: the response as an object, and the events that tell it as it comes."""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

from microturn_client import Status, Tokens, ToolArguments, ToolCall, ToolCallBegun, ToolEvent
from microturn_gateway.answer import PromptCount
from microturn_gateway.conversation import new_id
from microturn_gateway.failures import Refusal
from microturn_gateway.logprobs import Logprob, TokenLogprobs
from microturn_gateway.response_items import ConversationItem, output_item
from microturn_gateway.response_request import ResponseRequest

Event = dict[str, Any]


class ResponseAnswer:
    """One response.

    Args:
        asked: what it answers.
        model: as its client calls it.
    """

    def __init__(self, asked: ResponseRequest, model: str) -> None:
        self.id = new_id("resp")
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        self._waiting = ""
        self._token_logprobs = TokenLogprobs()
        self._logprobs: list[Logprob] = []  # of what waits
        self._has_called = False
        self._json: dict[str, Any] = {
            **asked.shown,
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_tokens,
            "model": model,
            "output": self._output,
            "previous_response_id": asked.previous_id,
            "store": asked.is_stored,
            "usage": None,
        }

    def as_json(self) -> dict[str, Any]:
        """The response as far as it has come."""
        return deepcopy(self._json)

    @property
    def items(self) -> tuple[ConversationItem, ...]:
        """What it adds to the conversation: a call that was cut short before its end is not in it."""
        return tuple(item for item in map(output_item, self._output) if item is not None)

    def begin(self) -> list[Event]:
        """It was asked for."""
        return [self._event(f"response.{kind}", response=self.as_json()) for kind in ("created", "in_progress")]

    def take(self, event: Tokens | ToolEvent) -> list[Event]:
        """Something of it came."""
        match event:
            case Tokens():
                return self._take_text(event)
            case ToolCallBegun():
                return self._begin_call(event)
            case ToolArguments():
                self._item["arguments"] += event.json
                return [self._event("response.function_call_arguments.delta", **self._place, delta=event.json)]
            case ToolCall():
                self._item["arguments"] = event.json
                return self._close("incomplete" if event.arguments is None else "completed")

    def end(self, status: Status, count: PromptCount) -> list[Event]:
        """Its turn has ended."""
        outcome = "completed" if status.finish_reason in ("stop", "complete", "append") else "incomplete"
        events = []
        if self._waiting and not self._has_called:
            events += self._say()
        if self._is_open:
            events += self._close(outcome)
        self._json |= {"status": outcome, "usage": _usage(status, count)}
        if outcome == "completed":
            self._json["completed_at"] = int(time.time())
        else:
            reason = "max_output_tokens" if status.finish_reason == "length" else status.finish_reason
            self._json["incomplete_details"] = {"reason": reason}
        return [*events, self._event(f"response.{outcome}", response=self.as_json())]

    def failed(self, refusal: Refusal) -> list[Event]:
        """Its turn failed after it had begun."""
        self._json |= {"status": "failed", "error": {"code": refusal.code, "message": refusal.message}}
        return [self._event("response.failed", response=self.as_json())]

    def _take_text(self, tokens: Tokens) -> list[Event]:
        """Text; whitespace alone, as models write it around calls, waits for what it stands before."""
        self._waiting += tokens.text
        self._logprobs += self._token_logprobs.take(tokens)
        return self._say() if self._waiting.strip() or (self._is_open and self._waiting) else []

    def _say(self) -> list[Event]:
        text, self._waiting = self._waiting, ""
        logprobs, self._logprobs = self._logprobs, []
        events = []
        if not self._is_open:
            message = {"id": new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress"}
            events = self._open({**message, "content": []})
            self._item["content"].append(_part(""))
            events.append(self._event("response.content_part.added", **self._part_place, part=_part("")))
        self._item["content"][0]["text"] += text
        self._item["content"][0]["logprobs"] += logprobs
        delta = self._event("response.output_text.delta", **self._part_place, delta=text, logprobs=logprobs)
        return [*events, delta]

    def _begin_call(self, call: ToolCallBegun) -> list[Event]:
        self._waiting, self._logprobs, self._has_called = "", [], True
        self._token_logprobs.drop()
        events = self._close("completed") if self._is_open else []
        item = {"id": new_id("fc"), "type": "function_call", "status": "in_progress"}
        return [*events, *self._open({**item, "call_id": call.id, "name": call.name, "arguments": ""})]

    def _open(self, item: dict[str, Any]) -> list[Event]:
        self._output.append(item)
        self._is_open = True
        return [self._event("response.output_item.added", output_index=self._index, item=deepcopy(item))]

    def _close(self, status: str) -> list[Event]:
        """The last item gets nothing more."""
        item = self._item
        item["status"] = status
        self._is_open = False
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            done = "response.function_call_arguments.done"
            events = [self._event(done, **self._place, name=name, arguments=arguments)]
        else:
            part = item["content"][0]
            events = [
                self._event(
                    "response.output_text.done", **self._part_place, text=part["text"], logprobs=part["logprobs"]
                ),
                self._event("response.content_part.done", **self._part_place, part=deepcopy(part)),
            ]
        return [*events, self._event("response.output_item.done", output_index=self._index, item=deepcopy(item))]

    @property
    def _item(self) -> dict[str, Any]:
        return self._output[-1]

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": self._index}

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._place, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(status: Status, count: PromptCount) -> dict[str, Any]:
    """Numbers of tokens; cached ones are those of which the session held the KV."""
    input_len, cached_len = count.totals(status)
    output_len = status.usage.output_tokens
    return {
        "input_tokens": input_len,
        "input_tokens_details": {"cached_tokens": cached_len, "cache_write_tokens": 0},
        "output_tokens": output_len,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_len + output_len,
    }
