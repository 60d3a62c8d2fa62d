"""Tests of scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from microturn.engine.scheduled_row import ScheduledRow
from microturn.engine.scheduler import Scheduler
from microturn.engine.step_time import StepTimeModel
from microturn.kv.pool import PagePool
from microturn.model.batch import UNKNOWN_IDS
from microturn.sessions.session import Session
from support.sessions import make_session, make_turn
from support.tiers import TiersDriver

PAGE_SIZE = 4


@pytest.fixture
def pool() -> PagePool:
    return PagePool(256, PAGE_SIZE)


def running(
    pool: PagePool, session_id: int, context_len: int, kv_len: int = 0, *, due_s: float = 0.0, max_tokens: int = 1
) -> Session:
    """A session whose turn has `context_len - kv_len` tokens to compute."""
    session = make_session(pool, session_id, context_len=context_len, kv_len=kv_len)
    session.running = make_turn(max_tokens=max_tokens, due_s=due_s)
    return session


def make_scheduler(max_batch_tokens: int, memory: TiersDriver, step_time: StepTimeModel | None = None) -> Scheduler:
    return Scheduler(max_batch_tokens, memory.tiers, step_time or StepTimeModel(), memory.clock)


def schedule(
    sessions: Sequence[Session],
    max_batch_tokens: int,
    memory: TiersDriver | None = None,
    *,
    step_time: StepTimeModel | None = None,
    with_others: bool = True,
) -> dict[object, int]:
    """Tokens of the next step by session id, in its order."""
    memory = memory or TiersDriver(sessions[0].table._pool if sessions else PagePool(1, PAGE_SIZE))
    memory.tiers.begin_step()
    rows = make_scheduler(max_batch_tokens, memory, step_time).schedule(sessions, with_others=with_others)
    return {row.session.id: row.num_tokens for row in rows}


def step(sessions: Sequence[Session], max_batch_tokens: int) -> dict[object, int]:
    """Schedules a step and computes it; turns end when nothing is left."""
    scheduled = schedule(sessions, max_batch_tokens)
    for session in sessions:
        session.table.kv_len += scheduled.get(session.id, 0)
    return scheduled


def row_of(session: Session, num_tokens: int) -> ScheduledRow:
    assert session.running is not None
    return ScheduledRow(session, session.running, session.kv_len, num_tokens)


# ---- rows ----------------------------------------------------------------------------------------------------------


def test_a_row_holds_the_next_tokens_and_where_they_stand(pool: PagePool) -> None:
    session = running(pool, 1, context_len=11, kv_len=5)
    session.table.reserve(9)
    row = row_of(session, 4).build()
    assert list(row.token_ids) == [6, 7, 8, 9]
    assert row.position == 5
    assert row.pages.tolist() == session.table.pages  # type: ignore[union-attr]
    assert not row.wants_logits
    assert not row.embeds


def test_a_row_wants_logits_when_it_ends_with_the_context(pool: PagePool) -> None:
    session = running(pool, 1, context_len=11, kv_len=5)
    session.table.reserve(11)
    assert row_of(session, 6).build().wants_logits
    assert not row_of(session, 5).build().wants_logits


def test_a_row_carries_its_own_part_of_the_embeddings(pool: PagePool) -> None:
    session = running(pool, 1, context_len=3, kv_len=2)
    session.context.append_embeds(torch.arange(8.0).reshape(4, 2))
    session.table.reserve(6)
    (span,) = row_of(session, 3).build().embeds
    assert span.start == 1
    assert span.embeds.tolist() == [[0, 1], [2, 3]]


# ---- the budget ----------------------------------------------------------------------------------------------------


def test_nothing_to_compute_makes_no_rows(pool: PagePool) -> None:
    assert schedule([], 16) == {}
    assert schedule([running(pool, 1, context_len=5, kv_len=4, max_tokens=0)], 16) == {}


def test_all_that_fits_the_budget_is_computed_at_once(pool: PagePool) -> None:
    sessions = [running(pool, 1, 10, 9), running(pool, 2, 3), running(pool, 3, 20, 18)]
    assert schedule(sessions, 16) == {1: 1, 2: 3, 3: 2}


def test_the_budget_is_never_exceeded(pool: PagePool) -> None:
    sessions = [running(pool, number, 10) for number in range(5)]
    assert sum(schedule(sessions, 16).values()) == 16


def test_who_is_due_earliest_goes_first(pool: PagePool) -> None:
    sessions = [running(pool, number, 4, due_s=due_s) for number, due_s in ((1, 3.0), (2, 1.0), (3, 2.0))]
    assert list(schedule(sessions, 16)) == [2, 3, 1]
    assert list(schedule(sessions, 8)) == [2, 3]


def test_short_rows_go_before_long_ones_that_are_due_earlier(pool: PagePool) -> None:
    sessions = [running(pool, 1, 100, due_s=1.0), running(pool, 2, 50, 49, due_s=9.0)]
    assert schedule(sessions, 16) == {2: 1, 1: 15}


def test_a_long_prompt_is_cut_into_chunks(pool: PagePool) -> None:
    session = running(pool, 1, 40)
    assert [step([session], 16) for _ in range(3)] == [{1: 16}, {1: 16}, {1: 8}]


def test_a_long_prompt_makes_no_decode_row_late(pool: PagePool) -> None:
    sessions = [running(pool, 0, 1000), *(running(pool, number, 10, 9, due_s=5.0) for number in range(1, 9))]
    scheduled = schedule(sessions, 16)
    assert all(scheduled[number] == 1 for number in range(1, 9))
    assert scheduled[0] == 8


def test_a_quarter_of_the_budget_is_kept_for_long_prompts(pool: PagePool) -> None:
    """More short rows than a step holds came with every step, and the long prompt never got a token."""
    sessions = [running(pool, 0, 1000), *(running(pool, number, 10, 7) for number in range(1, 20))]
    assert schedule(sessions, 16)[0] == 4
    assert sum(schedule(sessions, 16).values()) == 16


# A pass of n tokens takes 10 + n milliseconds.
PACE = StepTimeModel([(1, 0.011), (101, 0.111)])


def test_a_long_prompt_in_company_makes_a_pass_no_longer_than_a_quarter_of_a_beat(pool: PagePool) -> None:
    assert schedule([running(pool, 1, 500)], 256, step_time=PACE) == {1: 40}


def test_a_long_prompt_alone_has_the_whole_budget(pool: PagePool) -> None:
    assert schedule([running(pool, 1, 500)], 256, step_time=PACE, with_others=False) == {1: 256}


# A pass of n tokens takes n / 100 seconds.
SLOW = StepTimeModel([(1, 0.01), (101, 1.01)])


@pytest.mark.parametrize(
    ("step_time", "num_tokens"),
    [
        (PACE, 900),
        (SLOW, 101),
        (StepTimeModel([(1, 2.0), (101, 3.0)]), 101),  # what a single token takes is not in the way of the others
        (StepTimeModel([(1, 0.1), (101, 10.1)]), 64),  # at least a sixteenth of the budget
    ],
)
def test_a_slow_model_is_not_silent_for_a_long_prompt_that_is_alone(
    pool: PagePool, step_time: StepTimeModel, num_tokens: int
) -> None:
    """Health turns are read between passes: one of 25 seconds was taken for a dead model."""
    assert schedule([running(pool, 1, 900)], 1024, step_time=step_time, with_others=False) == {1: num_tokens}


def test_a_slow_model_is_not_silent_for_many_prompts_that_are_short_each(pool: PagePool) -> None:
    sessions = [running(pool, number, 200, due_s=float(number)) for number in range(4)]
    assert schedule(sessions, 1024, step_time=SLOW) == {0: 101}


def test_long_prompts_keep_a_quarter_of_what_a_slow_model_computes_in_time(pool: PagePool) -> None:
    sessions = [running(pool, 0, 300), running(pool, 1, 200)]
    assert schedule(sessions, 1024, step_time=SLOW) == {1: 76, 0: 25}


@pytest.mark.parametrize(
    ("left_s", "max_tokens", "num_long_tokens"),
    [
        (0.122, 4, 19),  # passes of 30.5 ms, with one token of the short row's own
        (0.122, 3, 29),
        (0.600, 4, 39),  # time for more than a quarter of a beat
        (0.082, 4, 16),  # at least a sixteenth of the budget
        (0.030, 4, 39),  # late in any case: no reason to hold anybody up
        (-1.00, 1, 39),
    ],
)
def test_a_long_prompt_takes_no_more_time_than_others_have_left(
    pool: PagePool, left_s: float, max_tokens: int, num_long_tokens: int
) -> None:
    memory = TiersDriver(pool)
    due_s = memory.clock() + left_s
    sessions = [running(pool, 1, 500), running(pool, 2, 10, 9, due_s=due_s, max_tokens=max_tokens)]
    assert schedule(sessions, 256, memory, step_time=PACE) == {2: 1, 1: num_long_tokens}


@pytest.mark.parametrize(
    ("left_s", "max_tokens", "num_drafted"),
    [
        (0.200, 1, 4),  # a whole beat
        (0.062, 4, 3),  # passes of 15.5 ms, with two tokens of the rows' own
        (0.050, 4, 0),  # no time for another token
        (0.020, 4, 0),  # late in any case, and not to be later
    ],
)
def test_a_draft_takes_no_more_time_than_others_have_left(
    pool: PagePool, left_s: float, max_tokens: int, num_drafted: int
) -> None:
    memory = TiersDriver(pool)
    due_s = memory.clock() + left_s
    drafting = running(pool, 1, 10, 9)
    drafting.context.append_ids([1, 2, 3])  # behind which 4, 5, 6, 7 came
    drafting.table.kv_len = 12
    drafting.running = make_turn(max_tokens=30, due_s=memory.clock() + 9.0, speculate="ngram")
    other = running(pool, 2, 10, 9, due_s=due_s, max_tokens=max_tokens)
    memory.tiers.begin_step()
    rows = make_scheduler(256, memory, PACE).schedule([drafting, other], with_others=True)
    drafts = {row.session: list(row.draft) for row in rows}
    assert drafts == {other: [], drafting: [4, 5, 6, 7][:num_drafted]}


def test_a_long_prompt_goes_on_where_passes_are_slow_without_it(pool: PagePool) -> None:
    sessions = [running(pool, 1, 500), running(pool, 2, 10, 9, due_s=0.2, max_tokens=4)]
    assert schedule(sessions, 256, step_time=StepTimeModel([(1, 1.0), (101, 2.0)])) == {2: 1, 1: 16}


def test_without_long_prompts_short_rows_have_the_whole_budget(pool: PagePool) -> None:
    sessions = [running(pool, number, 10, 7) for number in range(1, 20)]
    assert sum(schedule(sessions, 16).values()) == 16


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3, 4])
def test_decode_rows_go_on_beside_a_long_prompt_whatever_the_budget(pool: PagePool, max_batch_tokens: int) -> None:
    """With a budget of one token the part kept for long prompts was all of it."""
    sessions = [running(pool, 1, 30, due_s=1.0), running(pool, 2, 10, 9, due_s=2.0)]
    assert 2 in schedule(sessions, max_batch_tokens)


def test_of_two_long_prompts_the_one_due_earliest_is_computed_first(pool: PagePool) -> None:
    sessions = [running(pool, 1, 100, due_s=2.0), running(pool, 2, 100, due_s=1.0)]
    assert schedule(sessions, 16) == {2: 16}


# ---- a full pool ---------------------------------------------------------------------------------------------------


def test_parked_sessions_give_way_before_running_ones() -> None:
    """B3: idle sessions held every row, so that even sessions that owned a row could not run."""
    pool = PagePool(6, PAGE_SIZE)
    memory = TiersDriver(pool)
    parked = make_session(pool, 9, context_len=13, kv_len=12)
    memory.park(parked)
    sessions = [running(pool, 1, 12, due_s=1.0), running(pool, 2, 9, 8, due_s=5.0)]
    assert schedule(sessions, 64, memory) == {1: 12, 2: 1}
    assert parked.table.pages == []


def test_nobody_gives_way_while_there_is_room() -> None:
    pool = PagePool(9, PAGE_SIZE)
    memory = TiersDriver(pool)
    parked = make_session(pool, 9, context_len=13, kv_len=12)
    memory.park(parked)
    sessions = [running(pool, 1, 12, due_s=1.0), running(pool, 2, 9, 8, due_s=5.0)]
    assert schedule(sessions, 64, memory) == {1: 12, 2: 1}
    assert parked.table.kv_len == 12


def test_the_least_urgent_running_session_loses_its_pages_and_no_token() -> None:
    pool = PagePool(6, PAGE_SIZE)
    sessions = [running(pool, number, 9, 8, due_s=float(number)) for number in (1, 2, 3)]
    assert schedule(sessions, 64) == {1: 1, 2: 1}
    assert sessions[2].table.pages == []
    assert sessions[2].table.kv_len == 0
    assert len(sessions[2].context) == 9
    assert sessions[0].table.kv_len == sessions[1].table.kv_len == 8


def test_the_most_urgent_session_is_never_preempted() -> None:
    pool = PagePool(4, PAGE_SIZE)
    urgent = running(pool, 1, 13, 12, due_s=1.0)
    others = [running(pool, 2, 5, 4, due_s=2.0), running(pool, 3, 6, due_s=3.0)]
    assert schedule([*others, urgent], 64) == {1: 1}
    assert urgent.table.kv_len == 12
    assert len(urgent.table.pages) == 4


def test_a_preempted_session_does_not_come_back_in_the_same_step() -> None:
    """It would take back at once what it was made to give, and lose it again in the next step."""
    pool = PagePool(6, PAGE_SIZE)
    sessions = [running(pool, 1, 9, 8, due_s=1.0), running(pool, 2, 17, 16, due_s=2.0)]
    assert schedule(sessions, 8) == {1: 1}
    assert sessions[1].table.pages == []
    pool.check_integrity([session.table.pages for session in sessions])


def test_no_more_pages_are_reserved_than_the_step_writes(pool: PagePool) -> None:
    """B17-B20: pages reserved ahead were leaked or counted twice."""
    sessions = [running(pool, number, 50) for number in range(3)]
    for row in make_scheduler(16, TiersDriver(pool)).schedule(sessions, with_others=True):
        assert len(row.session.table.pages) == pool.num_pages_for(row.session.table.kv_len + row.num_tokens)


def test_a_session_that_cannot_be_helped_takes_no_pages_from_others() -> None:
    """What stands behind it lost its KV, and the pages that came free were of no use to anybody."""
    pool = PagePool(8, PAGE_SIZE)
    decoding = running(pool, 1, 17, 16, due_s=1.0)
    long = running(pool, 2, 24, due_s=2.0)
    behind = running(pool, 3, 40, 8, due_s=3.0)
    scheduled = schedule([decoding, long, behind], 64)
    assert 2 in scheduled or behind.table.kv_len == 8


def test_shared_pages_do_not_count_as_what_a_victim_could_give() -> None:
    """It lost its KV, and its pages were still those of the session that needed more."""
    pool = PagePool(11, PAGE_SIZE)
    first = running(pool, 1, 19, 18, due_s=1.0)
    sharing = running(pool, 2, 25, 16, due_s=2.0)
    behind = running(pool, 3, 24, due_s=3.0)
    behind.table.adopt_from(sharing.table, sharing.table.kv_len)
    assert behind.table.reserve(24)
    behind.table.kv_len = 23
    assert pool.num_free == 0
    assert schedule([first, sharing, behind], 64) == {1: 1}
    assert behind.table.kv_len == 23


@settings(max_examples=80, deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=8),
    num_pages=st.integers(10, 20),
    max_batch_tokens=st.integers(1, 40),
)
@example(turns=[(18, 0), (22, 0)], num_pages=10, max_batch_tokens=1)
def test_every_turn_ends_in_a_pool_that_holds_one_context(
    turns: list[tuple[int, int]], num_pages: int, max_batch_tokens: int
) -> None:
    """B9: two sessions waited for each other's pages, and nobody made progress."""
    pool = PagePool(num_pages, PAGE_SIZE)
    waiting = [running(pool, number, context_len, due_s=due_s) for number, (context_len, due_s) in enumerate(turns)]
    scheduler = make_scheduler(max_batch_tokens, TiersDriver(pool))
    num_steps = 0
    while waiting:
        rows = scheduler.schedule(waiting, with_others=True)
        assert 0 < sum(row.num_tokens for row in rows) <= max_batch_tokens
        assert len({row.session.id for row in rows}) == len(rows)
        pool.check_integrity([session.table.pages for session in waiting])
        for row in rows:
            row.session.table.kv_len += row.num_tokens
            assert row.session.table.kv_len <= len(row.session.table.pages) * PAGE_SIZE
            if not row.session.num_pending:
                waiting.remove(row.session)
                row.session.table.truncate(0)
        num_steps += 1
        assert num_steps <= 40 * len(turns) ** 2, "no progress"


