"""Converts generated tokens to text, as soon as it is certain.

Each token's bytes are looked up and appended to the bytes of an incomplete character. That costs the same for every
token and needs a few bytes of state. Decoding a window of ids again and comparing texts would cost two decodes per
token, keep ids until they form a valid character, and send wrong text if a decoder changes its earlier output.

A token that ends inside a character has its text come with the rest of that character, or with the end of the
generation. So wherever text has come, and the generation goes on, the tokens so far say it and no half character.

The concatenated texts of a generation are what the tokenizer's own decoder makes of all its ids, with one exception: if
consecutive single-byte tokens (SentencePiece's byte fallback) are not valid UTF-8, that decoder replaces all their
bytes, even those of complete characters, which have been sent; here only the invalid ones are replaced.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

from microturn.text.codec import Piece
from microturn.text.stop_strings import stop_strings
from microturn.text.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class OutputState:
    """The state between generated tokens, and between generations.

    Attributes:
        partial_char: bytes of an incomplete character.
        has_text: whether a token with text came since the last input.
        stop: the stop strings of this generation.
        withheld: text that may be the beginning of a stop string, or that a token has before half a character.
        shows_special: whether special tokens are text in this generation.
    """

    partial_char: bytes = b""
    has_text: bool = False
    stop: tuple[str, ...] = ()
    withheld: str = ""
    shows_special: bool = False


class Detokenizer:
    """Decodes the tokens of one model. Stateless."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def interrupt(self, state: OutputState) -> OutputState:
        """Handles input between two generations: an incomplete character stays incomplete, and is told nobody."""
        return OutputState()

    def drop_half_character(self, state: OutputState) -> OutputState:
        """Handles an answer that begins without input, and does not go on with an incomplete character."""
        return replace(state, partial_char=b"")

    def begin(self, state: OutputState, stop: Sequence[str], *, shows_special: bool) -> OutputState:
        """Begins a generation with these stop strings.

        Errors:
            InvalidArgument: a stop string is empty.
        """
        stop_strings(tuple(stop))
        return replace(state, stop=tuple(stop), shows_special=shows_special)

    def accept(self, state: OutputState, token_id: int) -> tuple[Piece, OutputState]:
        """Takes the next generated token."""
        data = self._vocabulary.text_bytes(token_id)
        if data:
            text, state = self._decode_next(
                state, data if state.has_text else self._vocabulary.first_text_bytes(token_id)
            )
        else:
            # What is read again later, without special tokens, must come to the same state: they leave it as it is.
            text = self._vocabulary.special_text(token_id) if state.shows_special else ""
        text = state.withheld + text
        piece, withheld = stop_strings(state.stop).scan(text) if state.stop else (Piece(text), "")
        if data and state.partial_char and piece.stop is None:
            piece, withheld = Piece(""), text
        return piece, state if withheld == state.withheld else replace(state, withheld=withheld)

    def end(self, state: OutputState) -> tuple[str, OutputState]:
        """Ends a generation and returns the withheld text."""
        return state.withheld, replace(state, stop=(), withheld="", shows_special=False)

    def _decode_next(self, state: OutputState, data: bytes) -> tuple[str, OutputState]:
        """The text that a token's bytes made certain, and the state behind them."""
        text, partial_char = self._decode(state.partial_char + data)
        return text, replace(state, partial_char=partial_char, has_text=True)

    def _decode(self, data: bytes) -> tuple[str, bytes]:
        """The text of the complete characters, and the remaining bytes."""
        text = ""
        while True:
            try:
                more, num_bytes = codecs.utf_8_decode(data, "strict", False)
            except UnicodeDecodeError as error:
                text += data[: error.start].decode() + self._replace(data[error.start : error.end])
                data = data[error.end :]
            else:
                return text + more, data[num_bytes:]

    def _replace(self, data: bytes) -> str:
        """Replaces invalid bytes by as many U+FFFD as the tokenizer's decoder would write."""
        return _REPLACEMENT * len(data) if self._vocabulary.has_byte_fallback else data.decode("utf-8", "replace")
