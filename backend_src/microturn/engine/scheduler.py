"""Chooses what the next forward pass computes, by lengths, pages and due times.

One rule serves prefill and decode alike: a running turn has tokens to compute, one or thousands. Short rows go first,
the one due earliest before the others; what is left of the token budget goes to long appends, so that a long first
prompt makes no turn late, and a quarter of the budget is kept for them, so that they are not starved either.

A session whose last pass failed computes alone, before the others: see `suspects`.

A pass lasts as long as its longest row makes it, and all rows wait for its end. So beside other sessions a long append
gets no more tokens than fit the time that those have, by what earlier passes took.

Requests are read between passes, the supervisor's health turns too: a pass of many seconds would be taken for a dead
model. So on a slow machine a step has fewer tokens than its budget, whoever's they are, even where a session is alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple, Protocol

from microturn.engine.scheduled_row import ScheduledRow
from microturn.engine.step_time import StepTimeModel
from microturn.sessions.session import Session
from microturn.sessions.turn import BEAT_S

# With other sessions in the step a pass lasts no longer than this where it can be helped: four fit between two beats.
_SHARED_PASS_S = BEAT_S / 4

# The tokens of a pass take no longer than this, beside what a pass of a single one takes.
_LONGEST_S = 1.0


class _Urgency(NamedTuple):
    """What comes first: of a session, less is more urgent."""

    is_trusted: bool
    is_long: bool
    due_s: float


# A session with tokens to compute, and how many.
_Waiting = tuple[_Urgency, Session, int]


def _num_tokens(rows: Iterable[ScheduledRow]) -> int:
    return sum(row.num_tokens for row in rows)


class Memory(Protocol):
    """Offloads and loads KV (see `Tiers`)."""

    def reclaim(self) -> bool:
        """Frees some pages that no running session holds; False when there are none."""
        ...

    def offload(self, session: Session) -> None:
        """Releases a running session's pages at once."""
        ...

    def is_ready(self, session: Session) -> bool:
        """Whether a session's KV can be loaded as soon as it has pages; if not, begins to read it."""
        ...

    def load(self, session: Session) -> bool:
        """Loads a session's KV into its pages; False while some is missing."""
        ...


