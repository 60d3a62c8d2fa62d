"""Who asks, as far as callers are told apart, and which sessions are theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# In their order: the first that is given counts.
_HINT_HEADERS = ("x-session-id", "x-openwebui-chat-id")


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        token_hash: of the bearer token, which tells callers apart: places and room are shared among these.
        connection: of a caller's, whose sessions no other request finds; empty for those that every request finds.
        hint: which conversation this is; of sessions that hold as much of it, one of the same hint is preferred.
    """

    token_hash: bytes
    connection: bytes = b""
    hint: int | None = field(default=None, compare=False)


def hint_of(headers: Mapping[str, str], prompt_cache_key: object) -> int | None:
    """What a client calls its conversation; None where it does not.

    Args:
        headers: of the request, by lower-case name.
        prompt_cache_key: of its body, whatever it is.

    Returns:
        A hash: names may be long, and equal ones of two conversations do no harm.
    """
    names = [*(headers.get(name) for name in _HINT_HEADERS), prompt_cache_key]
    return next((hash(name) for name in names if name and isinstance(name, str)), None)
