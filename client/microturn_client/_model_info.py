"""What a server says of its model before any session is opened. PROTOCOL.md says what the fields mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

from microturn_client._errors import ProtocolError
from microturn_client._messages_pb2 import ModelConfig


@dataclass(frozen=True)
class Limits:
    """What a server allows; None where it does not say.

    Attributes:
        max_context: longest context of a session in tokens.
        max_sessions: sessions that are open at once.
        max_queued_turns: turns that may wait behind a running one.
        window_slack: tokens by which a session with a window can always be cut back.
        idle_timeout_s: silence after which a session ends that has asked for nothing else.
        max_idle_timeout_s: the longest time that it may ask for.
    """

    max_context: int | None = None
    max_sessions: int | None = None
    max_queued_turns: int | None = None
    window_slack: int | None = None
    idle_timeout_s: float | None = None
    max_idle_timeout_s: float | None = None


@dataclass(frozen=True)
class ModelInfo:
    """Which model a server has.

    Attributes:
        protocol_version: of the wire contract.
        model_name: what the model is called; None where the server does not say.
        model_fingerprint: equal on servers of the same model; None where the server does not say.
        limits: what it allows.
    """

    protocol_version: int
    model_name: str | None
    model_fingerprint: str | None
    limits: Limits


def parse_model_info(config: ModelConfig) -> ModelInfo:
    """Reads a model's config; limits that it does not know are left aside.

    Raises:
        ProtocolError: it is not that of a streaming model.
    """
    said = {name: parameter.string_value for name, parameter in config.parameters.items() if parameter.string_value}
    try:
        return ModelInfo(
            protocol_version=int(said["protocol_version"]),
            model_name=said.get("model_name"),
            model_fingerprint=said.get("model_fingerprint"),
            limits=_limits(json.loads(said.get("limits", "{}"))),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ProtocolError(f"'{config.name}' is no streaming model, by its config: {error!r}") from error


def _limits(said: object) -> Limits:
    if not isinstance(said, Mapping):
        raise TypeError(f"an object belongs where {said!r} is")
    limits = {field.name: said[field.name] for field in fields(Limits) if field.name in said}
    for name, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise TypeError(f"{name} is a number, not {limit!r}")
    return Limits(**limits)
