"""What a client may ask of the model, for both APIs: names, types, and how long an answer may be.

Ranges are the server's to check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from microturn_gateway.fields import Fields

# Options of a turn that are neither OpenAI's nor the gateway's own business; see PROTOCOL.md.
GENERATION_OPTIONS: Mapping[str, type | tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "min_p": (int, float),
    "min_tokens": int,
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "seed": int,
    "ignore_eos": bool,
    "deadline_ms": (int, float),
}

# All that `take_generation_options` reads.
TURN_OPTIONS = (*GENERATION_OPTIONS, "stop", "logit_bias")

# Without a limit from the client an answer leaves this much of the context for what the template and text that is
# not cut yet may add in front of it.
_RESERVED_TOKENS = 64


def take_generation_options(fields: Fields) -> dict[str, Any]:
    """The options that are there.

    Raises:
        Refusal: one is of another type.
    """
    options = {name: fields.take(name, kind, None) for name, kind in GENERATION_OPTIONS.items()}
    stop = fields.take("stop", (str, list), None)
    if isinstance(stop, str):
        stop = [stop]
    if stop is not None and not all(isinstance(text, str) for text in stop):
        fields.refuse("invalid_type", f"'{fields.path('stop')}' must be texts", "stop")
        stop = None
    options |= {"stop": stop or None, "logit_bias": fields.take("logit_bias", dict, None) or None}
    return {name: value for name, value in options.items() if value is not None}


def room_for_answer(context_len: int, max_context: int | None, most: int) -> int:
    """How many tokens an answer may have whose client did not say, at least 1.

    Args:
        context_len: tokens before it.
        max_context: of the session; None where it is not known.
        most: the gateway's own limit.
    """
    if max_context is None:
        return most
    return max(1, min(most, max_context - context_len - _RESERVED_TOKENS))