# ---- the step behind one that is under way -------------------------------------------------------------------------


def following(pool: PagePool, sessions: Sequence[Session], rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
    return make_scheduler(64, TiersDriver(pool)).schedule_next(rows, sessions)


def follows(row: ScheduledRow) -> bool:
    """Whether its token is one that the step under way still chooses."""
    return row.build().token_ids is UNKNOWN_IDS


def all_of(session: Session) -> ScheduledRow:
    """The row with all that a session's turn has to compute."""
    assert session.table.reserve(len(session.context))
    return row_of(session, session.num_pending)


def test_what_follows_is_a_token_that_nobody_knows_yet(pool: PagePool) -> None:
    session = running(pool, 1, context_len=8, kv_len=3, max_tokens=2)
    (next_row,) = following(pool, [session], [all_of(session)])
    assert follows(next_row)
    row = next_row.build()
    assert (list(row.token_ids), row.position, row.wants_logits) == ([*UNKNOWN_IDS], 8, True)
    assert len(row.pages) == 3
    assert len(session.context) == 8
    assert session.table.kv_len == 3


def test_a_turn_that_ends_with_this_step_is_followed_by_nothing(pool: PagePool) -> None:
    ends, appends, goes_on = (running(pool, n, 8, 7, max_tokens=n) for n in (1, 0, 2))
    appends.context.append_ids([9])
    rows = [row_of(appends, 1), all_of(ends), all_of(goes_on)]
    assert [row.turn for row in following(pool, [ends, appends, goes_on], rows)] == [goes_on.running]


def test_nothing_follows_where_somebody_would_miss_a_step(pool: PagePool) -> None:
    session, other = running(pool, 1, 8, 7, max_tokens=9), running(pool, 2, 8, max_tokens=9)
    rows = [all_of(session)]
    assert following(pool, [session], rows)
    assert not following(pool, [session, other], [*rows, row_of(other, 4)]), "it has more of its input to compute"
    other.running = make_turn(max_tokens=1)
    assert following(pool, [session, other], [*rows, all_of(other)])
    other.queued.append(make_turn())
    assert not following(pool, [session, other], [*rows, all_of(other)]), "its next turn begins"


def test_short_appends_of_sessions_that_are_not_in_the_step_follow_it(pool: PagePool) -> None:
    """Behind the tokens that it chooses, the one due earliest before the others."""
    session, late, soon = running(pool, 1, 8, 7, max_tokens=9), running(pool, 2, 8), running(pool, 3, 6, 2)
    assert late.running is not None
    assert soon.running is not None
    late.running.due_s = soon.running.due_s + 1
    rows = following(pool, [session, late, soon], [all_of(session)])
    assert [(row.session, row.first, row.num_tokens, follows(row)) for row in rows] == [
        (session, 8, 1, True),
        (soon, 2, 4, False),
        (late, 0, 8, False),
    ]


def test_a_long_append_or_a_session_that_failed_follows_nothing(pool: PagePool) -> None:
    session, other = running(pool, 1, 8, 7, max_tokens=9), running(pool, 2, 17)
    assert not following(pool, [session, other], [all_of(session)])
    failed = running(pool, 3, 2)
    memory = TiersDriver(pool)
    scheduler = Scheduler(64, memory.tiers, StepTimeModel(), memory.clock, suspects={failed})
    assert not scheduler.schedule_next([all_of(session)], [session, failed])


def test_a_session_that_failed_goes_on_alone(pool: PagePool) -> None:
    failed, other = running(pool, 1, 8, 7, max_tokens=9), running(pool, 2, 2)
    memory = TiersDriver(pool)
    scheduler = Scheduler(64, memory.tiers, StepTimeModel(), memory.clock, suspects={failed})
    rows = [all_of(failed)]
    assert scheduler.schedule_next(rows, [failed])
    assert not scheduler.schedule_next(rows, [failed, other])


def test_nothing_follows_where_not_all_appends_have_room(pool: PagePool) -> None:
    """The one due earliest goes first: `schedule` must choose."""
    session, *others = (running(pool, n, 4, 0 if n else 3, max_tokens=9) for n in range(3))
    memory, rows = TiersDriver(pool), [all_of(session)]
    for max_batch_tokens, num_rows in ((16, 3), (8, 0)):
        scheduler = Scheduler(max_batch_tokens, memory.tiers, StepTimeModel(), memory.clock)
        assert len(scheduler.schedule_next(rows, [session, *others])) == num_rows


def test_nothing_follows_where_a_slow_model_would_be_silent_for_it(pool: PagePool) -> None:
    session, other = running(pool, 1, 8, 7, max_tokens=9), running(pool, 2, 150)
    for step_time, num_rows in ((PACE, 2), (SLOW, 0)):
        scheduler = make_scheduler(1024, TiersDriver(pool), step_time)
        assert len(scheduler.schedule_next([all_of(session)], [session, other])) == num_rows


def test_the_turn_behind_one_that_has_ended_follows_as_any_other(pool: PagePool) -> None:
    session = running(pool, 1, 8, 7, max_tokens=9)
    rows = [all_of(session)]
    session.running = make_turn(max_tokens=9)
    (row,) = following(pool, [session], rows)
    assert (row.turn, row.first, follows(row)) == (session.running, 7, False)


def test_nothing_follows_where_a_page_would_have_to_be_taken_from_somebody() -> None:
    pool = PagePool(3, PAGE_SIZE)
    session, parked = running(pool, 1, 8, 7, max_tokens=9), make_session(pool, 2, context_len=5, kv_len=4)
    rows = [all_of(session)]
    assert not following(pool, [session], rows)
    parked.table.truncate(0)
    assert following(pool, [session], rows)
