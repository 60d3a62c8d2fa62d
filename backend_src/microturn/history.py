"""What a session has been told and has said, as tokens and as text, and how that is cut back and undone.

    context    … input … │ generated … │ input … │ generated …
    marks             ▲start    ▲end             one for each turn that added tokens

The text state (an open message, half a character, text without ids yet) is a function of the tokens before it, but not
of their ids alone. A mark holds it where a turn's input ended; behind that, the generated tokens lead on. Knows no
pages: they follow (see `Session`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from microturn.codec import Codec
from microturn.context import Context


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a turn's input stands: from `start` to before `end`; and the text state behind it."""

    start: int
    end: int
    text_state: Any


@dataclass(frozen=True)
class Checkpoint:
    """A state of a history that appending leads away from.

    Attributes:
        context_len: how long the context was.
        num_marks: how many marks there had been, those counted in that are forgotten.
        text_state: the text state.
    """

    context_len: int
    num_marks: int
    text_state: Any


@dataclass(frozen=True)
class Cut:
    """What a cut took away.

    Attributes:
        tail: the tokens.
        marks: the marks that went.
        num_kept: how many marks stayed, those counted in that are forgotten.
        text_state: the text state before the cut.
    """

    tail: Context
    marks: Sequence[Mark]
    num_kept: int
    text_state: Any


class History:
    """The tokens and the text of one session.

    Attributes:
        codec: its text.
        context: its tokens.
        num_forgotten_marks: how many of the first marks have been given up.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.context = Context()
        self.num_forgotten_marks = 0
        self._marks: list[Mark] = []
        self._initial_text_state = codec.state

    def __len__(self) -> int:
        return len(self.context)

    @classmethod
    def recalled(cls, codec: Codec, context: Context, marks: Sequence[Mark], text_state: Any) -> History:
        """A history that was made elsewhere.

        Args:
            codec: that of a new session.
            context: its tokens.
            marks: as `marks` said there.
            text_state: the codec's state there.
        """
        history = cls(codec)
        history.context = context
        history._marks = list(marks)
        codec.state = text_state
        return history

    @property
    def marks(self) -> Sequence[Mark]:
        """Where the turns' inputs stand, in their order."""
        return self._marks

    @property
    def answer_start(self) -> int:
        """Where the input that came last ends; behind it stands what was generated since."""
        return self._marks[-1].end if self._marks else 0

    def fork(self, before: Checkpoint | None, cut: Cut | None) -> History:
        """An independent history that goes on from here, or from before a turn that is not done.

        Args:
            before: the history that the turn's input was appended to; None when no turn runs.
            cut: what the turn had cut off before that.
        """
        branch = History(self.codec.fork())
        branch.context = self.context.copy()
        branch._marks = self._marks[:]
        branch.num_forgotten_marks = self.num_forgotten_marks
        branch._initial_text_state = self._initial_text_state
        if before is not None:
            branch.roll_back(before)
        if cut is not None:
            branch.restore(cut)
        return branch

    def checkpoint(self) -> Checkpoint:
        """The present state, to come back to with `roll_back`."""
        return Checkpoint(len(self.context), self.num_forgotten_marks + len(self._marks), self.codec.state)

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Undoes all that was appended since."""
        self.context.truncate(checkpoint.context_len)
        del self._marks[self._mark_at(checkpoint.num_marks) :]
        self.codec.state = checkpoint.text_state

    def mark_input(self, start: int) -> None:
        """Notes that what stands from `start` on is a turn's input, and that it is complete."""
        self._marks.append(Mark(start, len(self.context), self.codec.state))

    def cut(self, position: int) -> Cut:
        """Cuts the context back to a position within it.

        Turns that had ended there stay whole, with the text that they left without ids; of the turn that is cut in two
        its tokens before the position stay. What comes next is as if nothing had ever been behind it.
        """
        num_kept = bisect_right(self._marks, position, key=attrgetter("end"))
        removed, text_state = self._marks[num_kept:], self.codec.state
        del self._marks[num_kept:]
        if removed and removed[0].start < position:
            self.codec.state = removed[0].text_state
            self.codec.drop_held()
            self._marks.append(Mark(removed[0].start, position, self.codec.state))
        else:
            self._read_again(position)
        return Cut(self.context.split(position), removed, self.num_forgotten_marks + num_kept, text_state)

    def restore(self, cut: Cut) -> None:
        """Undoes a cut, once what was appended since has been rolled back."""
        self.context.extend(cut.tail)
        self._marks[self._mark_at(cut.num_kept) :] = cut.marks
        self.codec.state = cut.text_state

    def forget_marks(self, position: int) -> None:
        """Gives up the marks that only a cut before a position would need. No turn is undone back to before it."""
        # The last mark before it says from where the text is read again.
        num_forgotten = max(0, bisect_right(self._marks, position, key=attrgetter("end")) - 1)
        del self._marks[:num_forgotten]
        self.num_forgotten_marks += num_forgotten

    def forget_inputs(self, num_sinks: int, num_behind: int, step: int, limit: int | None) -> None:
        """Forgets tokens that no rewind can reach, once they take more than is kept; then all of them go.

        Without some the others are of no use: KV that is lost is computed again from the first token on, or from what
        the window shows.

        Args:
            num_sinks: first tokens, which stay.
            num_behind: tokens behind them that no rewind can reach; never fewer than before.
            step: as many go at a time, those of which the window gives up the KV.
            limit: bytes that are kept; None is all of them.
        """
        context = self.context
        first, last = context.first_kept or num_sinks, num_sinks + num_behind
        if not context.num_forgotten and (limit is None or context.bytes_between(first, last) <= limit):
            return
        # What was generated last before the first mark is read again from there on.
        last = min(last, self._marks[0].end if self._marks else 0)
        last = num_sinks + max(0, last - num_sinks) // step * step
        if last > first:
            context.forget(num_sinks, last)

    def _mark_at(self, number: int) -> int:
        """Where the mark of a number stands among those that are left."""
        assert number >= self.num_forgotten_marks, "a mark that is needed was forgotten"
        return number - self.num_forgotten_marks

    def _read_again(self, position: int) -> None:
        """Sets the text state to what it was behind the input that ended last and the tokens generated since."""
        start = self._marks[-1].end if self._marks else 0
        self.codec.state = self._marks[-1].text_state if self._marks else self._initial_text_state
        if start < position:
            self.codec.begin_generation(())
            for token_id in self.context.ids_between(start, position):
                self.codec.accept(token_id)
            self.codec.end_generation()

    def check_integrity(self) -> None:
        """Asserts that the marks stand in their order within the context."""
        edges = [edge for mark in self._marks for edge in (mark.start, mark.end)]
        assert edges == sorted(edges), f"inputs overlap: {edges}"
        assert not edges or edges[-1] <= len(self.context), "an input beyond the context"
