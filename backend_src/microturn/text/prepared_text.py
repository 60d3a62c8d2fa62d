"""Makes ids of long text before its turn's time has come, of all but its beginning and its end.

    So the first thing␣I wanted to say is ... and that was␣all
    head: joins what    ids, the same in any context       held
    is held by then

Behind a safe cut the ids are the same whatever stands before it, so that they can be made without knowing what the
session's text is by then, and in another thread. Belongs to no session and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from microturn.text.encoder import TextEncoder
from microturn.text.writer import HeldText, Writer


@dataclass(frozen=True)
class PreparedText:
    """A text in parts.

    Attributes:
        parse_special: how special tokens in it were read; otherwise this is of no use.
        least_num_ids: how many ids the text becomes at least.
        head: what stands before the first cut; all of it where there is none, or the text is too long.
        ids: what follows.
        held: what follows those, and goes on with the text that comes next.
    """

    parse_special: bool
    least_num_ids: int
    head: str
    ids: Sequence[int] = ()
    held: HeldText = field(default_factory=HeldText)


def prepare_text(encoder: TextEncoder, text: str, *, parse_special: bool, enough: int) -> PreparedText:
    """Prepares a text.

    Args:
        encoder: the model's.
        text: what a turn will append.
        parse_special: whether special tokens in the text are tokens.
        enough: of a text of more ids nothing is made but a count.
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
    """The first safe cut that no special token comes near; one may have begun before the text."""
    special_tokens = encoder.special_tokens
    start = special_tokens.max_len if parse_special else 0
    cuts = encoder.boundaries.all(text.rstrip(), start)
    return next((at for at in cuts if not parse_special or not special_tokens.touches(text, at)), None)
