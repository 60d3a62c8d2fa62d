"""A client and a server around the realtime protocol, stepped by hand."""

from __future__ import annotations

import json
from typing import Any

from microturn_gateway.realtime import Realtime, Step
from microturn_gateway.session_config import SessionConfig
from microturn_gateway.window import Window
from support.simulated_context import SimulatedContext, as_text, status_of

BEAT_S = 0.2
WINDOW = Window(window_tokens=80, sink_tokens=4)


class Driver:
    """A client and a server around the protocol, with a clock that a test sets."""

    def __init__(self, **config: Any) -> None:
        config = SessionConfig("sess_1", "tiny", **config)
        self.realtime = Realtime(config, max_answer_tokens=100, beat_s=BEAT_S)
        self.server = SimulatedContext()
        self.now_s = 100.0
        self.answers = ["Hi", " there"]
        self.do_answers_end = False
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

    def append(self, content: str | tuple[int, ...]) -> list[dict[str, Any]]:
        """A micro-turn of its own; returns the events."""
        self.send("input_text_buffer.append", **{"text" if isinstance(content, str) else "token_ids": content})
        self.now_s += BEAT_S
        return self.run()

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
            events, status = self.server.answer(self.answers, rewind_to, ends=self.do_answers_end)
            for number, tokens in enumerate(events, 1):
                self.realtime.tokens(tokens, 10.0 * number)
            self.realtime.ended(status, 50.0)

    def run(self) -> list[dict[str, Any]]:
        """All that is to be done now; returns the events."""
        while (step := self.realtime.next_step(self.now_s)) is not None:
            self.steps.append(step)
            self.answer(step)
        return self.taken()

    @property
    def options(self) -> dict[str, Any]:
        """Of the last step, without its seed."""
        return {name: value for name, value in self.steps[-1].options.items() if name != "seed"}

    def taken(self) -> list[dict[str, Any]]:
        events = self.realtime.take_events()
        self.events += events
        return events


class WindowDriver(Driver):
    """Its server has evicted all but the window, and nothing may be cut behind that."""

    def __init__(self, **config: Any) -> None:
        super().__init__(window=WINDOW, **config)
        self.longest = 0
        self.num_words = 0

    def answer(self, step: Step) -> None:
        position = step.options.get("rewind_to")
        assert position is None or position >= self.longest - WINDOW.window_tokens
        super().answer(step)
        self.longest = max(self.longest, len(self.server))

    def exchange(self) -> str:
        """A question and its answer; returns the question's id."""
        self.num_words += 1
        self.answers = [f"answer {self.num_words}", "."]
        self.item(f"question {self.num_words}", item_id=f"q{self.num_words}")
        self.send("response.create")
        assert types(self.run())[-1] == "response.done"
        return f"q{self.num_words}"

    def results(self, *call_ids: str) -> None:
        """Calls, as a client tells them, and their results in this order."""
        self.num_words += 1
        for call_id in sorted(call_ids):
            item = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}
            self.send("conversation.item.create", item=item)
        for call_id in call_ids:
            item = {"type": "function_call_output", "call_id": call_id, "output": f"{call_id} of {self.num_words}."}
            self.send("conversation.item.create", item=item)

    def check(self) -> None:
        """What is kept of the conversation is how the context ends."""
        talk = self.realtime.talk
        messages = talk.conversation.messages("" if talk.context.start else self.realtime.config.instructions)
        kept = as_text(messages)
        if talk.context.start and messages and talk.conversation.forgotten_role in (None, messages[0].role):
            kept = kept.partition(">")[2]  # it goes on in a message, or an item, whose beginning is forgotten
        assert self.server.text.endswith(kept)


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def error_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    [event] = [event for event in events if event["type"] == "error"]
    return event["error"]
