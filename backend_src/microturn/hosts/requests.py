"""A request as it came, of whatever host, becomes a turn's request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from microturn.errors import InternalError, InvalidArgument, MicroturnError
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput, TurnInput
from microturn.sessions.options import SessionOptions, parse_parameters
from microturn.sessions.turn import SessionId, TurnRequest, TurnSink

log = logging.getLogger(__name__)


def turn_request(
    session_id: SessionId,
    *,
    start: bool,
    end: bool,
    parameters: Callable[[], str],
    tensors: Callable[[], Mapping[str, Any]],
    sink: TurnSink,
    arrived_s: float,
) -> TurnRequest:
    """Reads a request; an error in it is passed on as a refusal, to keep the order of the session's turns.

    Args:
        session_id: of the turn's session.
        start: whether the turn opens it.
        end: whether the turn closes it.
        parameters: reads the request's options, as a JSON object.
        tensors: reads its inputs, numpy arrays by name.
        sink: where the answer goes.
        arrived_s: when it arrived, by the engine's clock.
    """
    given: TurnInput = TokenInput(())
    options: dict[str, Any] = {}
    session_options = SessionOptions()
    refusal = None
    try:
        options, session_options = parse_parameters(parameters(), start=start)
        given = _input_of(tensors())
    except MicroturnError as error:
        refusal = error
    except Exception as error:
        log.exception("a request could not be read")
        refusal = InternalError(f"the request could not be read: {error}")
    return TurnRequest(
        session_id=session_id,
        input=given,
        sink=sink,
        arrived_s=arrived_s,
        start=start,
        end=end,
        options=options,
        session_options=session_options,
        refusal=refusal,
    )


def _input_of(tensors: Mapping[str, Any]) -> TurnInput:
    if len(tensors) != 1:
        raise InvalidArgument(f"a turn has one input, not {len(tensors)} ({', '.join(sorted(tensors))}): send one")
    ((name, array),) = tensors.items()
    num_dims = 3 if name == "input_embeds" else 2
    if array.ndim != num_dims or array.shape[0] != 1:
        raise InvalidArgument(f"{name} has shape {list(array.shape)}: it is [1, n{', hidden' * (num_dims - 2)}]")
    match name:
        case "input_ids":
            return TokenInput(tuple(array[0].tolist()))
        case "input_embeds":
            return EmbedInput(torch.from_numpy(array[0].copy()))
        case _:
            return TextInput(_text_of(array))


def _text_of(array: Any) -> str:
    if array.size != 1:
        raise InvalidArgument(f"text_input has {array.size} elements: send one string")
    try:
        return str(array.item().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"text_input is not UTF-8 at byte {error.start}: send whole characters") from None
