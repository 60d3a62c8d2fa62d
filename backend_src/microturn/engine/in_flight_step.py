"""A step that the model computes: whose tokens, and how they are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from microturn.engine.scheduled_row import ScheduledRow
from microturn.kv.transfer import upload
from microturn.model.batch import Batch
from microturn.model.drawn import Drawn, Sampled
from microturn.sessions.turn import SessionId, Turn

_NOTHING = Batch([])


@dataclass
class InFlightStep:
    """A forward pass that the model has been given, and whose tokens are not known yet.

    Attributes:
        rows: whose tokens it computes.
        begun_s: since when no other pass is before it, by the engine's clock.
        batch: what the model was given; nothing where that could not be built.
        choosing: the rows behind which a token is chosen.
        drawn: the choice of a token for each row that wants one.
        logits: what they are to be chosen from, once the tokens before them are committed; None where that is done.
        error: why there is none.
    """

    rows: Sequence[ScheduledRow]
    begun_s: float
    batch: Batch = _NOTHING
    choosing: Sequence[ScheduledRow] = ()
    drawn: Drawn | None = None
    logits: Tensor | None = None
    error: Exception | None = None

    def sampled(self) -> list[Sampled]:
        """Waits for the tokens that were chosen, in the order of the rows that want one.

        Raises:
            Exception: the pass has failed.
        """
        if self.error is not None:
            raise self.error
        assert self.drawn is not None
        return self.drawn.sampled()

    def can_be_dropped(self, turn: Turn) -> bool:
        """Whether a turn may take the place of what its session has here: not where that is nothing of a turn yet.

        Interrupts that come as fast as passes go would leave the session without a token for ever.
        """
        row = self._row_of.get(turn.request.session_id)
        return row is None or not row.is_wanted or row.turn.num_output > 0

    @cached_property
    def _row_of(self) -> dict[SessionId, ScheduledRow]:
        return {row.session.id: row for row in self.rows}

    def ids_of(self, following: Sequence[ScheduledRow]) -> Tensor:
        """The tokens that these rows of the next pass compute, int64 [rows], where they are chosen.

        Args:
            following: some of the turns that choose a token here, in their order.
        """
        assert self.drawn is not None
        ids = self.drawn.ids
        if len(following) == len(self.choosing):
            return ids
        place_of = {row.turn: place for place, row in enumerate(self.choosing)}
        places = torch.tensor([place_of[row.turn] for row in following])
        return ids[upload(places, ids.device)]
