"""Generated tokens to text, as soon as it is certain.

Each token's bytes are looked up and appended to the bytes of a character that isn't complete yet. That costs the same
for every token and needs a few bytes of state, while decoding a window of ids again and comparing texts costs two
decodes a token, keeps ids for as long as they make no valid character, and sends a wrong text where a decoder changes
what it said before.

The texts of a generation together are what the tokenizer's own decoder makes of all its ids, with one exception: where
single-byte tokens in a row (SentencePiece's byte fallback) are not valid UTF-8, that decoder replaces every byte of the
row, even those of characters that were complete and have been sent; here only the invalid ones are replaced.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

from microturn.codec import Piece
from microturn.text.stop_strings import stop_strings
from microturn.text.vocabulary import Vocabulary

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class OutputState:
    """What is remembered between generated tokens, and between generations.

    Attributes:
        partial_char: bytes that a character begins with.
        replaced: stands for such bytes that will never be continued; comes before the next text.
        has_text: whether a token with text came since the last input.
        stop: the stop strings of this generation.
        withheld: text that may be the beginning of one.
    """

    partial_char: bytes = b""
    replaced: str = ""
    has_text: bool = False
    stop: tuple[str, ...] = ()
    withheld: str = ""


class Decoder:
    """Makes text of one model's tokens. Keeps no state between calls."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def interrupt(self, state: OutputState) -> OutputState:
        """Input comes between two generations: what a character begins with stays incomplete for ever."""
        return OutputState(replaced=state.replaced + self._replace(state.partial_char))

    def begin(self, state: OutputState, stop: Sequence[str]) -> OutputState:
        """Looks for these stop strings from here on.

        Errors:
            InvalidArgument: a stop string is empty.
        """
        stop_strings(tuple(stop))
        return replace(state, stop=tuple(stop))

    def accept(self, state: OutputState, token_id: int) -> tuple[Piece, OutputState]:
        """Takes the next generated token."""
        data = self._vocabulary.text_bytes(token_id)
        if not data:
            return Piece(""), state
        if not state.has_text:
            data = self._vocabulary.first_text_bytes(token_id)
        text, partial_char = self._decode(state.partial_char + data)
        replaced = state.replaced
        if text and replaced:
            text, replaced = replaced + text, ""
        if not state.stop:
            return Piece(text), OutputState(partial_char, replaced, has_text=True)
        scanned = stop_strings(state.stop).scan(state.withheld + text)
        return (
            Piece(scanned.text, scanned.stop),
            OutputState(partial_char, replaced, has_text=True, stop=state.stop, withheld=scanned.withheld),
        )

    def end(self, state: OutputState) -> tuple[str, OutputState]:
        """No stop string will be completed: what was withheld is text."""
        return state.withheld, replace(state, stop=(), withheld="")

    def _decode(self, data: bytes) -> tuple[str, bytes]:
        """Text of the characters that are complete, and the bytes after them."""
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
        """U+FFFD for bytes that make no character, as many as the tokenizer's decoder would write."""
        return _REPLACEMENT * len(data) if self._vocabulary.has_byte_fallback else data.decode("utf-8", "replace")
