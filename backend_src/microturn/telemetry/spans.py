"""A turn as OpenTelemetry spans in OTLP's JSON form, below the span of the client that sent it.

    client's span (traceparent)
    └── turn        arrived ─────────────────────────────────────────────▶ sent
        ├── queue   ────▶
        ├── restore      ────▶
        ├── prefill           ────▶
        ├── decode                 ───────────────────▶ ended
        └── send                                             ────────────▶

The times are those of the turn's status. A turn that was refused or answered from its record has only the part `send`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from microturn.errors import MicroturnError
from microturn.sessions.options import TurnOptions
from microturn.sessions.turn import Status, Turn
from microturn.telemetry.otlp import Attribute, attributes_of, nanoseconds

_INTERNAL, _SERVER = 1, 2
_ERROR = 2
_SAMPLED = 1
_PHASES = ("queue", "restore", "prefill", "decode")
_DEFAULTS = TurnOptions()
# Options that OpenTelemetry calls as we do: whole numbers, and those that it has as fractions.
_WHOLE = ("max_tokens", "seed")
_FRACTIONS = ("temperature", "top_k", "top_p", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class AnsweredTurn:
    """A turn and its last answer.

    Attributes:
        begun_s: when sending began, by the engine's clock.
        sent_s: when the answer was handed to Triton.
    """

    turn: Turn
    answer: Status | MicroturnError
    begun_s: float
    sent_s: float


def is_sampled(turn: Turn) -> bool:
    """Whether the client's trace context samples a turn."""
    traceparent = turn.request.options.get("traceparent")
    return traceparent is not None and bool(int(traceparent[-2:], 16) & _SAMPLED)


def spans_of(answered: AnsweredTurn, unix_offset_s: float, model: str) -> list[dict[str, Any]]:
    """The spans of a sampled turn.

    Args:
        answered: the turn with its answer.
        unix_offset_s: added to its times to get seconds since 1970.
        model: whose it is.
    """
    turn, answer = answered.turn, answered.answer
    _, trace_id, parent_id, _ = turn.request.options["traceparent"].split("-")
    turn_id = secrets.token_hex(8)
    arrived_s = turn.request.arrived_s

    def span(name: str, begun_s: float, ended_s: float) -> dict[str, Any]:
        return {
            "traceId": trace_id,
            "spanId": secrets.token_hex(8),
            "parentSpanId": turn_id,
            "name": name,
            "kind": _INTERNAL,
            "startTimeUnixNano": nanoseconds(begun_s + unix_offset_s),
            "endTimeUnixNano": nanoseconds(ended_s + unix_offset_s),
        }

    whole = span("turn", arrived_s, answered.sent_s) | {
        "spanId": turn_id,
        "parentSpanId": parent_id,
        "kind": _SERVER,
        "attributes": attributes_of(_described(turn, answer) | gen_ai_of(model) | _described_as_gen_ai(turn, answer)),
    }
    if isinstance(answer, MicroturnError):
        whole["status"] = {"code": _ERROR, "message": str(answer)}
    if isinstance(answer, MicroturnError) or not turn.begun_s:
        return [whole, span("send", answered.begun_s, answered.sent_s)]
    ends_s = [*accumulate((answer.timing_ms[phase] / 1e3 for phase in _PHASES), initial=arrived_s), answered.sent_s]
    parts = zip((*_PHASES, "send"), pairwise(ends_s), strict=True)
    return [whole, *(span(name, *times_s) for name, times_s in parts if times_s[1] > times_s[0])]


def gen_ai_of(model: str) -> dict[str, Attribute]:
    """What OpenTelemetry's conventions for generative AI want of every span and metric."""
    return {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "microturn", "gen_ai.request.model": model}


def _described(turn: Turn, answer: Status | MicroturnError) -> dict[str, Attribute]:
    known: dict[str, Attribute] = {"session": str(turn.request.session_id)}
    if isinstance(answer, MicroturnError):
        known |= {"code": answer.code}
    else:
        is_repetition = {"replayed": "true"} if answer.replayed else {}
        known |= {"turn": answer.turn, "finish_reason": answer.finish_reason, **answer.usage, **is_repetition}
    return {f"microturn.{name}": value for name, value in known.items()}


def _described_as_gen_ai(turn: Turn, answer: Status | MicroturnError) -> dict[str, Attribute]:
    """By OpenTelemetry's conventions for generative AI: what is not the default of a request, and its response."""
    known: dict[str, Attribute] = {"gen_ai.conversation.id": str(turn.request.session_id)}
    for name in (*_WHOLE, *_FRACTIONS):
        value = getattr(turn.options, name)
        if value != getattr(_DEFAULTS, name):
            known[f"gen_ai.request.{name}"] = value if name in _WHOLE else float(value)
    if isinstance(answer, MicroturnError):
        return known | {"error.type": answer.code}
    return known | {
        "gen_ai.response.finish_reasons": [answer.finish_reason],
        "gen_ai.usage.input_tokens": answer.usage["input_tokens"],
        "gen_ai.usage.output_tokens": answer.usage["output_tokens"],
    }
