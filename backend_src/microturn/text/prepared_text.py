"""Encodes long text before its turn runs, except for its beginning and its end.

    So the first thing␣I wanted to say is ... and that was␣all
    head: joins the     ids, the same in any context       held
    held text

Behind a safe cut the ids do not depend on the text before it, so that they can be computed without the session's text,
in another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from microturn.text.encoder import TextEncoder
from microturn.text.writer import HeldText, Writer


@dataclass(frozen=True)
class PreparedText:
    """A prepared text.

    Attributes:
        parse_special: whether special tokens in it were parsed; it must be used with the same option.
        least_num_ids: lower bound of its number of ids.
        head: the text before the first safe cut; all of it if there is none or the text is too long.
        ids: of the text behind `head`.
        held: the text behind `ids`, which continues with the next text.
    """

    parse_special: bool
    least_num_ids: int
    head: str
    ids: Sequence[int] = ()
    held: HeldText = field(default_factory=HeldText)


def prepare_text(encoder: TextEncoder, text: str, *, parse_special: bool, enough: int) -> PreparedText:
    """Prepares a text.

    Args:
        encoder: of the model.
        text: that a turn will append.
        parse_special: whether special tokens in the text are tokens.
        enough: a text of more ids is only counted.
    """
    least = encoder.least_num_ids(text, enough)
    at = None if least > enough else _first_cut(encoder, text, parse_special=parse_special)
    if at is None:
        return PreparedText(parse_special, least, text)
    writer = Writer(encoder, HeldText(), None, is_context_empty=False, puts_bos=False)
    writer.write(text[at:], parse_special=parse_special)
    writer.cut()
    if not writer.ids:
        return PreparedText(parse_special, least, text)
    return PreparedText(parse_special, max(least, len(writer.ids)), text[:at], writer.ids, writer.held)


def _first_cut(encoder: TextEncoder, text: str, *, parse_special: bool) -> int | None:
    """The first safe cut that touches no special token; one may have begun before the text."""
    special_tokens = encoder.special_tokens
    start = special_tokens.max_len if parse_special else 0
    cuts = encoder.boundaries.all(text.rstrip(), start)
    return next((at for at in cuts if not parse_special or not special_tokens.touches(text, at)), None)
