"""What a realtime session is and how it answers, as `session.update` changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from microturn_gateway.client_events import AnswerOptions, UpdateSession


@dataclass(frozen=True)
class SessionConfig:
    """The configuration of one session.

    Attributes:
        id: of the session, here and on the Microturn server.
        model: what the server calls its model.
        instructions: the system message.
        max_output_tokens: of an answer; "inf" is as many as there is room for.
        generation: options of answers, as the wire contract names them.
        beat_ms: least time between two micro-turns in milliseconds.
        max_context: longest context in tokens; None where the server does not say.
        inert: what a client set that changes nothing here.
    """

    id: str
    model: str
    instructions: str = ""
    max_output_tokens: int | str = "inf"
    generation: Mapping[str, Any] = field(default_factory=dict)
    beat_ms: float = 200.0
    max_context: int | None = None
    inert: Mapping[str, Any] = field(default_factory=dict)

    def updated(self, event: UpdateSession) -> SessionConfig:
        """With what an event says, and otherwise as it was."""
        answers = self.answers_with(event.answers)
        assert answers.max_output_tokens is not None
        return replace(
            self,
            instructions=self.instructions if event.instructions is None else event.instructions,
            max_output_tokens=answers.max_output_tokens,
            generation=answers.generation,
            inert={**self.inert, **event.inert},
        )

    def answers_with(self, options: AnswerOptions) -> AnswerOptions:
        """How an answer is made whose own event says this."""
        most = self.max_output_tokens if options.max_output_tokens is None else options.max_output_tokens
        return AnswerOptions(most, {**self.generation, **options.generation})

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
            "tools": [],
            "tool_choice": "none",
            **self.inert,
            "microturn": {**self.generation, "beat_ms": self.beat_ms, "max_context": self.max_context},
        }