class Scheduler:
    """Builds steps under a token budget.

    Attributes:
        is_stalled: whether the last step is empty though there are turns to compute, and no KV for them on its way.
            The page accounting is to make that impossible: the engine counts it, and tests assert that it never is.

    Args:
        max_batch_tokens: tokens of a step, at most.
        memory: where pages come from when the pool has none.
        step_time: of forward passes.
        clock: seconds, that of the turns' due times.
        suspects: sessions that compute alone, before the others.
        drafts: whether turns that speculate get drafts. On an asynchronous runner they get none: what follows a step
            must not depend on what it chooses.
    """

    def __init__(
        self,
        max_batch_tokens: int,
        memory: Memory,
        step_time: StepTimeModel,
        clock: Callable[[], float],
        *,
        suspects: Container[Session] = (),
        drafts: bool = True,
    ) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._least_long = max(1, max_batch_tokens // 16)
        self._memory = memory
        self._step_time = step_time
        self._clock = clock
        self._suspects = suspects
        self._drafts = drafts
        self.is_stalled = False

    def schedule(self, running: Iterable[Session], *, with_others: bool) -> list[ScheduledRow]:
        """The rows of the next step; empty only when nothing is left to compute, or all KV for it is on its way.

        Args:
            running: the sessions that have a turn.
            with_others: whether there is another session than one, whose turn may come while the step runs.

        Pages for the new tokens are reserved. When the pool is full, parked sessions give way first, then the least
        urgent running ones, which lose pages and no token. The most urgent session is never preempted, and one session
        fits the pool: so there is always progress.
        """
        waiting = self._by_urgency(running)
        num_short = sum(not urgency.is_long for urgency, _, _ in waiting)
        most = self._most_tokens()
        budget = most - (most // 4 if num_short < len(waiting) else 0)
        rows: list[ScheduledRow] = []
        preempted: set[Session] = set()
        num_on_way = 0
        for index, (_, session, num_pending) in enumerate(waiting):
            if index == num_short:
                budget = self._left_for_long(rows, with_others=with_others)
            if session in preempted:
                continue
            # Then what follows changes nothing of what it has to compute.
            is_simple = session.stored is None and session.window is None
            if not self._memory.is_ready(session):
                num_on_way += 1
                continue
            session.begin_behind_forgotten()
            num_tokens = min(num_pending if is_simple else session.num_computable, budget)
            if num_tokens <= 0:
                continue
            session.evict()
            if not session.reserve(num_tokens):
                victims = [victim for _, victim, _ in waiting[:index:-1]]
                if not self._take_pages(session, num_tokens, victims, preempted):
                    break
            if not self._memory.load(session):
                num_on_way += 1
                continue
            assert session.running is not None
            rows.append(ScheduledRow(session, session.running, session.kv_len, num_tokens))
            budget -= num_tokens
            if session in self._suspects:
                break
        self.is_stalled = bool(waiting) and not rows and not num_on_way
        has_drafts = self._drafts and any(row.speculates for row in rows)
        return self._with_drafts(rows, with_others=with_others) if has_drafts else rows

    def schedule_next(self, rows: Iterable[ScheduledRow], running: Collection[Session]) -> list[ScheduledRow]:
        """The rows of the step behind one that is under way, if they are known whatever that one chooses.

        First those of turns in it that may go on: the tokens that it chooses, each a row. Then the short appends of
        sessions that are not in it, which need nobody's pages. Nothing must follow where a session would miss a step
        that `schedule` would give it: one that has more of its input to compute, or begins its next turn when this one
        ends, which is sure; a long append; a session whose last pass failed, which computes alone. Nor where the pool
        has no page free, or the step no token left.

        Args:
            rows: of the step that is under way.
            running: the sessions that have a turn.

        Pages for the new tokens are reserved. Of the sessions under way nothing is evicted before: more than a turn
        needs is given up with its end, or by `schedule`, where the pool is full.
        """
        current = [row for row in rows if row.is_wanted]
        following = []
        for row in current:
            session, turn, end = row.session, row.turn, row.end
            if end < session.kv_target:
                return []
            if turn.num_passes_left > 1:
                if not session.table.reserve(end + 1):
                    return []
                following.append(ScheduledRow(session, turn, end, 1))
            elif session.queued:
                return []
        if len(running) == len(current):
            return following
        under_way = {row.session for row in current}
        if any(session in self._suspects for session in under_way):
            return []
        waiting = self._by_urgency(session for session in running if session not in under_way)
        joining = self._joining(waiting, self._most_tokens() - len(following))
        return [] if joining is None else [*following, *joining]

    def _joining(self, waiting: Sequence[_Waiting], budget: int) -> list[ScheduledRow] | None:
        """The appends of these sessions, but for those whose KV is on its way; None where `schedule` must decide."""
        if any(urgency.is_long or not urgency.is_trusted for urgency, _, _ in waiting):
            return None
        joining = []
        for _, session, _ in waiting:
            if not self._memory.is_ready(session):
                continue
            session.begin_behind_forgotten()
            num_tokens = session.num_computable
            session.evict()
            if num_tokens > budget or not session.reserve(num_tokens):
                return None
            if self._memory.load(session):
                assert session.running is not None
                joining.append(ScheduledRow(session, session.running, session.kv_len, num_tokens))
                budget -= num_tokens
        return joining

    def _by_urgency(self, sessions: Iterable[Session]) -> list[_Waiting]:
        """Those of the sessions that have tokens to compute, the most urgent first."""
        waiting: list[_Waiting] = []
        longest_short = max(1, self._max_batch_tokens // 4)
        for session in sessions:
            num_pending = session.num_pending
            if num_pending:
                assert session.running is not None
                is_long = num_pending > longest_short
                urgency = _Urgency(session not in self._suspects, is_long, session.running.due_s)
                waiting.append((urgency, session, num_pending))
        waiting.sort(key=itemgetter(0))
        return waiting

    def _most_tokens(self) -> int:
        """Tokens that a step may have to be over in time."""
        longest_s = self._step_time.pass_s(1) + _LONGEST_S
        return max(self._least_long, self._step_time.num_tokens_within(longest_s, self._max_batch_tokens))

    def _left_for_long(self, rows: Sequence[ScheduledRow], *, with_others: bool) -> int:
        """Tokens of a step that long appends may have beside short rows."""
        most = self._most_tokens() - _num_tokens(rows)
        if not with_others:
            return most
        least_s = self._step_time.pass_s(_num_tokens(rows))
        # A turn that would be late without any long append is no reason to hold one up.
        in_time = [pass_s for pass_s in self._passes_s(rows) if pass_s >= least_s]
        return min(most, max(self._least_long, self._num_within(in_time, rows)))

    def _passes_s(self, rows: Iterable[ScheduledRow]) -> list[float]:
        """How long a pass may take for each turn to be done when it is due."""
        now_s = self._clock()
        return [(row.turn.due_s - now_s) / row.turn.num_passes_left for row in rows]

    def _num_within(self, passes_s: Sequence[float], rows: Sequence[ScheduledRow]) -> int:
        """Tokens that a pass may have besides these rows to take no longer than one shared, and than any of these."""
        longest_s = min(_SHARED_PASS_S, *passes_s) if passes_s else _SHARED_PASS_S
        return self._step_time.num_tokens_within(longest_s, self._max_batch_tokens) - _num_tokens(rows)

    def _with_drafts(self, rows: Sequence[ScheduledRow], *, with_others: bool) -> list[ScheduledRow]:
        """The rows, with the drafts of those that speculate, in what is left of the step's tokens, time and pages."""
        others = [row for row in rows if not row.speculates]
        num_left = self._most_tokens() - _num_tokens(rows)
        if with_others:
            num_left = min(num_left, self._num_within(self._passes_s(others), rows))
        drafting = []
        for row in rows:
            drafted = self._with_draft(row, num_left, rows) if row.speculates else row
            num_left -= len(drafted.draft)
            drafting.append(drafted)
        return drafting

    def _with_draft(self, row: ScheduledRow, num_left: int, rows: Sequence[ScheduledRow]) -> ScheduledRow:
        """A row with its draft, if there is one, of so many tokens at most; it is one of the step's rows."""
        session = row.session
        most = min(num_left, row.turn.num_passes_left - 1)
        if session.window is not None:
            most = min(most, session.window.sees_less_from(row.first) - row.end)
        draft = session.speculation.draft(session.context, most)
        if not draft or not session.table.reserve(row.end + len(draft)):
            return row
        step_s = self._step_time.pass_s(_num_tokens(rows))
        longer_s = self._step_time.pass_s(_num_tokens(rows) + len(draft)) - step_s
        return replace(row, draft=draft, draft_cost=len(rows) * longer_s / step_s if step_s else 0.0)

    def _take_pages(
        self, session: Session, num_tokens: int, victims: Sequence[Session], preempted: set[Session]
    ) -> bool:
        """Gets the pages, from the least urgent running sessions if need be and if that is enough."""
        while not session.reserve(num_tokens):
            if self._memory.reclaim():
                continue
            num_pages = session.num_pages_with(num_tokens)
            if not session.table.could_have(num_pages, (victim.table for victim in victims)):
                return False
            victim = next(victim for victim in victims if not victim.table.is_empty)
            self._memory.offload(victim)
            preempted.add(victim)
        return True
