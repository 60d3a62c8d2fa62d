"""Tells a session that was opened anew all that it knew, and says whether it knows it again exactly."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from microturn_client._entries import EMBEDDING
from microturn_client._inputs import InputTensor
from microturn_client._pending_turn import PendingTurn
from microturn_client._phase import Role
from microturn_client._transcript import Transcript


class Replay:
    """The turns of one replay.

    Attributes:
        num_turns: how many they are.

    Args:
        transcript: what the session knew.
        is_said_again: its turns are said as they were said, roles and texts included; else by their ids alone.
    """

    def __init__(self, transcript: Transcript, *, is_said_again: bool = True) -> None:
        self._transcript = transcript
        self._is_said_again = is_said_again
        self._pieces = transcript.as_said() if is_said_again else transcript.as_ids()
        self._told = array("i")
        self._next = 0
        self.num_turns = len(self._pieces)

    @property
    def is_at_start(self) -> bool:
        """Whether the next turn is the first."""
        return self._next == 0

    @property
    def is_done(self) -> bool:
        """Whether all is told."""
        return self._next == self.num_turns

    def next_turn(self) -> PendingTurn:
        """The turn to be taken next."""
        piece = self._pieces[self._next]
        options = {"max_tokens": 0, **piece.options, "return_appended_ids": True}
        turn = PendingTurn(piece.tensor, options, role=Role.PASSING)
        turn.fix_options()
        return turn

    def has_told(self, tensor: InputTensor, appended_ids: Sequence[int], generated_ids: Sequence[int] = ()) -> None:
        """The next turn was taken: its input became these ids, and those were generated."""
        self._next += 1
        self._told.extend(appended_ids)
        if tensor.name == "input_embeds":
            self._told.extend([EMBEDDING] * tensor.shape[1])
        self._told.extend(generated_ids)

    @property
    def is_right(self) -> bool:
        """Once all is told: whether the session has the same tokens as before."""
        return self._told == self._transcript.ids()

    @property
    def is_exact(self) -> bool:
        """Once all is told: whether it will go on as it would have gone on before."""
        return self.is_right and self._is_said_again and not self._transcript.is_torn

    def by_ids(self) -> Replay | None:
        """Another try, after one that did not come out right; None after the last."""
        return Replay(self._transcript, is_said_again=False) if self._is_said_again else None
