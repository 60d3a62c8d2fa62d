"""Tests of engine: any order of turns, interruptions, rewinds, repetitions, departures, failures, silence and clock
jumps, in a pool that is too small, against plain lists.

`PlainEngine` hears all that the engine hears and says what must come of it. After every event the contexts, the open
turns and the answers of both are compared, and the engine's integrity is checked. `pytest --engine-runs` says how many
runs there are. Half of them are on an asynchronous runner, which the engine runs ahead of. Some have a host tier; in
`TieredEngineMachine` there are files too, and some of these are damaged; in `LateEngineMachine` copies between pages
and host memory are done late besides, as a GPU's are.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from microturn.engine import steps, suspects, turn_grammars
from microturn.engine.engine import Engine
from microturn.engine.in_flight_step import InFlightStep
from microturn.engine.scheduled_row import ScheduledRow
from microturn.offload import disk_store
from microturn.sessions import speculation
from microturn.sessions.options import TurnOptions
from microturn.sessions.session import Session
from microturn.settings import Settings
from microturn.text.grammar_source import GrammarSource
from support import plain_turn
from support.by_hand import FilesByHand
from support.fake_runner import VOCAB_SIZE, FakeDriver
from support.foreseen import foreseen
from support.grammars import hash_grammars
from support.late_copies import LateCopier
from support.late_draws import late_draw
from support.plain_engine import MAX_SESSIONS, PlainEngine
from support.plain_session import IDLE_S, MAX_QUEUED, PlainSession
from support.plain_turn import EOS_IDS, MAX_CONTEXT, WINDOW, Ask, PlainTurn
from support.tiers import settle

# In so many steps the most urgent turn computes a whole context, if need be in steps of one token, and ends.
MAX_STEPS_TO_AN_ANSWER = 2 * MAX_CONTEXT
STEP_S = 0.01


class OutOfMemory(Exception):
    """Why passes fail here, and the only reason."""


@dataclass(frozen=True)
class Remark:
    """What is drawn of a turn; the rest of it follows from the session that it is said in.

    Attributes:
        kept_eighths: how much of the context its rewind keeps; above 8 it is beyond the end. None is no rewind.
        delay_s: how long it lies before the engine takes it.
    """

    given: tuple[int, ...]
    max_tokens: int
    is_numbered: bool
    kept_eighths: int | None
    on_overlap: str | None
    deadline_ms: float | None
    end: bool
    speculates: bool
    delay_s: float

    def said_in(self, session_id: int, session: PlainSession | None) -> Ask:
        """The turn as the owner of a session says it, or who opens one."""
        number, context_len, key = 0, 0, None
        if session is not None:
            number, context_len, key = session.next_number, len(session.now.tokens), session.key
        return Ask(
            session_id,
            self.given,
            self.max_tokens,
            end=self.end,
            turn=number if self.is_numbered else None,
            rewind_to=None if self.kept_eighths is None else -(-context_len * self.kept_eighths // 8),
            on_overlap=self.on_overlap,
            deadline_ms=self.deadline_ms,
            session_key=key,
            others=(("speculate", "ngram"),) if self.speculates else (),
        )


GRAMMAR = GrammarSource("regex", "([b-z][B-Z]?){3,6}!*")
session_ids = st.integers(1, MAX_SESSIONS + 1)
keys = st.sampled_from([None, None, "hers", "his"])
# Some inputs begin alike, so that prefixes are shared.
inputs = st.one_of(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=14).map(tuple), st.integers(5, 20).map(lambda n: tuple(range(n)))
)
output_lens = st.sampled_from([0, 1, 2, 4, 6, 8, 10])
overlaps = st.sampled_from([None, None, "queue", "interrupt"])
deadlines_ms = st.sampled_from([None, None, None, None, None, 0.0, 25.0, 60.0, 1000.0])
seldom = st.sampled_from([False] * 7 + [True])
remarks = st.builds(
    Remark,
    given=inputs,
    max_tokens=output_lens,
    is_numbered=st.booleans(),
    kept_eighths=st.sampled_from([None] * 8 + list(range(10))),
    on_overlap=overlaps,
    deadline_ms=deadlines_ms,
    end=seldom,
    speculates=st.booleans(),
    delay_s=st.sampled_from([0.0] * 7 + [0.05]),
)
flags = st.sampled_from([{}, {}, {"start": True}, {"start": True, "resume": True}, {"end": True}])
# Which of those that there are.
choices = st.integers(0, 11)
# Steps that the engine makes before the next thing happens.
pauses = st.sampled_from([0, 0, 1, 2, 3, 4, 6])
# Layers that see less than a session's window shows, and layers that see more.
layer_windows = st.sampled_from([None, None, 3, 8])
# A page takes 64 bytes.
host_tiers_bytes = st.sampled_from([0, 0, 200, 1000, 100_000])


class EngineMachine(RuleBasedStateMachine):
    """Sessions in a pool that is too small for them, and the plain engine beside it."""

    def __init__(self, *, is_asynchronous: bool) -> None:
        super().__init__()
        self.is_asynchronous = is_asynchronous

    @initialize(
        num_pages=st.integers(10, 30),
        max_batch_tokens=st.sampled_from([4, 7, 64]),
        share_prefixes=st.booleans(),
        host_tier_bytes=host_tiers_bytes,
        history_bytes=st.sampled_from([Settings.history_bytes, 0, 60]),
        layer_window=layer_windows,
        is_stopped=st.sampled_from([False, False, False, True]),
        seed=st.integers(0, 2**32),
        first=st.lists(remarks, min_size=1, max_size=3),
    )
    def begin(
        self,
        num_pages: int,
        max_batch_tokens: int,
        share_prefixes: bool,
        host_tier_bytes: int,
        history_bytes: int,
        layer_window: int | None,
        is_stopped: bool,
        seed: int,
        first: list[Remark],
    ) -> None:
        self.seed = seed
        self.driver = FakeDriver(
            num_pages=num_pages,
            max_context=MAX_CONTEXT,
            max_batch_tokens=max_batch_tokens,
            max_queued_turns=MAX_QUEUED,
            window_slack=WINDOW.slack,
            max_sessions=MAX_SESSIONS,
            idle_timeout_s=IDLE_S,
            share_prefixes=share_prefixes,
            host_tier_bytes=host_tier_bytes,
            history_bytes=history_bytes,
            # Plain lists count no bytes. Behind a window, what an interrupt appends may take more than the longest
            # context: with little history, the limit that follows from that would refuse some of it.
            max_session_bytes=Settings.history_bytes,
            window=layer_window,
            eos_ids=EOS_IDS,
            grammars=hash_grammars(EOS_IDS),
            is_asynchronous=self.is_asynchronous,
            **self._more_settings(),
        )
        self.plain = PlainEngine(self.driver.clock, self._find)
        self._overhear(self.driver.engine)
        self.is_stopped = is_stopped
        self.num_said = 0
        self.posted: list[PlainTurn] = []
        self.numbered: list[Ask] = []
        for session_id, remark in enumerate(first, start=1):
            self.start(session_id, remark, None, session_id == 1, 0)

    def _more_settings(self) -> dict[str, Any]:
        return {}

    # ---- what may happen: turns --------------------------------------------------------------------------------------

    @rule(session_id=session_ids, remark=remarks, key=keys, is_windowed=st.booleans(), pause=pauses)
    def start(self, session_id: int, remark: Remark, key: str | None, is_windowed: bool, pause: int) -> None:
        """START, whether the session lives or not; what it says of overlap and deadlines holds for later turns."""
        ask = replace(remark.said_in(session_id, None), start=True, session_key=key, is_windowed=is_windowed)
        self._say(ask, pause, remark.delay_s)

    @precondition(lambda self: self.plain.sessions)
    @rule(who=choices, remark=remarks, pause=pauses)
    def say(self, who: int, remark: Remark, pause: int) -> None:
        session_id = self._living(who)
        self._say(remark.said_in(session_id, self.plain.sessions[session_id]), pause, remark.delay_s)

    @precondition(lambda self: self.plain.sessions)
    @rule(who=choices, remarks=st.lists(remarks, min_size=2, max_size=5), pause=pauses)
    def say_much_at_once(self, who: int, remarks: list[Remark], pause: int) -> None:
        """Turns that wait for each other, or end each other; at times more of them than may wait."""
        session_id = self._living(who)
        for remark in remarks:
            if session_id in self.plain.sessions:
                self._say(remark.said_in(session_id, self.plain.sessions[session_id]))
        self._listen(pause)

    @precondition(lambda self: self.plain.num_open)
    @rule(who=choices, remark=remarks, pause=pauses)
    def talk_over(self, who: int, remark: Remark, pause: int) -> None:
        """A turn that ends those before it, perhaps with a cut; with END it closes at once."""
        session_id = self._talking(who)
        ask = remark.said_in(session_id, self.plain.sessions[session_id])
        self._say(replace(ask, on_overlap="interrupt"), pause, remark.delay_s)

    @precondition(lambda self: self.numbered)
    @rule(which=choices, resume=seldom, deadline_ms=deadlines_ms, pause=pauses)
    def say_again(self, which: int, resume: bool, deadline_ms: float | None, pause: int) -> None:
        """A numbered turn comes again, perhaps from a client that comes back, whatever became of it."""
        ask = replace(self._said(which), deadline_ms=deadline_ms)
        self._say(replace(ask, start=True, resume=True, is_windowed=False) if resume else ask, pause)

    @precondition(lambda self: self.numbered)
    @rule(which=choices, given=inputs, end=seldom)
    def say_something_else_under_its_number(self, which: int, given: tuple[int, ...], end: bool) -> None:
        self._say(replace(self._said(which), given=given, end=end))

    @precondition(lambda self: self.plain.sessions)
    @rule(who=choices, remark=remarks, gap=st.integers(-2, 2), pause=pauses)
    def say_under_any_number(self, who: int, remark: Remark, gap: int, pause: int) -> None:
        """It most often leaves a gap, or came long ago."""
        session_id = self._living(who)
        session = self.plain.sessions[session_id]
        self._say(replace(remark.said_in(session_id, session), turn=max(0, session.next_number + gap)), pause)

    @precondition(lambda self: self.posted)
    @rule(session_id=session_ids, key=keys, flags=flags)
    def come_with_any_key(self, session_id: int, key: str | None, flags: dict[str, Any]) -> None:
        """Somebody who need not own the session, and would end what runs; and the session need not be there."""
        self._say(Ask(session_id, (7,), 1, on_overlap="interrupt", session_key=key, **flags))

    @precondition(lambda self: self.plain.sessions)
    @rule(who=choices, remark=remarks, is_too_long=st.booleans(), pause=pauses)
    def say_what_cannot_be(self, who: int, remark: Remark, is_too_long: bool, pause: int) -> None:
        """A turn that is refused for what it says; its END counts all the same."""
        session_id = self._living(who)
        given = (7,) * (MAX_CONTEXT + 1) if is_too_long else (VOCAB_SIZE,)
        self._say(replace(remark.said_in(session_id, self.plain.sessions[session_id]), given=given), pause)

    @precondition(lambda self: self.plain.sessions)
    @rule(who=choices, at_once=st.booleans(), pause=pauses)
    def hang_up(self, who: int, at_once: bool, pause: int) -> None:
        session_id = self._living(who)
        key = self.plain.sessions[session_id].key
        self._say(Ask(session_id, end=True, on_overlap="interrupt" if at_once else None, session_key=key), pause)

    # ---- what may happen: all else -----------------------------------------------------------------------------------

    @precondition(lambda self: self.posted)
    @rule(which=choices, pause=pauses)
    def leave(self, which: int, pause: int) -> None:
        """The stream of a turn breaks, one that waits or runs where there is one."""
        turns = [turn for turn in self.posted if not turn.recorder.is_done] or self.posted
        turn = turns[-1 - which % len(turns)]
        self.driver.engine.cancel(turn.turn)
        self._take_posts()
        self.plain.leave(turn)
        self._check()
        self._listen(pause)

    @precondition(lambda self: self.plain.num_open)
    @rule(when=st.sampled_from(["built", "run", "read"]), pause=pauses)
    def fail_a_pass(self, when: str, pause: int) -> None:
        """The next forward pass raises: as it is built, or having spoilt what it writes, or as its tokens are read."""
        if when == "run":
            self.driver.runner.error = OutOfMemory()
        elif when == "read":
            self.driver.runner.late_error = OutOfMemory()
        with patch.object(ScheduledRow, "build", _fail_to_build) if when == "built" else contextlib.nullcontext():
            self._step()
        self.driver.runner.error = self.driver.runner.late_error = None
        self._listen(pause)

    @precondition(lambda self: self.plain.num_open)
    @rule(num_steps=st.integers(2, 9))
    def listen(self, num_steps: int) -> None:
        self._listen(num_steps)

    @rule(by_s=st.sampled_from([-30.0, -2.0, -0.02, 0.02, 0.1, 2.0, 7.0, 30.0]), pause=pauses)
    def set_the_clock(self, by_s: float, pause: int) -> None:
        self.driver.clock.now_s += by_s
        self._listen(pause)

    @precondition(lambda self: self.plain.sessions)
    @rule(kept=st.sets(session_ids, max_size=2))
    def fall_silent(self, kept: set[int]) -> None:
        """All turns end; then only some sessions are kept alive for longer than the idle time."""
        self._finish()
        for _ in range(2):
            self.driver.clock.now_s += 0.7 * IDLE_S
            self._step()
            for session_id in kept & set(self.plain.sessions):
                self._say(Ask(session_id, session_key=self.plain.sessions[session_id].key))

    def teardown(self) -> None:
        """Either the engine stops; or everybody can be answered, and in the end every page is given back."""
        if not hasattr(self, "driver") or sys.exc_info()[0] is not None:
            return  # a run that has failed says no more
        if self.is_stopped:
            self.driver.engine.stop()
            self.plain.stop()
            self.plain.check_answers()
            metrics = self.driver.engine.recorder.metrics
            assert metrics.sessions_opened.total() == metrics.sessions_ended.total()
            num_answered = metrics.turns.total() + metrics.turn_errors.total() + metrics.repetitions.total()
            assert num_answered == self.num_said
            return
        self._finish()
        self._step()  # who was silent for too long is gone
        for session_id, session in list(self.plain.sessions.items()):
            cut_at = session.told.sight.least_rewind
            last = self._say(
                Ask(session_id, (7,), 2, end=True, rewind_to=cut_at, deadline_ms=0.0, session_key=session.key)
            )
            self._finish()
            assert last.recorder.status.finish_reason == last.reason
        self.driver.engine._prefixes.clear()
        assert self.driver.pool.num_free == self.driver.pool.num_pages
        assert self._gauge("microturn_sessions") == 0
        assert (
            self._gauge("microturn_pages") == self._gauge("microturn_pages", use="free") == self.driver.pool.num_pages
        )
        assert self._gauge("microturn_kv_bytes") == 0
        assert self._gauge("microturn_turns_open") == 0

    # ---- what must come of it ----------------------------------------------------------------------------------------

    def _say(self, ask: Ask, pause: int = 0, delay_s: float = 0.0) -> PlainTurn:
        """A turn is posted to both engines and taken by both; then the engine makes some steps."""
        recorder, turn = self.driver.post(
            ask.session_id, ask.given, start=ask.start, end=ask.end, max_tokens=ask.max_tokens, **ask.options
        )
        self.num_said += 1
        posted = PlainTurn(ask, turn, recorder, self.driver.clock())
        self.driver.clock.now_s += delay_s
        self._take_turns()
        self.plain.arrive(posted)
        self.plain.listen(pass_failed=False)
        self._check()
        self.posted = [*self.posted[-11:], posted]
        if ask.turn is not None:
            self.numbered = [*self.numbered[-11:], ask]
        self._listen(pause)
        return posted

    def _listen(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        self.driver.clock.now_s += STEP_S
        settle(self.driver)
        is_busy = self.driver.engine.step()
        assert is_busy == bool(self.plain.num_heard or self.driver.engine._in_flight)
        self._check()

    def _take_turns(self) -> None:
        """Turns that were posted, and nothing else that a step does: beside a pass under way, as long as nothing else
        was posted before them.
        """
        engine = self.driver.engine
        if engine._in_flight is not None:
            for turn in engine._inbox.take_turns(engine._in_flight.can_be_dropped):
                engine._arrive(turn)
        if not engine._inbox.is_empty:
            self._take_posts()

    def _take_posts(self) -> None:
        """Whatever was posted, and nothing else that a step does; no pass may be under way then."""
        if self.driver.engine._in_flight is not None:
            self.driver.engine._finish(self.driver.engine._in_flight)
        assert self.driver.engine._in_flight is None, "a pass is begun while somebody waits"
        self.driver.engine._take_posts(block=False)

    def _overhear(self, engine: Engine) -> None:
        """The plain engine is told when time passes in the engine, and when a pass is over."""
        finish, reap = engine._finish, engine._reap

        def finish_and_tell(in_flight: InFlightStep) -> None:
            is_anybodys = any(row.is_wanted for row in in_flight.rows)
            error = in_flight.error if in_flight.drawn is None else in_flight.drawn.error
            assert isinstance(error, OutOfMemory | None), error
            finish(in_flight)
            self.plain.listen(pass_failed=is_anybodys and error is not None)

        def reap_and_tell() -> None:
            reap()
            self.plain.pass_time()
            self.plain.listen(pass_failed=False)

        engine._finish, engine._reap = finish_and_tell, reap_and_tell  # type: ignore[method-assign]

    def _finish(self) -> None:
        """Everybody is answered: in a bounded number of steps at least one is."""
        while num_open := self.plain.num_heard:
            num_steps = 0
            while self.plain.num_heard == num_open:
                self._step()
                num_steps += 1
                assert num_steps < MAX_STEPS_TO_AN_ANSWER, "nobody makes progress"

    def _check(self) -> None:
        self.driver.engine.check_integrity()
        assert {session.id for session in self.driver.engine._sessions} == set(self.plain.sessions)
        for session_id, plain in self.plain.sessions.items():
            session = self._find(session_id)
            assert session is not None
            context, tokens = session.context, list(plain.now.tokens)
            assert len(context) == len(tokens)
            assert list(context.kept_ids()) == tokens[: context.num_sinks] + tokens[context.first_kept :]
            assert Counter(context.known_ids()) == Counter(tokens)
            assert session.open_turns == [turn.turn for turn in plain.open]
        self.plain.check_answers()
        self._check_counts()

    def _check_counts(self) -> None:
        """What lives is what was opened and has not ended; what was said is what was answered and what is open."""
        metrics = self.driver.engine.recorder.metrics
        assert metrics.sessions_opened.total() - metrics.sessions_ended.total() == len(self.plain.sessions)
        num_answered = metrics.turns.total() + metrics.turn_errors.total() + metrics.repetitions.total()
        assert num_answered + self.plain.num_open == self.num_said

    def _gauge(self, name: str, **labels: str) -> float:
        """The sum of a family's numbers that have these labels, as of now."""
        samples = self.driver.engine._maintenance.measure().items()
        return sum(number for (of, has), number in samples if of == name and labels.items() <= dict(has).items())

    def _find(self, session_id: int) -> Session | None:
        return self.driver.engine._sessions.find(session_id)

    def _living(self, who: int) -> int:
        session_ids = sorted(self.plain.sessions)
        return session_ids[who % len(session_ids)]

    def _talking(self, who: int) -> int:
        """A session with open turns, where there is one."""
        session_ids = [session_id for session_id, session in sorted(self.plain.sessions.items()) if session.open]
        return session_ids[who % len(session_ids)] if session_ids else self._living(who)

    def _said(self, which: int) -> Ask:
        """One of the last numbered turns, of a session that lives where there is one."""
        asks = [ask for ask in self.numbered if ask.session_id in self.plain.sessions] or self.numbered
        return asks[-1 - which % len(asks)]


