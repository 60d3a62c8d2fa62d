"""One session of the fake server, and its turns: what input does to a context, and how that is undone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from microturn_client._messages_pb2 import ModelStreamInferResponse
from microturn_client._wire import SessionId
from microturn_client.testing._fake_model import EMBEDDING, decode, encode, likeliest, next_token, split_at_boundary
from microturn_client.testing._fake_values import UnknownError, chosen_value, possible_values
from microturn_client.testing._messages import FakeRequest

Send = Callable[[ModelStreamInferResponse], None]


class RefusedError(Exception):
    """Why a turn must not run, as the wire says it."""


@dataclass(eq=False)
class FakeTurn:
    request: FakeRequest
    sinks: list[tuple[str, Send]]
    options: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    before: tuple[list[int], str, list[tuple[int, int, str]]] | None = None
    appended: list[int] = field(default_factory=list)
    num_input: int = 0
    output: list[int] = field(default_factory=list)
    output_position: int = 0
    values: list[bytes] | None = None
    value: list[int] | None = None

    def read_grammar(self, tools: Sequence[Mapping[str, Any]]) -> None:
        try:
            self.values = possible_values(self.request.options, tools)
        except UnknownError as error:
            raise RefusedError(f"INVALID_ARGUMENT: {error}") from None

    @property
    def finish_reason(self) -> str | None:
        """Why its answer ends with what it has; None where it goes on."""
        if self.value is not None and len(self.output) == len(self.value):
            return "complete"
        return "length" if len(self.output) >= self.max_tokens else None

    @property
    def streams(self) -> bool:
        return bool(self.options.get("stream", True))

    @property
    def is_numbered(self) -> bool:
        return "turn" in self.request.options

    @property
    def is_abandoned(self) -> bool:
        return bool(self.max_tokens) and not self.sinks and not self.request.end

    @property
    def max_tokens(self) -> int:
        if self.only_counts:
            return 0
        default = 0 if self.request.is_empty else 16
        said = self.request.options if self.request.is_empty else self.options
        return int(said.get("max_tokens", default))

    def logprobs_of(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """What an answer tells of tokens' probabilities, as arguments of ``answer``."""
        wanted = self.options.get("logprobs", False)
        if not wanted or not token_ids:
            return {}
        top = [likeliest(token_id, 1 if wanted is True else wanted) for token_id in token_ids]
        logprobs = [of_token[0][1] for of_token in top]
        return {"logprobs": logprobs} if wanted is True else {"logprobs": logprobs, "top": top}

    def piece_of(self, tail: Sequence[int]) -> dict[str, Any]:
        """What an answer tells of the last tokens of the output, as arguments of ``answer``."""
        position = self.output_position + len(self.output) - len(tail)
        return {"token_ids": list(tail), "position": position, "text": decode(tail), **self.logprobs_of(tail)}

    @property
    def only_counts(self) -> bool:
        return bool(self.request.options.get("count_only"))

    @property
    def interrupts(self) -> bool:
        return not self.only_counts and bool(self.request.options.get("on_overlap") == "interrupt")

    @property
    def is_keepalive(self) -> bool:
        asks = self.max_tokens or self.interrupts or "rewind_to" in self.request.options
        changes = not self.only_counts and (asks or not self.request.is_empty)
        return not changes and not self.request.end and not self.is_numbered


