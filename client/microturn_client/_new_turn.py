"""What a program asks for, as turns: with the options that they are sent with, or refused before anything is sent."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from microturn_client._errors import InvalidArgument
from microturn_client._inputs import InputTensor, encode_input
from microturn_client._options import DEFAULT_MAX_TOKENS, MessageRole
from microturn_client._pending_turn import PendingTurn
from microturn_client._requests import Requests
from microturn_client._timeouts import Timeouts

if TYPE_CHECKING:
    from microturn_client._session_core import SessionCore

# The options of ``ask`` that are about the message; the others are about the answer.
_OF_MESSAGE = frozenset(("parse_special", "return_appended_ids", "rewind_to", "on_overlap"))

# Whose messages a program gives; a turn that generates with one of these roles goes on writing that message.
_GIVEN_ROLES = frozenset(("system", "user", "tool"))
_CONTINUES_MESSAGE = (
    "a turn with role='{role}' and max_tokens={max_tokens} goes on writing that message instead of answering it: "
    "session.ask(text) is a user's message and its answer, session.append(text, role='{role}') the message alone"
)
# From here to the program: through the session core, and ``turn`` or ``send``.
_STACK_LEVEL = 4


def new_turn(requests: Requests, tensor: InputTensor, options: Mapping[str, object]) -> PendingTurn:
    """A turn of the program's; warns of one that goes on writing the user's message.

    Raises:
        InvalidArgument, TypeError: when the turn has no form on the wire.
    """
    options = {**options, "max_tokens": requests.max_tokens(tensor, options)}
    requests.check(options)
    if options.get("role") in _GIVEN_ROLES and not tensor.is_empty and options["max_tokens"] != 0:
        warnings.warn(_CONTINUES_MESSAGE.format(**options), stacklevel=_STACK_LEVEL)
    shows_ids = bool({**requests.options, **options}.get("return_appended_ids"))
    if requests.tool_names and options["max_tokens"] != 0:
        options = {"skip_special_tokens": False, **options}
    return PendingTurn(tensor, options, shows_ids=shows_ids, tool_names=requests.tool_names)


def begin_ask(
    core: SessionCore,
    tensor: InputTensor,
    options: Mapping[str, object],
    timeouts: Timeouts,
    role: MessageRole = "user",
) -> PendingTurn:
    """Queues a message, and behind it its answer, which fails where the message is refused.

    Args:
        core: of the session.
        tensor: the message.
        options: of both; with ``max_tokens`` 0 it is not answered.
        timeouts: of each.
        role: whose message it is.

    Raises:
        MicroturnError, TypeError: as ``SessionCore.begin_turn``; nothing is queued.
    """
    if "role" in options:
        raise InvalidArgument("this is a message and the assistant's answer: give role= to turn()")
    of_message = {name: value for name, value in options.items() if name in _OF_MESSAGE}
    of_answer = {name: value for name, value in options.items() if name not in _OF_MESSAGE}
    of_answer["role"] = "assistant"
    if of_answer.get("max_tokens") is None:
        of_answer["max_tokens"] = core.requests.options.get("max_tokens", DEFAULT_MAX_TOKENS)
    core.requests.check(of_answer)
    message = core.begin_turn(tensor, {**of_message, "role": role, "max_tokens": 0}, *timeouts)
    if of_answer["max_tokens"] == 0 and role == "tool":
        return message
    answer = core.begin_turn(encode_input(None), of_answer, *timeouts)
    answer.follows = message
    return answer
