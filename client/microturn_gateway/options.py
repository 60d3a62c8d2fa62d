"""What a client may ask of the model, for both APIs: names and types.

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
