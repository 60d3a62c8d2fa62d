"""What a realtime session is and how it answers, as `session.update` changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from microturn_gateway.client_events import AnswerOptions, UpdateSession
from microturn_gateway.failures import Refusal, no_such_model
from microturn_gateway.realtime_tools import ToolChoice, Tools, check_choice
from microturn_gateway.window import Window, WindowChange


@dataclass(frozen=True)
class SessionConfig:
    """The configuration of one session.

    Attributes:
        id: of the session, here and on the Microturn server.
        model: what the client calls the server's model.
        models: all that it may call it.
        instructions: the system message.
        max_output_tokens: of an answer; "inf" is as many as there is room for.
        generation: options of answers, as the wire contract names them.
        beat_ms: least time between two micro-turns in milliseconds.
        max_context: longest context in tokens; None where the server does not say.
        tools: functions that the model may call.
        tool_choice: which of them an answer calls; None where no client has said so.
        is_parallel: whether an answer may call more than once.
        window: of a session without end; None where it ends with its context.
        inert: what a client set that changes nothing here.
    """

    id: str
    model: str
    models: tuple[str, ...] = ()
    instructions: str = ""
    max_output_tokens: int | str = "inf"
    generation: Mapping[str, Any] = field(default_factory=dict)
    beat_ms: float = 200.0
    max_context: int | None = None
    tools: Tools = ()
    tool_choice: ToolChoice | None = None
    is_parallel: bool = True
    window: Window | None = None
    inert: Mapping[str, Any] = field(default_factory=dict)

    def updated(self, event: UpdateSession) -> SessionConfig:
        """With what an event says, and otherwise as it was."""
        answers = self.answers_with(event.answers)
        assert answers.max_output_tokens is not None
        assert answers.is_parallel is not None
        return replace(
            self,
            model=event.model or self.model,
            instructions=self.instructions if event.instructions is None else event.instructions,
            max_output_tokens=answers.max_output_tokens,
            generation=answers.generation,
            tools=self.tools if event.tools is None else event.tools,
            tool_choice=answers.tool_choice,
            is_parallel=answers.is_parallel,
            window=event.window.applied_to(self.window),
            inert={**self.inert, **event.inert},
        )

    def answers_with(self, options: AnswerOptions) -> AnswerOptions:
        """How an answer is made whose own event says this."""
        most = self.max_output_tokens if options.max_output_tokens is None else options.max_output_tokens
        choice = self.tool_choice if options.tool_choice is None else options.tool_choice
        merged = {**self.generation, **options.generation}
        generation = {name: value for name, value in merged.items() if value is not None}
        is_parallel = self.is_parallel if options.is_parallel is None else options.is_parallel
        return AnswerOptions(most, generation, choice, is_parallel)

    def possible(self, event: UpdateSession, *, has_begun: bool, is_beginning_fixed: bool) -> UpdateSession:
        """What of an event can be had; the rest of it is refused.

        A choice that comes before the tools waits for them, as agents send it: each answer is checked again.

        Args:
            event: what a client asks for.
            has_begun: the session has its options.
            is_beginning_fixed: the window has left the instructions.
        """
        refused = list(event.refused)
        if event.model and event.model not in self.models:
            refused.append(no_such_model(event.model, self.models, "session.model"))
            event = replace(event, model=None)
        try:
            if event.window.applied_to(self.window) != self.window and has_begun:
                raise _refused("'session.microturn.overflow' is fixed with the first turn", "microturn.overflow")
        except Refusal as refusal:
            refused.append(refusal)
            event = replace(event, window=WindowChange())
        if is_beginning_fixed and event.instructions not in (None, self.instructions):
            refused.append(_refused("the window has left the session's instructions: they stay", "instructions"))
            event = replace(event, instructions=None)
        tools = self.tools if event.tools is None else event.tools
        try:
            if tools:
                check_choice(event.answers.tool_choice, tools, "session.tool_choice")
        except Refusal as refusal:
            refused.append(refusal)
            event = replace(event, answers=replace(event.answers, tool_choice=None))
        return replace(event, refused=tuple(refused))

    def as_json(self) -> dict[str, Any]:
        """The session object of the Realtime API; what is ours is under `microturn`."""
        return {
            "id": self.id,
            "object": "realtime.session",
            "type": "realtime",
            "model": self.model,
            "output_modalities": ["text"],
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "tools": list(self.tools),
            "tool_choice": self.tool_choice or ("auto" if self.tools else "none"),
            "parallel_tool_calls": self.is_parallel,
            **self.inert,
            "microturn": {
                **self.generation,
                **({} if self.window is None else self.window.as_json()),
                "beat_ms": self.beat_ms,
                "max_context": self.max_context,
            },
        }


def _refused(message: str, name: str) -> Refusal:
    return Refusal("unsupported_parameter", message, param=f"session.{name}")
