"""Who asks, as far as callers are told apart, and which sessions are theirs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """Who asks.

    Attributes:
        token_hash: of the bearer token, which tells callers apart: places and room are shared among these.
        connection: of a caller's, whose sessions no other request finds; empty for those that every request finds.
    """

    token_hash: bytes
    connection: bytes = b""
