"""What of a conversation the server's context holds already, and what must be cut off and appended to make it another.

    conversation   system "Be brief."   user "Hello there"      assistant "Hi! How are"   user "Wait"
    pieces         ├── 24 ────────────┤├ 27 ┤├ 29 ───────────┤├─ · · · · · 41 ─┤
                                                                    ▲ cut of an answer, between two of its tokens

A piece is what one turn appended or generated, and the position behind it. Both of the gateway's APIs keep a
conversation as a list of messages; whatever a client does to it, the longest common prefix decides what stays, so that
its KV stays too. There is no tokenizer here: text that a client sent can be cut between pieces
only, an answer between its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from microturn_client import MessageRole

Content = str | tuple[int, ...]


def joined(one: Content, other: Content) -> Content | None:
    """One behind the other; None where one is text and the other ids."""
    if isinstance(one, str):
        return one + other if isinstance(other, str) else None
    return None if isinstance(other, str) else one + other


def is_stripped(one: Content, other: Content) -> bool:
    """Whether two texts differ in surrounding whitespace only."""
    return isinstance(one, str) and isinstance(other, str) and one.strip() == other.strip()


def common_len(one: Content, other: Content) -> int:
    """How many characters or ids both begin with."""
    unlike = (index for index, (each, its) in enumerate(zip(one, other, strict=False)) if each != its)
    return next(unlike, min(len(one), len(other)))


@dataclass(frozen=True, slots=True)
class Message:
    """Something that a role says: text, or token ids."""

    role: MessageRole
    content: Content


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in an answer: the tokens before `position` say its first `num_chars` characters."""

    num_chars: int
    position: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one turn left in the context.

    Attributes:
        end: absolute position behind it.
        cuts: of an answer, in their order; empty for what a client sent.
        has_end: of an answer that ended by itself: its last token says so, and nothing of its message follows that.
    """

    role: MessageRole
    content: Content
    end: int
    cuts: tuple[Cut, ...] = ()
    has_end: bool = False

    @property
    def is_answer(self) -> bool:
        """Whether the model said it."""
        return bool(self.cuts)

    def opened(self) -> Piece:
        """This without the token that ended it: its message goes on."""
        return replace(self, end=self.end - 1, has_end=False) if self.has_end else self

    def cut_before(self, num_chars: int) -> Cut | None:
        """The last cut that keeps no more than so many characters; None when not even one token fits."""
        fitting = [cut for cut in self.cuts if cut.num_chars <= num_chars]
        return fitting[-1] if fitting else None


class HeldContext:
    """The context of one session, as far as its turns have told.

    Attributes:
        pieces: what shall stay, in its order.
        start: absolute position where they begin: what stood before is forgotten.
        context_len: absolute length of the server's context. Where it exceeds `end`, the next turn must rewind.
        longest_len: the most that it was.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.start = 0
        self.context_len = 0
        self.longest_len = 0
        self._may_be_longer = False

    @property
    def end(self) -> int:
        """The absolute position behind what shall stay."""
        return self.pieces[-1].end if self.pieces else self.start

    @property
    def rewind_to(self) -> int | None:
        """Where the next turn must cut the server's context; None when it holds nothing too much."""
        return None if self.end == self.context_len and not self._may_be_longer else self.end

    @property
    def rewinding(self) -> Mapping[str, Any]:
        """The same as an option of that turn."""
        return {} if self.rewind_to is None else {"rewind_to": self.rewind_to}

    def branched(self, *, is_answering: bool) -> HeldContext:
        """The context of a session that is forked from this one.

        Args:
            is_answering: the answer to it may be in the fork.
        """
        branch = HeldContext()
        branch.pieces, branch.context_len, branch._may_be_longer = list(self.pieces), self.context_len, is_answering
        return branch

    def shared_len(self, target: Sequence[Message]) -> int:
        """How long the context stays where it becomes a conversation, in tokens."""
        kept, _ = self._beginning_of(target)
        return kept[-1].end if kept else self.start

    def goes_on_with(self, target: Sequence[Message]) -> bool:
        """Whether all of it stays where it becomes a conversation, but for what of the last answer was not heard."""
        kept, _ = self._beginning_of(target)
        return len(kept) == len(self.pieces)

    def become(self, target: Sequence[Message]) -> list[Message] | None:
        """Lets go of what does not begin the target, and says what to append behind the rest.

        Returns:
            What is missing, in its order; None when only a new session can become it: the server cannot cut off what
            has left no token.
        """
        kept, missing = self._beginning_of(target)
        if not kept and self.pieces and self.pieces[0].end == self.start:
            return None
        self.pieces = kept
        return missing

    def go_on(self) -> None:
        """What is generated next goes on with the message at the end, also where that is an answer that has ended."""
        if self.pieces:
            self.pieces = [*self.pieces[:-1], self.pieces[-1].opened()]

    def recognised(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation as clients send it back: an answer whose surrounding whitespace got lost is as it was.

        Only in its own place, behind all that came before it, and where the client's text does not begin with it.
        """
        known = list(messages)
        for piece, index, offset in self._beside(known):
            if not piece.is_answer or _begins(known[index].content, offset, piece.content):
                continue
            if is_stripped(known[index].content[offset:], piece.content):
                content = joined(known[index].content[:offset], piece.content)
                assert content is not None  # both are text
                known[index] = replace(known[index], content=content)
        return known

    def append(self, message: Message, context_len: int) -> None:
        """A turn has appended this, and the server's context has this length now."""
        self.pieces.append(Piece(message.role, message.content, context_len))
        self.rewound(context_len)

    def answer(self, piece: Piece, context_len: int) -> None:
        """A turn has generated this, and the server's context has this length now."""
        self.pieces.append(piece)
        self.rewound(context_len)

    def rewound(self, context_len: int) -> None:
        """A turn that appended nothing has ended."""
        self.context_len, self._may_be_longer = context_len, False
        self.longest_len = max(self.longest_len, context_len)

    def forget(self, num_pieces: int) -> None:
        """Lets go of the first so many pieces, which will not change; nothing is compared with them any more."""
        self.start = self.pieces[num_pieces - 1].end
        self.pieces = self.pieces[num_pieces:]

    def _beginning_of(self, target: Sequence[Message]) -> tuple[list[Piece], list[Message]]:
        """What stays for a target, and what of the target is missing behind that."""
        num_kept, reached, answer = self._common_prefix(target)
        while 0 < num_kept < len(self.pieces) and self.pieces[num_kept].end == self.pieces[num_kept - 1].end:
            # A rewind keeps every turn that had ended there, this one too: go on from a place before both.
            num_kept, answer = num_kept - 1, None
            reached -= len(self.pieces[num_kept].content)
        kept = self.pieces[:num_kept]
        if answer is not None:
            kept, reached = [*kept, answer], reached + len(answer.content)
        missing = _behind(target, reached)
        if kept and missing and missing[0].role == kept[-1].role:
            kept[-1] = kept[-1].opened()
        return kept, missing

    def _common_prefix(self, target: Sequence[Message]) -> tuple[int, int, Piece | None]:
        """How many pieces the target begins with, how much of its content they are, and what is left of an answer."""
        num_kept = reached = 0
        for piece, index, offset in self._beside(target):
            content = target[index].content
            if piece.role == "tool" and piece.content != content[offset:]:
                break  # each result is a message, which nothing can be added to
            if not _begins(content, offset, piece.content):
                return num_kept, reached, _shortened(piece, content[offset:])
            num_kept += 1
            reached += len(piece.content)
        return num_kept, reached, None

    def _beside(self, target: Sequence[Message]) -> Iterator[tuple[Piece, int, int]]:
        """Each piece as long as those before it begin the target; the index of the message there; the place in it.

        The target is read when the next piece is asked for: who goes through it may change a message before.
        """
        index = offset = 0
        for piece in self.pieces:
            while index < len(target) and offset == len(target[index].content):
                index, offset = index + 1, 0
            if index == len(target) or piece.role != target[index].role:
                return
            if type(target[index].content) is not type(piece.content):
                return
            yield piece, index, offset
            if not _begins(target[index].content, offset, piece.content):
                return
            offset += len(piece.content)


def _begins(content: Content, offset: int, part: Content) -> bool:
    """Whether this part is what begins there. A message may have many parts: the rest of it is not copied for each."""
    return content[offset : offset + len(part)] == part


def _shortened(piece: Piece, rest: Content) -> Piece | None:
    """What of an answer can stay where another text goes on; None when nothing can."""
    cut = piece.cut_before(common_len(piece.content, rest))
    if cut is None or cut.num_chars == 0:
        return None
    kept = tuple(other for other in piece.cuts if other.num_chars <= cut.num_chars)
    return replace(piece, content=piece.content[: cut.num_chars], end=cut.position, cuts=kept, has_end=False)


def _behind(target: Sequence[Message], reached: int) -> list[Message]:
    """What of the target stands behind its first so many characters and ids."""
    missing = []
    for message in target:
        rest = message.content[reached:]
        reached = max(0, reached - len(message.content))
        if rest:
            missing.append(Message(message.role, rest))
    return missing
