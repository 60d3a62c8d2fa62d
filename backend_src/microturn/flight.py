"""A forward pass that the model has been given, and whose tokens are not known yet.

On an asynchronous runner a second one is given to it before the first one has landed, so that it never waits for us:

    engine   launch 1, launch 2 │ wait │ commit 1, launch 3 │ wait │ commit 2, launch 4 │ …
    model    pass 1 ────────────────── pass 2 ───────────────────── pass 3 ──────────────

Pass 2 computes the tokens that pass 1 chooses: they go from one to the other on the model's device, and the host hears
of them later. A turn may have ended with its token: then its row in pass 2 is *dropped*, and nothing of it is
committed. It has written the KV of that token one place behind what its session has in the cache. That harms nobody:

- It is a page that the session had to itself, since it was about to write it. What forks and the prefix cache share are
  full pages, from before that place; a copy for a file reads no further than its session had come.
- The session may have given the page up by now, and somebody else may have it. Whoever has it reads what he has written
  or copied there himself, and his passes and copies come behind this one: the device does the work in our order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from microturn.batch import Batch
from microturn.drawn import Drawn, Sampled
from microturn.scheduler import ScheduledRow
from microturn.upload import upload


@dataclass
class Flight:
    """A forward pass under way.

    Attributes:
        rows: whose tokens it computes.
        batch: what the model was given.
        begun_s: since when nothing else is before it, by the engine's clock.
        drawn: the choice of a token for each row that wants one.
        error: why there is none.
    """

    rows: Sequence[ScheduledRow]
    batch: Batch
    begun_s: float
    drawn: Drawn | None = None
    error: Exception | None = None

    @property
    def choosing(self) -> list[ScheduledRow]:
        """The rows behind which a token is chosen."""
        return [scheduled for scheduled, row in zip(self.rows, self.batch.rows, strict=True) if row.wants_logits]

    def sampled(self) -> list[Sampled]:
        """Waits for the tokens that were chosen, in the order of the rows that want one.

        Raises:
            Exception: the pass has failed.
        """
        if self.error is not None:
            raise self.error
        assert self.drawn is not None
        return self.drawn.sampled()

    def ids_of(self, following: Sequence[ScheduledRow]) -> Tensor:
        """The tokens that the rows of the next pass compute, int64 [rows], where they are chosen.

        Args:
            following: some of the turns that choose a token here, in their order.
        """
        assert self.drawn is not None
        ids, choosing = self.drawn.ids, self.choosing
        if len(following) == len(choosing):
            return ids
        place_of = {row.turn: place for place, row in enumerate(choosing)}
        places = torch.tensor([place_of[row.turn] for row in following])
        return ids[upload(places, ids.device)]