class TieredEngineMachine(EngineMachine):
    """With files, which somebody damages now and then."""

    def _more_settings(self) -> dict[str, Any]:
        self.tier_dir = Path(tempfile.mkdtemp())
        return {"disk_tier_dir": str(self.tier_dir), "disk_tier_bytes": 2000}

    @rule(num_parked=st.integers(1, 3), is_running=st.booleans(), pause=pauses)
    def take_pages(self, num_parked: int, is_running: bool, pause: int) -> None:
        """Sessions lose their pages, as if somebody needed them: those parked longest, and perhaps one that runs.

        Only who schedules takes pages from one that runs, and that is never while a pass is under way.
        """
        engine = self.driver.engine
        for _ in range(num_parked):
            engine._tiers.reclaim()
        if is_running and engine._in_flight is None:
            for session in list(engine._lifecycle.running)[:1]:
                engine._tiers.offload(session)
        self._check()
        self._listen(pause)

    @rule(damage=st.sampled_from(["flip", "truncate", "remove", "swap"]), where=st.integers(0, 2**20))
    def damage_files(self, damage: str, where: int) -> None:
        """Something happens to all files that are there and not empty by now."""
        settle(self.driver)
        contents = {}
        for file in sorted(self.tier_dir.glob("*/*.safetensors")):
            with contextlib.suppress(FileNotFoundError):  # the store has just removed it
                contents[file] = file.read_bytes()
        files = [file for file, content in contents.items() if content]
        for number, file in enumerate(files):
            content = contents[file]
            at = where % len(content)
            if damage == "flip":
                file.write_bytes(content[:at] + bytes([content[at] ^ 1 << where % 8]) + content[at + 1 :])
            elif damage == "truncate":
                file.write_bytes(content[:at])
            elif damage == "remove":
                file.unlink()
            else:
                file.write_bytes(contents[files[number - 1]])

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "driver"):
                self.driver.engine.stop()
                assert list(self.tier_dir.iterdir()) == []
                shutil.rmtree(self.tier_dir)


