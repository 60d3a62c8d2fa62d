"""A model whose next token is a hash of all that came before. Tokens are the bytes of UTF-8 text.

As with the real one, a text that grows is taken up to its last space; the rest is held until more text comes or an
answer is asked for. So where a session has lost a token, a position, its seed or half a word, its answers change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

# Stands for an embedding among token ids.
EMBEDDING = -1

_ALPHABET = b"etaoin shrdlu"


def next_token(context: Sequence[int], seed: int) -> int:
    """The token that follows; ``seed`` is 0 where it plays no part."""
    digest = hashlib.blake2b(repr((list(context), seed)).encode(), digest_size=2).digest()
    return _ALPHABET[int.from_bytes(digest, "big") % len(_ALPHABET)]


def likeliest(token_id: int, num_tokens: int) -> list[tuple[int, float]]:
    """Tokens that might have come in place of one that did, itself the likeliest, with their log probabilities."""
    others = [other for other in range(num_tokens + 1) if other != token_id]
    return [(each, -0.5 - rank) for rank, each in enumerate([token_id, *others][:num_tokens])]


def encode(text: str) -> list[int]:
    """Ids of a text."""
    return list(text.encode())


def split_at_boundary(text: str) -> tuple[str, str]:
    """What of a growing text is certain, and what is held."""
    at = text.rfind(" ")
    return (text[:at], text[at:]) if at >= 0 else ("", text)


def decode(token_ids: Sequence[int]) -> str:
    """Text of generated ids."""
    return bytes(token_ids).decode()
