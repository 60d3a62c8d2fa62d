"""Tells a session what it does not know: one that was opened anew all, one that was saved some turns ago the rest.

Says whether the session knows it exactly then.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from microturn_client._entries import EMBEDDING
from microturn_client._inputs import InputTensor
from microturn_client._pending_turn import PendingTurn
from microturn_client._phase import Role
from microturn_client._transcript import Transcript

# Of what its user said for all turns of the session: no turn of a replay is refused or ended by it.
_UNDISTURBED = {"max_tokens": 0, "min_tokens": 0, "stop": (), "stop_token_ids": (), "deadline_ms": 0}


class Replay:
    """The turns of one replay.

    Attributes:
        first_number: that the server gives the first of them; 0 opens the session anew.
        num_tokens: how many tokens it is about.

    Args:
        transcript: what the session is to know.
        first_number: see above.
        num_known: how many turns of the transcript the session knows already.
        is_said_again: its turns are said as they were said, roles and texts included; else by their ids alone.
    """

    def __init__(
        self, transcript: Transcript, *, first_number: int = 0, num_known: int = 0, is_said_again: bool = True
    ) -> None:
        self.first_number = first_number
        self._transcript = transcript
        self._num_known = num_known
        self._is_said_again = is_said_again
        self._pieces = transcript.as_said(num_known) if is_said_again else transcript.as_ids()
        self._told = array("i")
        self._next = 0
        self.num_tokens = len(transcript.ids(num_known))

    @property
    def is_anew(self) -> bool:
        """Whether the session is opened anew."""
        return self.first_number == 0

    @property
    def next_number(self) -> int:
        """Number of the next turn."""
        return self.first_number + self._next

    @property
    def is_done(self) -> bool:
        """Whether all is told."""
        return self._next == len(self._pieces)

    def next_turn(self) -> PendingTurn:
        """The turn to be taken next."""
        piece = self._pieces[self._next]
        options = {**_UNDISTURBED, **piece.options, "return_appended_ids": True}
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
        return self._told == self._transcript.ids(self._num_known)

    @property
    def is_exact(self) -> bool:
        """Once all is told: whether it will go on as it would have gone on before."""
        return self.is_right and self._is_said_again and not self._transcript.is_torn

    @property
    def what(self) -> str:
        """Once all is told: what happened, in words."""
        if self.is_anew:
            return f"the session was opened anew with {self.num_tokens} tokens"
        return f"the server's session was behind by {self.num_tokens} tokens, and was told them again"

    @property
    def another(self) -> Replay | None:
        """Another try, after one that did not come out right: all anew, then all by ids; None after the last."""
        if not self.is_anew:
            return Replay(self._transcript)
        return Replay(self._transcript, is_said_again=False) if self._is_said_again else None