@dataclass(eq=False)
class FakeSession:
    id: SessionId
    key: Any
    seed: int
    defaults: dict[str, Any]
    idle_timeout_s: float
    max_context: int
    tools: Sequence[Mapping[str, Any]] = ()
    is_rebuilt: bool = False
    context: list[int] = field(default_factory=list)
    held: str = ""
    marks: list[tuple[int, int, str]] = field(default_factory=list)
    num_turns: int = 0
    running: FakeTurn | None = None
    queue: deque[FakeTurn] = field(default_factory=deque)
    results: dict[int, tuple[tuple[object, ...], dict[str, Any]]] = field(default_factory=dict)
    last_activity_s: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a turn runs that somebody hears, or waits for."""
        turn = self.running
        return turn is not None and not (turn.is_abandoned and not any(waiting.sinks for waiting in self.queue))

    def cut(self, position: int) -> None:
        kept = [mark for mark in self.marks if mark[1] <= position]
        torn = next((mark for mark in self.marks[len(kept) :] if mark[0] < position), None)
        self.held = "" if torn is not None or not kept or kept[-1][1] < position else kept[-1][2]
        self.marks = kept if torn is None else [*kept, (torn[0], position, "")]
        del self.context[position:]

    def take_in(self, turn: FakeTurn, max_tokens: int) -> None:
        request = turn.request
        self.check_number(turn, self.num_turns)
        turn.number = self.num_turns
        turn.before = (self.context[:], self.held, self.marks[:])
        position = request.options.get("rewind_to")
        if position is not None and position > len(self.context) and not turn.interrupts:
            raise RefusedError(
                f"FAILED_PRECONDITION: rewind_to={position} is behind the end [position={len(self.context)}]"
            )
        if position is not None and position < len(self.context):
            self.cut(position)
        start = len(self.context)
        if request.text:
            certain, held = (
                (self.held + request.text, "")
                if max_tokens or turn.only_counts
                else split_at_boundary(self.held + request.text)
            )
            turn.appended, self.held = encode(certain), held
        elif not request.is_empty or max_tokens:
            turn.appended, self.held = [*encode(self.held), *(request.input_ids or [])], ""
        turn.num_input = len(turn.appended) + request.num_embeds
        try:
            if max_tokens and start + turn.num_input == 0:
                raise RefusedError("INVALID_ARGUMENT: there is nothing to generate from")
            room = self.max_context - start - turn.num_input
            if max_tokens > room:
                raise RefusedError(
                    f"CONTEXT_FULL: the turn exceeds max_context={self.max_context} [room={max(0, room)}]"
                )
            context = [*self.context, *turn.appended, *[EMBEDDING] * request.num_embeds]
            if max_tokens and turn.values is not None:
                turn.value = self._value_of(turn, context)
        except RefusedError:
            self.context, self.held, self.marks = turn.before
            raise
        if turn.only_counts:
            self.context, self.held, self.marks = turn.before
            self.num_turns += not turn.is_keepalive
            return
        self.context = context
        if not request.is_empty or max_tokens:
            self.marks.append((start, len(self.context), self.held))
        self.num_turns += not turn.is_keepalive

    def seed_of(self, turn: FakeTurn) -> int:
        """What the turn's choices depend on besides the context; 0 where it is greedy."""
        is_sampled = float(turn.options.get("temperature", 0.0))
        return int(turn.request.options.get("seed", self.seed)) if is_sampled else 0

    def next_token_of(self, turn: FakeTurn) -> int:
        """What the turn's answer goes on with."""
        if turn.value is not None:
            return turn.value[len(turn.output)]
        return next_token(self.context, self.seed_of(turn))

    def _value_of(self, turn: FakeTurn, context: list[int]) -> list[int]:
        assert turn.values is not None
        start = int(turn.request.options.get("grammar_from", len(context)))
        if start > len(context):
            raise RefusedError(f"FAILED_PRECONDITION: grammar_from={start} is behind the end [position={len(context)}]")
        value = chosen_value(turn.values, context, start, self.seed_of(turn))
        if value is None:
            raise RefusedError("FAILED_PRECONDITION: the context is no beginning of a value that could go on")
        return value

    def roll_back(self, turn: FakeTurn) -> None:
        assert turn.before is not None
        self.context, self.held, self.marks = turn.before
        self.num_turns = turn.number

    @staticmethod
    def check_number(turn: FakeTurn, expected: int) -> None:
        if turn.is_numbered and turn.request.options["turn"] != expected:
            raise RefusedError(f"FAILED_PRECONDITION: turn {expected} comes first [turn={expected}]")

    def status_of(self, turn: FakeTurn, reason: str, length: int) -> dict[str, object]:
        """How a turn ended, as the wire says it."""
        return {
            "finish_reason": reason,
            "stop_reason": None,
            "turn": turn.number if not turn.is_keepalive else self.num_turns,
            "context_len": length,
            "kept_len": length,
            "usage": {
                "input_tokens": turn.num_input,
                "output_tokens": len(turn.output),
                "computed_tokens": 0 if turn.only_counts else turn.num_input + len(turn.output),
                "cached_tokens": 0,
            },
            "timing_ms": {"queue": 0.0, "restore": 0.0, "prefill": 0.0, "decode": 0.0, "total": 0.0},
            "expires_in_s": self.idle_timeout_s,
            "seed": int(turn.request.options.get("seed", self.seed)),
        }
