"""What was said in a realtime session, and what of it the session on the server holds.

With a window the server lets go of what is old, and so does a talk: an item that begins where a rewind may not reach
any more cannot be changed, and is forgotten. So an edit costs the same however long a session has lived.
"""

from __future__ import annotations

from collections.abc import Sequence

from microturn_gateway.client_events import ClientEvent
from microturn_gateway.context import HeldContext, Message, Piece
from microturn_gateway.conversation import Conversation
from microturn_gateway.edits import edited
from microturn_gateway.failures import Refusal
from microturn_gateway.realtime_tools import Tools
from microturn_gateway.window import Window


class Talk:
    """One talk.

    Attributes:
        conversation: its items, but for those that are forgotten.
        context: what the session on the server holds; another object is another session.
        tools: that the context begins with.
        window: of the session; None where it ends with its context.
    """

    def __init__(self, tools: Tools) -> None:
        self.conversation = Conversation()
        self.context = HeldContext()
        self.tools = tools
        self.window: Window | None = None
        self._instructions = ""
        self._before: tuple[Conversation, list[Piece]] = self.conversation, []

    def begin_anew(self, tools: Tools) -> None:
        """Goes on in another session, which has these tools and holds nothing yet."""
        self.tools, self.context = tools, HeldContext()

    @property
    def has_fixed_beginning(self) -> bool:
        """Whether the window has left what the context begins with."""
        return self._first_editable > 0

    def edit(self, event: ClientEvent, instructions: str, *, is_implied: bool) -> list[Message]:
        """Does what a client asks for.

        Args:
            event: what that is.
            instructions: that the context begins with, as long as that can be changed.
            is_implied: see `edited`.

        Returns:
            What to append to the context, in its order.

        Raises:
            Refusal: it cannot be done, and nothing has changed.
        """
        self._forget()
        if not self.has_fixed_beginning:
            self._instructions = instructions
        before = self.conversation, self.context.pieces
        conversation = edited(self.conversation, event, self.context, is_implied=is_implied)
        target = conversation.messages(self._beginning)
        is_reached = self.context.shared_len(target) >= self._first_editable
        missing = self.context.become(target) if is_reached else None
        if missing is None:
            raise Refusal("failed_precondition", "this session cannot go back that far: open another one")
        self._before, self.conversation = before, conversation
        return missing

    def undo(self, *, has_begun: bool) -> None:
        """The last edit failed.

        Args:
            has_begun: turns of it have ended, which stay undone when the next edit compares.
        """
        self.conversation, pieces = self._before
        if not has_begun:
            self.context.pieces = pieces

    @property
    def _first_editable(self) -> int:
        """The first position that a rewind can always reach; see "Window" in PROTOCOL.md."""
        return 0 if self.window is None else max(0, self.context.longest_len - self.window.window_tokens)

    @property
    def _beginning(self) -> str:
        """The instructions, as long as they are not forgotten."""
        return "" if self.context.start else self._instructions

    def _forget(self) -> None:
        num_pieces = until = 0
        pieces, conversation = self.context.pieces, self.conversation
        for message, num_items in self.conversation.told(self._beginning):
            until = _behind(pieces, until, message)
            if until >= len(pieces) or pieces[until - 1].end > self._first_editable:
                break
            if pieces[until].end > pieces[until - 1].end:  # otherwise a rewind to here would keep what follows, too
                num_pieces, conversation = until, self.conversation.behind(num_items, message.role)
        if num_pieces:
            self.conversation = conversation
            self.context.forget(num_pieces)


def _behind(pieces: Sequence[Piece], index: int, message: Message) -> int:
    """The index behind the pieces that a message consists of."""
    missing = len(message.content)
    while missing > 0 and index < len(pieces):
        missing -= len(pieces[index].content)
        index += 1
    return index
