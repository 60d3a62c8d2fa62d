"""What a turn yields: tokens as they come, what befell the session, and one status at its end. Frozen data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeVar, cast

from microturn_client._errors import ProtocolError
from microturn_client._tool_events import ToolCall, ToolEvent

TopLogprobs = tuple[tuple[tuple[int, float], ...], ...]
FinishReason = Literal["length", "stop", "complete", "append", "closed", "cancelled", "interrupted", "deadline"]


@dataclass(frozen=True)
class Tokens:
    """New tokens of a turn, with the text that has become certain.

    Attributes:
        text: the new text; it may lag behind the ids, since half a character is never sent.
        ids: the new token ids; empty when only text came.
        position: absolute position in the session's context of the first of these tokens; of the next token when only
            text came.
        logprobs: natural-log probability of each id, when the turn asked for them.
        top_logprobs: for each id the likeliest ids in its place with theirs, the likeliest first, when the turn asked
            with a number.
    """

    text: str
    ids: tuple[int, ...]
    position: int
    logprobs: tuple[float, ...] | None = None
    top_logprobs: TopLogprobs | None = None


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens of one turn.

    Attributes:
        input_tokens: tokens that the input became, those of a chat template included.
        output_tokens: tokens that were generated.
        computed_tokens: tokens that went through the model.
        cached_tokens: tokens of the input whose KV was found ready.
        drafted_tokens: tokens of drafts that were verified; 0 without the option `speculate`.
        accepted_tokens: those of them that became output.
    """

    input_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Where the time of one turn went on the server, in milliseconds."""

    queue: float
    restore: float
    prefill: float
    decode: float
    total: float


@dataclass(frozen=True)
class Resumed:
    """The session was interrupted by a failure and goes on, or its KV was rebuilt (see :class:`Status`).

    Attributes:
        same_tokens: its context has the tokens that it had, and what comes next is tokenized as it would have been.
        same_numerics: the server goes on with the KV that it has or saved. Otherwise the context was computed again,
            which on a GPU may round otherwise, and so change a token that is chosen later.
        reason: what happened, in words.
    """

    same_tokens: bool
    same_numerics: bool
    reason: str

    @property
    def exact(self) -> bool:
        """Whether nothing can be told from a session without the failure: same tokens, and same numerics."""
        return self.same_tokens and self.same_numerics


REBUILT = Resumed(
    same_tokens=False,
    same_numerics=False,
    reason="the server had lost the session's KV and computed it from what the window shows",
)


@dataclass(frozen=True)
class Status:
    """How a turn ended.

    Attributes:
        finish_reason: ``length``, ``stop``, ``complete`` (the answer is all of what ``json_schema``, ``regex``,
            ``grammar`` or ``choice`` asked for), ``append`` (nothing was to be generated), ``interrupted``,
            ``cancelled``, ``deadline`` or ``closed``.
        stop_reason: the token id or the string that stopped the generation; None otherwise.
        turn: the server's number of this turn in its session.
        context_len: absolute length of the session's context in tokens.
        kept_len: how many of those the server still holds.
        usage: numbers of tokens.
        timing_ms: times on the server in milliseconds.
        expires_in_s: seconds of silence after which the server ends the session.
        seed: the seed that sampling uses.
        appended_ids: the ids that the input became, when the turn asked with ``return_appended_ids``.
        model_fingerprint: of the server's model, with the turn that opened the session; None with others.
        replayed: this is the recorded result of a turn that was sent before.
        rebuilt: since the last status the server lost the session's KV, and computed it again from what its window
            shows: the session goes on, otherwise than it would have gone on.
        resumed: what befell the session since the status before, as this client knows it; mostly nothing.
    """

    finish_reason: FinishReason
    stop_reason: int | str | None
    turn: int
    context_len: int
    kept_len: int
    usage: Usage
    timing_ms: Timing
    expires_in_s: float
    seed: int
    appended_ids: tuple[int, ...] | None = None
    model_fingerprint: str | None = None
    replayed: bool = False
    rebuilt: bool = False
    resumed: tuple[Resumed, ...] = ()


@dataclass(frozen=True)
class TurnEnd:
    """The last event of every turn that succeeded."""

    status: Status


@dataclass(frozen=True)
class Answer:
    """A whole turn, as ``collect`` returns it.

    Attributes:
        text: all of its text.
        ids: all of its token ids.
        logprobs: natural-log probability of each id, when the turn asked for them.
        status: how it ended.
        top_logprobs: for each id the likeliest ids in its place, when the turn asked with a number.
        tool_calls: in their order.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    status: Status
    top_logprobs: TopLogprobs | None = None
    tool_calls: tuple[ToolCall, ...] = ()


Event = Tokens | ToolEvent | TurnEnd | Resumed


def answer_of(events: Sequence[Tokens | ToolEvent], status: Status) -> Answer:
    """A turn as a whole."""
    tokens = [event for event in events if isinstance(event, Tokens)]
    calls = tuple(event for event in events if isinstance(event, ToolCall))
    ids = tuple(token_id for event in tokens for token_id in event.ids)
    logprobs = tuple(logprob for event in tokens for logprob in event.logprobs or ())
    top_logprobs = tuple(top for event in tokens for top in event.top_logprobs or ())
    text = "".join(event.text for event in tokens)
    return Answer(text, ids, logprobs or None, status, top_logprobs or None, calls)


_SPECULATION = ("drafted_tokens", "accepted_tokens")
_USAGE = tuple(field.name for field in fields(Usage) if field.name not in _SPECULATION)
_TIMING = tuple(field.name for field in fields(Timing))


def parse_status(text: bytes, appended_ids: tuple[int, ...] | None) -> Status:
    """Reads the JSON of the ``status`` output; names it does not know are left aside.

    Raises:
        ProtocolError: when a field of the contract is missing or of another type.
    """
    try:
        raw: Mapping[str, object] = json.loads(text)
        usage, timing = _mapping(raw["usage"]), _mapping(raw["timing_ms"])
        stop, model = raw["stop_reason"], raw.get("model_fingerprint")
        return Status(
            finish_reason=cast("FinishReason", _typed(raw["finish_reason"], str)),
            stop_reason=stop if isinstance(stop, str) or stop is None else _typed(stop, int),
            turn=_typed(raw["turn"], int),
            context_len=_typed(raw["context_len"], int),
            kept_len=_typed(raw["kept_len"], int),
            usage=Usage(
                *[_typed(usage[name], int) for name in _USAGE],
                *[_typed(usage.get(name, 0), int) for name in _SPECULATION],
            ),
            timing_ms=Timing(*[_number(timing[name]) for name in _TIMING]),
            expires_in_s=_number(raw["expires_in_s"]),
            seed=_typed(raw["seed"], int),
            appended_ids=appended_ids,
            model_fingerprint=None if model is None else _typed(model, str),
            replayed=raw.get("replayed") is True,
            rebuilt=raw.get("rebuilt") is True,
        )
    except KeyError as error:
        raise ProtocolError(f"the status lacks {error}") from error
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"the status cannot be read: {error}") from error


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"an object belongs where {value!r} is")
    return value


_Scalar = TypeVar("_Scalar", str, int)


def _typed(value: object, kind: type[_Scalar]) -> _Scalar:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{kind.__name__} belongs where {value!r} is")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a number belongs where {value!r} is")
    return float(value)
