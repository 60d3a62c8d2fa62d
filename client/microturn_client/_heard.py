"""Where a barge-in cuts, by what was heard of the last answer."""

from __future__ import annotations

from collections.abc import Sequence

from microturn_client._errors import InvalidArgument
from microturn_client._pending_turn import PendingTurn
from microturn_client._transcript import Transcript

# Behind every context: with an interrupt the server takes it for the end.
AT_END = 2**53


def position_behind(
    turns: Sequence[PendingTurn],
    *,
    heard_tokens: int | None = None,
    heard_chars: int | None = None,
    heard_text: str | None = None,
) -> int | None:
    """The position behind what was heard; None where that is all that was handed out, whichever turn it came from.

    Args:
        turns: those of the session, in their order.
        heard_tokens: how much of the last answer was heard, in one of three ways.
        heard_chars: see above.
        heard_text: see above.

    Raises:
        InvalidArgument: more than was handed out, or nothing was.
    """
    if not (heard_tokens or heard_chars or (heard_text or "").strip()):
        last = next((turn for turn in reversed(turns) if turn.generates and not turn.is_passing), None)
        if last is not None and not last.num_handed:
            return None  # the answers before it were heard
    heard = next((turn for turn in reversed(turns) if turn.num_handed), None)
    if heard is None or heard.start is None:
        raise InvalidArgument("nothing was handed out that could have been heard")
    if heard_tokens is not None:
        if not 0 <= heard_tokens <= heard.num_handed:
            raise InvalidArgument(f"heard_tokens={heard_tokens}: {heard.num_handed} were handed out")
        return heard.start + heard_tokens
    return _behind_text(heard, num_chars=heard_chars, text=heard_text)


def end_of_handed(turns: Sequence[PendingTurn], transcript: Transcript) -> int:
    """The position behind all that was handed out; ``AT_END`` where nobody has said yet how long the context is."""
    for turn in turns:
        if turn.start is not None and not turn.is_left and (turn.result is None or len(turn.ids) > turn.num_handed):
            return turn.end
    return len(transcript) if transcript.is_placed else AT_END


def _behind_text(turn: PendingTurn, *, num_chars: int | None, text: str | None) -> int:
    """The position behind so much of the text that was handed out of a turn: the token is kept in which it ends.

    Raises:
        InvalidArgument: ``text`` is not how the answer begins.
    """
    assert turn.start is not None
    if text is not None:
        said = "".join(event.text for event in turn.handed)
        num_spaces = len(said) - len(said.lstrip())
        if not said.lstrip().startswith(text.lstrip()):
            raise InvalidArgument("heard_text is not how the answer begins")
        num_chars = len(text.lstrip()) + num_spaces if text.lstrip() else 0
    assert num_chars is not None
    position = turn.start
    for event in turn.handed:
        if num_chars <= 0:
            break
        position = event.position + len(event.ids)
        num_chars -= len(event.text)
    return position
