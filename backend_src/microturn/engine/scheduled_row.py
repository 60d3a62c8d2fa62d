"""A session's part in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from microturn.model.batch import UNKNOWN_IDS, Row, RowPages
from microturn.sessions.session import Session
from microturn.sessions.turn import Turn


# Not frozen, and with slots: a step makes one for each session, and a tuple takes longer to make and to read.
@dataclass(slots=True)
class ScheduledRow:
    """A session's part in a forward pass.

    Attributes:
        session: whose tokens.
        turn: on whose behalf; the session may run another one when the pass is over.
        first: position of the first of them.
        num_tokens: how many.
        draft: tokens that may come behind them; verified in the same pass.
        draft_cost: tokens that the pass could make in the time that the draft takes.
    """

    session: Session
    turn: Turn
    first: int
    num_tokens: int
    draft: Sequence[int] = ()
    draft_cost: float = 0.0

    @property
    def end(self) -> int:
        """Position behind its last token, the draft not included."""
        return self.first + self.num_tokens

    @property
    def wants_logits(self) -> bool:
        """Whether it ends with the context, so that a token is chosen behind it."""
        return self.end >= len(self.session.context)

    @property
    def speculates(self) -> bool:
        """Whether a token is chosen behind it, and behind those of a draft if there is one.

        What a grammar allows behind a token is known once the token is committed: such a turn has no drafts.
        """
        turn = self.turn
        return turn.options.speculate == "ngram" and turn.matcher is None and self.wants_logits

    @property
    def is_wanted(self) -> bool:
        """Whether its turn still runs."""
        return self.session.running is self.turn

    def build(self) -> Row:
        """The row that the model sees; with `UNKNOWN_IDS` where the step under way still chooses its token."""
        session, first, end = self.session, self.first, self.end
        context, table = session.context, session.table
        context_len = len(context)
        is_known = first < context_len
        seen = table.seen(0 if session.window is None else session.window.evicted(first))
        track, pages = seen[0]
        return Row(
            [*context.ids_between(first, end), *self.draft] if is_known else UNKNOWN_IDS,
            first,
            pages,
            context.embeds_between(first, end) if context.embeds and is_known else (),
            end >= context_len,
            len(self.draft),
            track.num_sinks,
            track.num_evicted,
            [RowPages(pages, of.num_sinks, of.num_evicted) for of, pages in seen[1:]] if len(seen) > 1 else (),
            table.state_pages if table.has_states else None,
        )
