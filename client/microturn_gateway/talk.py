"""What was said in a realtime session, and what of it the session on the server holds.

With a window the server lets go of what is old, and so does a talk: an item that begins where a rewind may not reach
any more cannot be changed, and is forgotten; of one that is still appended to, all but its end is. So an edit costs the
same however long a session has lived. An append costs the same without a window, too: nothing is compared for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from microturn_gateway.client_events import AppendBuffer, ClientEvent
from microturn_gateway.context import HeldContext, Message, Piece
from microturn_gateway.conversation import Conversation
from microturn_gateway.edits import buffered, edited
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
        self._is_growing = False  # the context is the conversation, and ends with the item that the buffer grows
        self._before: tuple[Conversation, list[Piece], bool] = self.conversation, [], False

    def begin_anew(self, tools: Tools) -> None:
        """Goes on in another session, which has these tools and holds nothing yet."""
        self.tools, self.context, self._is_growing = tools, HeldContext(), False

    @property
    def before(self) -> Conversation:
        """The conversation before the last edit, without what was forgotten then."""
        return self._before[0]

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
        chunk = self._growth(event, instructions)
        if chunk is None:
            self._forget()
            if not self.has_fixed_beginning and instructions != self._instructions:
                self._instructions, self._is_growing = instructions, False
        before = self.conversation, self.context.pieces, self._is_growing
        conversation = edited(self.conversation, event, self.context, is_implied=is_implied)
        missing = self._become(conversation) if chunk is None else [chunk]
        self._before, self.conversation = before, conversation
        # A clear that failed leaves the buffer's item where it is, and others come behind it.
        self._is_growing = isinstance(event, AppendBuffer) and buffered(conversation) is conversation.items[-1]
        return missing

    def undo(self, *, has_begun: bool) -> None:
        """The last edit failed.

        Args:
            has_begun: turns of it have ended, which stay undone when the next edit compares.
        """
        self.conversation, pieces, is_growing = self._before
        self._is_growing = is_growing and not has_begun
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

    def _growth(self, event: ClientEvent, instructions: str) -> Message | None:
        """What an append adds to the end of the context; None for any other edit, and where it is time to forget."""
        if not self._is_growing or not isinstance(event, AppendBuffer) or instructions != self._instructions:
            return None
        if self.window is not None:
            # A window's length is forgotten at a time, so that the cost is spread over as many tokens.
            num_old = self._first_editable - self.context.pieces[0].end
            if num_old > self.window.window_tokens:
                return None
        return Message("user", event.content)

    def _become(self, conversation: Conversation) -> list[Message]:
        target = conversation.messages(self._beginning)
        is_reached = self.context.shared_len(target) >= self._first_editable
        missing = self.context.become(target) if is_reached else None
        if missing is None:
            raise Refusal("failed_precondition", "this session cannot go back that far: open another one")
        return missing

    def _forget(self) -> None:
        if self._is_growing and self._forget_of_buffer():
            return
        num_pieces = until = 0
        pieces, conversation = self.context.pieces, self.conversation
        for message, num_items in self.conversation.told(self._beginning):
            until = _behind(pieces, until, message)
            # One that ends right there can still be gone on with, before the token that ended it.
            if until >= len(pieces) or pieces[until - 1].end >= self._first_editable:
                break
            if pieces[until].end > pieces[until - 1].end:  # otherwise a rewind to here would keep what follows, too
                num_pieces, conversation = until, self.conversation.behind(num_items, message.role)
        if num_pieces:
            self.conversation = conversation
            self.context.forget(num_pieces)

    def _forget_of_buffer(self) -> bool:
        """Forgets all but the end of the item that grows; False where all of it must stay.

        The end begins before the first editable position, so that a rewind to it, which would leave the rest of the
        item in the context, is refused.
        """
        pieces, item = self.context.pieces, self.conversation.items[-1]
        num_pieces = bisect_left(pieces, self._first_editable, hi=len(pieces) - 1, key=lambda piece: piece.end)
        num_kept = sum(len(piece.content) for piece in pieces[num_pieces:])
        if num_kept >= len(item.content):
            return False
        # No role stands before it: what goes on is its text, and no other line of a message begins.
        self.conversation = Conversation((replace(item, content=item.content[-num_kept:]),))
        self.context.forget(num_pieces)
        return True


def _behind(pieces: Sequence[Piece], index: int, message: Message) -> int:
    """The index behind the pieces that a message consists of."""
    missing = len(message.content)
    while missing > 0 and index < len(pieces):
        missing -= len(pieces[index].content)
        index += 1
    return index
