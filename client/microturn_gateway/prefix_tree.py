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
            child, num_shared = node.nearest_child(role, rest)
            if child is None:
                break
            node, offset = child, offset + num_shared
            if num_shared == len(rest):
                index, offset = index + 1, 0
            elif num_shared < len(child.content):
                break  # an answer that is cut here
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

    def nearest_child(self, role: Hashable, rest: Content) -> tuple[_Node[Holder] | None, int]:
        """What goes on from here as the rest of a message does, and for how many characters of it; else None."""
        exact = self.children.get((role, rest))
        if exact is not None:
            return exact, len(rest)
        alike = [child for child in self.children.values() if child.role == role and child.shared_len(rest)]
        if not alike:
            return None, 0
        nearest = max(alike, key=lambda child: (child.shared_len(rest), is_stripped(child.content, rest)))
        return nearest, nearest.shared_len(rest)

    def shared_len(self, rest: Content) -> int:
        """How much of the rest of a message stays: the piece as a whole, or of an answer what both begin with."""
        if self.role == "tool" or type(rest) is not type(self.content):
            return 0  # each result is a message, which nothing can be added to
        if rest[: len(self.content)] == self.content:
            return len(self.content)
        if self.role != "assistant":
            return 0
        return len(rest) if is_stripped(rest, self.content) else common_len(rest, self.content)
