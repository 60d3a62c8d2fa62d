"""What a session has been told and has said, as tokens and as text, and how that is cut back and undone.

    context    … input … │ generated … │ input … │ generated …
    marks             ▲start    ▲end             one for each turn that added tokens, one for all others behind it

The text state (an open message, half a character, text without ids yet) is a function of the tokens before it, but not
of their ids alone. A mark holds it where a turn's input ended; behind that, the generated tokens lead on. Pages
follow (see `Session`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from microturn.sessions.context import Context
from microturn.text.codec import Codec


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a turn's input stands: from `start` to before `end`; and the text state behind it."""

    start: int
    end: int
    text_state: Any


@dataclass(frozen=True)
class Checkpoint:
    """A state that a history is put back to, by undoing a cut, and all that was appended since.

    Attributes:
        context_len: how much of the context the cut left; without a cut, how long it was.
        num_marks: how many of the first marks nothing replaces, those counted in that are forgotten.
        text_state: the text state, from before the cut.
        tail: the tokens that the cut took; None without a cut.
        marks: those behind them: the last that the cut left, which the next input may replace, and what it took.
    """

    context_len: int
    num_marks: int
    text_state: Any
    tail: Context | None = None
    marks: Sequence[Mark] = ()


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

    def fork(self, checkpoint: Checkpoint | None) -> History:
        """An independent history that goes on from here, or from a checkpoint."""
        branch = History(self.codec.fork())
        branch.context = self.context.copy()
        branch._marks = self._marks[:]
        branch.num_forgotten_marks = self.num_forgotten_marks
        branch._initial_text_state = self._initial_text_state
        if checkpoint is not None:
            branch.roll_back(checkpoint)
        return branch

    def checkpoint(self) -> Checkpoint:
        """The present state, to come back to with `roll_back`."""
        first = max(0, len(self._marks) - 1)
        num_marks = self.num_forgotten_marks + first
        return Checkpoint(len(self.context), num_marks, self.codec.state, marks=self._marks[first:])

    def roll_back(self, checkpoint: Checkpoint) -> None:
        """Comes back to a state. Of cuts behind each other the last one is undone first."""
        self.context.truncate(checkpoint.context_len)
        if checkpoint.tail is not None:
            self.context.extend(checkpoint.tail)
        # The last one that was there may have been forgotten since, for one in the same place.
        self.num_forgotten_marks = min(self.num_forgotten_marks, checkpoint.num_marks)
        self._marks[checkpoint.num_marks - self.num_forgotten_marks :] = checkpoint.marks
        self.codec.state = checkpoint.text_state

    def mark_input(self, start: int) -> None:
        """Notes that what stands from `start` on is a turn's input, and that it is complete.

        Of inputs without tokens that follow each other the last one counts: its text state has the text of all.
        """
        if self._marks and self._marks[-1].start == len(self.context):
            self._marks.pop()
        self._marks.append(Mark(start, len(self.context), self.codec.state))

    def cut(self, position: int) -> Checkpoint:
        """Cuts the context back to a position within it.

        Turns that had ended there stay whole, with the text that they left without ids; of the turn that is cut in two
        its tokens before the position stay. What comes next is as if nothing had ever been behind it.

        Returns:
            The state before, to come back to with `roll_back`.
        """
        num_kept = bisect_right(self._marks, position, key=attrgetter("end"))
        first = max(0, num_kept - 1)
        num_marks, marks = self.num_forgotten_marks + first, self._marks[first:]
        removed, text_state = self._marks[num_kept:], self.codec.state
        del self._marks[num_kept:]
        if removed and removed[0].start < position:
            self.codec.state = removed[0].text_state
            self.codec.drop_held()
            self._marks.append(Mark(removed[0].start, position, self.codec.state))
        else:
            self._read_again(position)
        return Checkpoint(position, num_marks, text_state, self.context.split(position), marks)

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
