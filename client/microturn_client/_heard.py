"""Where in an answer a listener was, by the text that was heard of it."""

from __future__ import annotations

from microturn_client._errors import InvalidArgument
from microturn_client._pending_turn import PendingTurn


def position_after(turn: PendingTurn, *, num_chars: int | None = None, text: str | None = None) -> int:
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
