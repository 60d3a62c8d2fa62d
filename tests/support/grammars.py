"""Grammars over a vocabulary that can be read: the bytes of ASCII, some words, and an end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from microturn.text.grammar import Grammars, TokenTexts

_BYTES = [bytes([byte]) for byte in range(128)]
_WORDS = [b"red", b"green", b"blue", b'{"', b'": ', b"12", b"true", b"\xc3", b"\xa9"]
END = len(_BYTES) + len(_WORDS)
OTHER_END = END + 1
NUM_TOKENS = END + 2


def encode(text: str) -> list[int]:
    """The bytes of a text; of those beyond ASCII there are two, and an id without text stands for the others."""
    return [byte if byte < len(_BYTES) else _other(bytes([byte])) for byte in text.encode()]


def _other(byte: bytes) -> int:
    return word(byte) if byte in _WORDS else END


def word(text: bytes) -> int:
    """The id of one of the words."""
    return len(_BYTES) + _WORDS.index(text)


def grammars(*, num_padding: int = 0) -> Grammars:
    """Grammars of that vocabulary, with so many ids behind it that have no text."""
    texts = [*_BYTES, *_WORDS, *[b""] * (2 + num_padding)]
    return Grammars(lambda: TokenTexts(texts, {END: "<|end|>", OTHER_END: "<|other|>"}, encode), {END, OTHER_END})


def ids_of(words: NDArray[np.uint32], num_tokens: int = NUM_TOKENS) -> list[int]:
    """The ids whose bits are set."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[num_tokens:].any(), "an id beyond the vocabulary"
    return bits.nonzero()[0].tolist()


def text_of(token_ids: Sequence[int]) -> str:
    """The text of ids of this vocabulary."""
    return b"".join([*_BYTES, *_WORDS, b"", b""][token_id] for token_id in token_ids).decode()
