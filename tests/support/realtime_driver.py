"""A client and a server around the realtime protocol, stepped by hand."""

from __future__ import annotations

import json
from typing import Any

from microturn_gateway.realtime import Realtime, Step
from microturn_gateway.session_config import SessionConfig
from support.simulated_context import SimulatedContext, status_of

BEAT_S = 0.2


class Driver:
    """A client and a server around the protocol, with a clock that a test sets."""

    def __init__(self, **config: Any) -> None:
        self.realtime = Realtime(
            SessionConfig("sess_1", "tiny", **config), max_context=200, max_answer_tokens=100, beat_s=BEAT_S
        )
        self.server = SimulatedContext()
        self.now_s = 100.0
        self.answers = ["Hi", " there"]
        self.steps: list[Step] = []
        self.events: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.realtime.receive(json.dumps({"type": kind, "event_id": "mine", **fields}))

    def item(self, text: str, role: str = "user", item_id: str | None = None, **fields: Any) -> None:
        content = [{"type": "input_text", "text": text}]
        self.send(
            "conversation.item.create",
            item={"type": "message", "role": role, "content": content, "id": item_id},
            **fields,
        )

    def begin(self) -> Step:
        step = self.realtime.next_step(self.now_s)
        assert step is not None
        self.steps.append(step)
        return step

    def answer(self, step: Step) -> None:
        rewind_to = step.options.get("rewind_to")
        if step.response is None and step.message is None:
            self.server.rewind(rewind_to)
            self.realtime.ended(status_of(len(self.server)), 5.0)
        elif step.message is not None:
            self.realtime.ended(self.server.append(step.message, rewind_to), 5.0)
        else:
            events, status = self.server.answer(self.answers, rewind_to)
            for number, tokens in enumerate(events, 1):
                self.realtime.tokens(tokens, 10.0 * number)
            self.realtime.ended(status, 50.0)

    def run(self) -> list[dict[str, Any]]:
        """All that is to be done now; returns the events."""
        while (step := self.realtime.next_step(self.now_s)) is not None:
            self.steps.append(step)
            self.answer(step)
        return self.taken()

    def taken(self) -> list[dict[str, Any]]:
        events = self.realtime.take_events()
        self.events += events
        return events


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def error_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    [event] = [event for event in events if event["type"] == "error"]
    return event["error"]
