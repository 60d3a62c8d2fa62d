"""Who holds the longest beginning of a conversation: a tree of what is held, piece by piece.

    system "Be brief." ─┬─ user "Hello" ─┬─ assistant "Hi!" ─── user "Wait"     one holder
                        │                └─ assistant "Hey"                     another
                        └─ user "Why?"                                          a third

A search goes down for as long as the conversation goes on alike, and looks at what else goes on from there. So it costs
the length of the conversation, however many holders there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from microturn_gateway.context import Content, Message, Piece, common_len, is_stripped

Holder = TypeVar("Holder", bound=Hashable)


class PrefixTree(Generic[Holder]):
    """What all holders hold."""

    def __init__(self) -> None:
        self._top = _Node[Holder](None, None, "")
        self._ends: dict[Holder, _Node[Holder]] = {}

    def __contains__(self, holder: Holder) -> bool:
        """Whether it can be found."""
        return holder in self._ends

    def put(self, holder: Holder, owner: Hashable, pieces: Sequence[Piece]) -> None:
        """A holder holds these pieces now, and nothing else.

        Args:
            holder: of them.
            owner: whose the holder is: it is found by nobody else.
            pieces: in their order.
        """
        self.remove(holder)
        node = self._top
        for role, content in ((owner, ""), *((piece.role, piece.content) for piece in pieces)):
            node = node.children.setdefault((role, content), _Node(node, role, content))
            node.holders[holder] = None
        self._ends[holder] = node

    def remove(self, holder: Holder) -> None:
        """Nobody finds this holder any more."""
        node = self._ends.pop(holder, None)
        while node is not None and node.parent is not None:
            del node.holders[holder]
            if not node.holders:
                del node.parent.children[node.role, node.content]
            node = node.parent

    def nearest(self, owner: Hashable, conversation: Sequence[Message]) -> list[Holder]:
        """Those that hold the longest beginning of a conversation, the one that was put last first."""
        root = self._top.children.get((owner, ""))
        if root is None:
            return []
        node, index, offset = root, 0, 0
        while index < len(conversation):
            role, rest = conversation[index].role, conversation[index].content[offset:]
            alike = node.nearest_children(role, rest)
            if not alike:
                break
            if not alike[0].is_whole_in(rest):
                return [holder for holder in reversed(node.holders) if any(holder in child.holders for child in alike)]
            node = alike[0]
            num_taken = node.shared_len(rest)
            index, offset = (index + 1, 0) if num_taken == len(rest) else (index, offset + num_taken)
        return [] if node is root else list(reversed(node.holders))


class _Node(Generic[Holder]):
    """A place in the tree.

    Attributes:
        parent: what comes before it; None at the top.
        role: whose piece it is.
        content: of the piece.
        children: what comes behind it.
        holders: who holds all up to it, the one that was put last at the end.
    """

    def __init__(self, parent: _Node[Holder] | None, role: Hashable, content: Content) -> None:
        self.parent = parent
        self.role = role
        self.content = content
        self.children: dict[tuple[Hashable, Content], _Node[Holder]] = {}
        self.holders: dict[Holder, None] = {}

    def nearest_children(self, role: Hashable, rest: Content) -> list[_Node[Holder]]:
        """What goes on from here longest as the rest of a message does: one as a whole, or answers to be cut alike."""
        exact = self.children.get((role, rest))
        if exact is not None:
            return [exact]
        lens = {child: child.shared_len(rest) for child in self.children.values() if child.role == role}
        longest = max(lens.values(), default=0)
        alike = [child for child, num in lens.items() if num == longest > 0]
        return [child for child in alike if child.is_whole_in(rest)][:1] or alike

    def shared_len(self, rest: Content) -> int:
        """How much of the rest of a message stays: the piece as a whole, or of an answer what both begin with."""
        if not self.is_whole_in(rest):
            return common_len(rest, self.content) if self.role == "assistant" else 0
        return len(self.content) if rest[: len(self.content)] == self.content else len(rest)

    def is_whole_in(self, rest: Content) -> bool:
        """Whether the rest of a message begins with this piece, or is this answer without the space around it."""
        if self.role == "tool":  # each result is a message, which nothing can be added to
            return rest == self.content
        is_answer = self.role == "assistant" and is_stripped(rest, self.content)
        return rest[: len(self.content)] == self.content or is_answer
