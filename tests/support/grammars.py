"""Grammars over a vocabulary that can be read: the bytes of ASCII, some words, and an end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from microturn.errors import FailedPrecondition
from microturn.model.sampler import draw
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from microturn.sessions.token_counts import TokenCounts
from microturn.text.answer_grammar import AnswerGrammar
from microturn.text.grammar import Grammars
from microturn.text.grammar_source import GrammarSource
from microturn.text.grammar_vocabulary import TokenTexts
from support.fake_runner import VOCAB_SIZE, expected_logits

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


# ---- the same for the model that is a hash: its ids are printable characters, and two ends ---------------------------

FAKE_ENDS = (VOCAB_SIZE - 2, VOCAB_SIZE - 1)


def fake_encode(text: str) -> list[int]:
    """The ids of printable ASCII."""
    return [ord(character) - ord(" ") for character in text]


def fake_text(token_ids: Sequence[int]) -> str:
    """The text of ids; that of an end is empty."""
    return "".join(chr(token_id + ord(" ")) for token_id in token_ids if token_id not in FAKE_ENDS)


def fake_grammars(ends: Collection[int] = FAKE_ENDS) -> Grammars:
    """Grammars of the model that is a hash, with tokens that end an answer and have no text."""
    texts = [b"" if token_id in ends else fake_text([token_id]).encode() for token_id in range(VOCAB_SIZE)]
    return Grammars(lambda: TokenTexts(texts, {}, fake_encode), ends)


@lru_cache
def hash_grammars(ends: frozenset[int]) -> Grammars:
    """The same, kept for all tests."""
    return fake_grammars(ends)


def plain_value(
    source: GrammarSource, history: Sequence[int], max_tokens: int, *, so_far: int = 0, **options: Any
) -> list[int]:
    """What the model that is a hash answers under a grammar: each token by a matcher of its own.

    Args:
        history: ids of the context, the last `so_far` of them of the value.
    """
    compiled, turn_options = AnswerGrammar((fake_grammars().compile(source),)), TurnOptions(**options)
    tokens, first = [*history], len(history) - so_far
    for _ in range(max_tokens):
        row = SamplingRow(
            turn_options,
            turn_options.seed or 0,
            len(tokens),
            TokenCounts.of(tokens),
            allowed=compiled.begin(tokens[first:]).allowed(FAKE_ENDS if turn_options.ignore_eos else ()),
            spared_ids=np.array(FAKE_ENDS, np.int64),
        )
        tokens.append(draw(expected_logits(tokens)[None], [row]).sampled()[0].token_id)
        try:
            compiled.begin(tokens[first:])
        except FailedPrecondition:
            break
    return tokens[len(history) :]
