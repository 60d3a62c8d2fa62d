"""A turn: what a client asked for, what it becomes while it runs, and what it answers.

Data only. Knows no session, no scheduling and no wire format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from torch import Tensor

from microturn.errors import MicroturnError
from microturn.options import SessionOptions, TurnOptions

SessionId = int | str


@dataclass(frozen=True)
class TokenInput:
    """New token ids, perhaps none."""

    token_ids: Sequence[int]


@dataclass(frozen=True)
class TextInput:
    """New text."""

    text: str


@dataclass(frozen=True)
class EmbedInput:
    """New embeddings, float32 [n, hidden]."""

    embeds: Tensor


TurnInput = TokenInput | TextInput | EmbedInput


def is_empty(given: TurnInput) -> bool:
    """Whether an input appends nothing."""
    match given:
        case TokenInput(token_ids):
            return not token_ids
        case TextInput(text):
            return not text
        case EmbedInput(embeds):
            return len(embeds) == 0


@dataclass(frozen=True)
class Status:
    """How a turn ended; the fields of `status` in the wire contract, which says what they mean."""

    finish_reason: str
    stop_reason: int | str | None
    turn: int
    context_len: int
    kept_len: int
    usage: Mapping[str, int]
    timing_ms: Mapping[str, float]
    expires_in_s: float
    seed: int


@dataclass(frozen=True)
class TurnOutput:
    """A piece of a turn's answer.

    Attributes:
        token_ids: new tokens.
        text: text that has become certain.
        position: absolute position of the first new token; without tokens it has no meaning.
        logprobs: of the new tokens, when asked for.
        status: on the last piece only.
        appended_ids: on the last piece, when asked for: the ids that the input became.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    position: int = 0
    logprobs: tuple[float, ...] = ()
    status: Status | None = None
    appended_ids: tuple[int, ...] | None = None

    def merged(self, later: Self) -> Self:
        """This piece and the one that follows it, as one."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            position=self.position if self.token_ids else later.position,
            logprobs=self.logprobs + later.logprobs,
        )


class TurnSink(Protocol):
    """Where a turn's answer goes. Called on the engine's thread: it hands on and returns.

    Exactly one of these ends a turn: an output with a status, or an error.
    """

    def put(self, output: TurnOutput) -> None: ...

    def fail(self, error: MicroturnError) -> None: ...


@dataclass(frozen=True)
class TurnRequest:
    """A turn as it arrived, its options already checked.

    Attributes:
        options: the turn options that were given, by name.
        session_options: what came with START.
        refusal: why the turn must not run, known before it came here. It travels on because its END still closes.
        arrived_s: when it arrived, by the engine's clock.
    """

    session_id: SessionId
    input: TurnInput
    sink: TurnSink
    arrived_s: float
    start: bool = False
    end: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    refusal: MicroturnError | None = None
    session_options: SessionOptions = field(default_factory=SessionOptions)


@dataclass(eq=False)
class Turn:
    """A turn that runs or waits. The object itself is the turn's token: only who holds it may end the turn.

    Attributes:
        request: what was asked.
        options: the session's defaults with what the request said.
        number: how many turns of the session ended before this one began.
        context_len_before: what a roll-back cuts the context to.
        text_state_before: what a roll-back sets the session's text state to.
        appended_ids: the ids that the input became.
        num_input: tokens appended, embeddings included.
        num_output: tokens generated.
        num_computed: tokens that went through the model.
        num_cached: tokens that were in the cache when the turn began.
        due_s: when it should be done; the scheduler's order.
    """

    request: TurnRequest
    options: TurnOptions = field(default_factory=TurnOptions)
    number: int = 0
    context_len_before: int = 0
    text_state_before: Any = None
    appended_ids: list[int] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    num_computed: int = 0
    num_cached: int = 0
    due_s: float = 0.0
    begun_s: float = 0.0
    first_token_s: float | None = None
    stop_reason: int | str | None = None

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most: 16 by default; an empty input generates only if its own turn says so."""
        if is_empty(self.request.input) and "max_tokens" not in self.request.options:
            return 0
        return 16 if self.options.max_tokens is None else self.options.max_tokens

    @property
    def generates(self) -> bool:
        return self.max_tokens > 0