class LateEngineMachine(TieredEngineMachine):
    """With copies that are still under way when steps are made."""

    def _more_settings(self) -> dict[str, Any]:
        return {**super()._more_settings(), "new_copier": partial(LateCopier, seed=self.seed)}

    @precondition(lambda self: self._coming and self.driver.engine._in_flight is None)
    @rule(which=choices, pause=pauses)
    def take_pages_on_the_way(self, which: int, pause: int) -> None:
        """A session loses pages into which its KV is being copied."""
        coming = self._coming
        self.driver.engine._tiers.offload(coming[which % len(coming)])
        self._check()
        self._listen(pause)

    @property
    def _coming(self) -> list[Session]:
        """Sessions that have pages, and their KV elsewhere."""
        sessions = self.driver.engine._sessions
        return [session for session in sessions if session.stored is not None and not session.table.is_empty]


def _fail_to_build(_: ScheduledRow) -> NoReturn:
    raise OutOfMemory


def _some_grammar(options: Mapping[str, Any]) -> GrammarSource | None:
    return GRAMMAR if options.get("max_tokens") in (6, 10) else None


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["in_step", "ahead"])
@pytest.mark.parametrize(
    ("machine", "share"), [(EngineMachine, 0.5), (TieredEngineMachine, 0.125), (LateEngineMachine, 0.0625)]
)
def test_whatever_happens_the_engine_does_what_plain_lists_say(
    pytestconfig: pytest.Config,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    machine: type[EngineMachine],
    share: float,
    is_asynchronous: bool,
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(steps, "draw", late_draw)
    # Some turns count the tokens before them as if they had penalties, which at their defaults change no choice.
    monkeypatch.setattr(TurnOptions, "has_penalties", property(lambda options: options.max_tokens in (4, 8)))
    monkeypatch.setattr(speculation, "look_up", foreseen)
    # With threads, which of two files is done first differs from run to run.
    monkeypatch.setattr(disk_store, "FileThreads", FilesByHand)
    # Passes fail more often than any session would live.
    monkeypatch.setattr(suspects, "MAX_FAILURES", sys.maxsize)
    # And some must match a grammar; their values are whole before they end, or not.
    hash_grammars(EOS_IDS).compile(GRAMMAR)
    for module in (turn_grammars, plain_turn):
        monkeypatch.setattr(module, "grammar_source", _some_grammar)
    runs = settings(
        max_examples=int(share * pytestconfig.getoption("engine_runs")),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(partial(machine, is_asynchronous=is_asynchronous), settings=runs)
