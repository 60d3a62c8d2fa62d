"""The engine: one thread that owns all sessions and runs them, step by step, through the model.

A step is schedule → run → commit. On an asynchronous runner the next step is launched before this one is committed
(see `steps`); turns that come meanwhile join it. Other threads post to the inbox and never touch a session. The engine
handles token ids and sinks; text belongs to the codec, responses to the adapter.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from microturn.engine.in_flight_step import InFlightStep
from microturn.engine.inbox import Inbox
from microturn.engine.lifecycle import Lifecycle
from microturn.engine.maintenance import Maintenance
from microturn.engine.preparation import Preparation
from microturn.engine.scheduler import Scheduler
from microturn.engine.steps import Steps
from microturn.errors import Expired, Unavailable
from microturn.kv.pool import PagePool
from microturn.kv.prefix_cache import PrefixCache
from microturn.model.runner import Runner
from microturn.offload.background import Background
from microturn.offload.copies import KVCopies
from microturn.offload.tiers import Tiers
from microturn.sessions.environment import SessionEnvironment
from microturn.sessions.table import SessionTable, SessionWatcher
from microturn.sessions.turn import Turn
from microturn.settings import Settings
from microturn.snapshots.arrivals import Arrivals
from microturn.snapshots.directory import SnapshotDirectory
from microturn.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Streaming sessions over one model; `wiring.build_engine` makes its parts.

    Attributes:
        settings: how it runs.
        clock: seconds, monotonic.
        steps: its forward passes.
        environment: what a saved session finds here.
        snapshots: where saved sessions are that clients may resume; None is nowhere.
        copies: of KV, for files.
        recorder: counts what happens.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Callable[[], float],
        inbox: Inbox,
        pool: PagePool,
        sessions: SessionTable,
        prefixes: PrefixCache,
        tiers: Tiers,
        copies: KVCopies,
        scheduler: Scheduler,
        steps: Steps,
        lifecycle: Lifecycle,
        arrivals: Arrivals,
        preparation: Preparation,
        maintenance: Maintenance,
        backgrounds: Sequence[Background],
        environment: SessionEnvironment,
        snapshots: SnapshotDirectory | None,
        recorder: Recorder,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.steps = steps
        self.environment = environment
        self.snapshots = snapshots
        self.copies = copies
        self.recorder = recorder
        self._inbox = inbox
        self._pool = pool
        self._sessions = sessions
        self._prefixes = prefixes
        self._tiers = tiers
        self._scheduler = scheduler
        self._lifecycle = lifecycle
        self._arrivals = arrivals
        self._preparation = preparation
        self._maintenance = maintenance
        self._backgrounds = backgrounds
        self._in_flight: InFlightStep | None = None
        # Nothing is left to do until something is posted, or falls due.
        self._can_wait = True
        # The holder may run posted tasks: the thread of `run`; after it has ended, one thread at a time.
        self._owner = threading.RLock()
        self._is_stopping = False
        self._has_ended = False

    @property
    def runner(self) -> Runner:
        """The model."""
        return self.steps.runner

    # ---- called from other threads -------------------------------------------------------------------------------

    def watch_sessions(self, watcher: SessionWatcher) -> None:
        """Tells a watcher which sessions live; to be called before the first turn comes."""
        self._sessions.watchers += (watcher,)

    def submit(self, turn: Turn) -> None:
        """Posts a turn; its sinks are told how it goes."""
        self._inbox.put(turn)
        if self._has_ended:
            self._refuse_posts()

    def cancel(self, turn: Turn) -> None:
        """Posts that the client of a turn has gone: see `Lifecycle.cancel`."""
        self._inbox.put(partial(self._preparation.cancel, turn))

    def call(self, task: Callable[[Maintenance], T]) -> T:
        """Does a task between two steps, waits for it, and returns or raises what it does.

        Raises:
            Unavailable: the engine has stopped.
        """
        done: Future[T] = Future()
        self._inbox.put(partial(self._do, task, done))
        if self._has_ended:
            self._refuse_posts()
        return done.result()

    def stop(self) -> None:
        """Ends `run`; turns that run or wait end with UNAVAILABLE, and so do those that come later."""
        self._inbox.put(self._stop)
        self._refuse_posts()

    def _refuse_posts(self) -> None:
        """Does what has been posted and what `run` will not, since it has ended, or will do nothing any more.

        A caller posts first and checks for the end afterwards; here the end is set before the posts are taken. So each
        post is done.
        """
        with self._owner:
            self._has_ended = True
            self._take_posts(block=False)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until `stop`. The thread that calls this owns every session from then on."""
        with self._owner:
            try:
                while not self._is_stopping:
                    self.step(block=True)
            except Exception:
                # A turn's fault is answered to its client; this is ours, and no session can be trusted any more. The
                # server answers nothing but UNAVAILABLE from now on, which its health check sees.
                log.critical("the engine stops", exc_info=True)
                self._stop(has_failed=True)
            finally:
                self._refuse_posts()

    def step(self, *, block: bool = False) -> bool:
        """Takes what was posted, then makes one forward pass.

        A pass that is under way since the last step is ended before that. As long as nothing but turns is posted, and
        nothing falls due, that is all: the next pass is under way already (see `InFlightStep`), with the turns that
        have come in it.

        Args:
            block: wait for a post when there is nothing to do.

        Returns:
            Whether anything is left to compute.
        """
        has_run = self._in_flight is not None
        if self._in_flight is not None:
            self._tiers.begin_step()  # before the next pass asks for anybody's KV
            self._finish(self._in_flight)
        is_ahead = self._in_flight is not None
        if not is_ahead:
            self._take_posts(block=block and self._can_wait)
            if self._is_stopping:
                return False
            self._preparation.expire_turns()
            self._lifecycle.expire_turns()
            self._reap()
            self._arrivals.purge()
        if not has_run:
            self._tiers.begin_step()
        if not is_ahead:
            rows = self._scheduler.schedule(self._lifecycle.running, with_others=len(self._sessions) > 1)
            if rows:
                has_run = True
                self._finish(self.steps.launch(rows))
            elif self._scheduler.is_stalled and not any(self.copies.owned()):
                self.recorder.step_stalled()
        self._can_wait = not self._tiers.end_step() and not has_run
        return bool(self._lifecycle.running) or self._in_flight is not None or self._preparation.is_busy

    def check_integrity(self) -> None:
        """Asserts that pages, sessions and turns agree."""
        tables = [session.table for session in self._sessions]
        self._pool.check_integrity([*(table.pages for table in tables), *self.copies.owned()], self._prefixes.pages)
        for session in self._sessions:
            session.check_integrity()
            is_running = session.running is not None and not session.running.is_paused
            assert is_running == (session in self._lifecycle.running), "a turn that does not run"
        self._tiers.check_integrity()
        assert not self.recorder.metrics.stalled_steps.total(), "turns to compute, and a step without a row"
        self._sessions.accounts.check_integrity()

    def _take_posts(self, *, block: bool) -> None:
        for post in self._inbox.take(wait_s=self._patience_s() if block else 0.0):
            if isinstance(post, Turn):
                self._arrive(post)
            else:
                post()

    def _patience_s(self) -> float | None:
        """How long nothing falls due; None is for ever."""
        next_s = _earliest(self._due_s(), self._tiers.next_s)
        return None if next_s is None else max(0.0, next_s - self.clock())

    def _due_s(self) -> float | None:
        """When a session expires or a turn's time has passed, by the engine's clock."""
        return _earliest(
            self._sessions.next_expiry_s(),
            self._lifecycle.deadlines.next_s(),
            self._preparation.next_s,
            self._arrivals.next_s,
        )

    def _is_quiet_until(self, time_s: float) -> bool:
        """Whether nothing but the step in flight is to be done before a time."""
        if not self._inbox.is_empty:
            return False
        due_s = self._due_s()
        return due_s is None or due_s > time_s

    def _finish(self, step: InFlightStep) -> None:
        """Ends a step in flight; where the next one can follow from it, that is launched before."""
        if self.steps.can_run_ahead:
            # A turn may well be of a session in that step. It waits for the one that runs, or takes its place: then the
            # session's row is dropped like that of a turn which has ended (see `steps`).
            for turn in self._inbox.take_turns(step.can_be_dropped):
                self._arrive(turn)
        self._in_flight = self.steps.launch_next(step, self._is_quiet_until)
        self.steps.process_result(step, self._in_flight)
        if self._in_flight is not None:
            self.steps.choose(self._in_flight)

    def _reap(self) -> None:
        for session in self._sessions.expired(self.clock(), self._preparation.has_turn_of):
            # One whose turn is paused was silent, too.
            self._lifecycle.end(session, "expired", Expired(f"nobody came back to session '{session.id}'"))

    def _arrive(self, turn: Turn) -> None:
        self.recorder.watch(turn)
        if self._is_stopping:
            turn.fail(_stopping())
        else:
            self._preparation.arrive(turn)

    def _do(self, task: Callable[[Maintenance], T], done: Future[T]) -> None:
        try:
            if self._is_stopping:
                raise _stopping()
            result = task(self._maintenance)
            if self._maintenance.is_stopped:
                self._stop()
            done.set_result(result)
        except Exception as error:
            done.set_exception(error)

    def _stop(self, *, has_failed: bool = False) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        self._preparation.fail_all(_stopping())
        self._lifecycle.fail_all(_stopping())
        for background in self._backgrounds:
            background.close()
        self.recorder.engine_stopped(self._sessions, has_failed=has_failed)
        self._tiers.storage.close()


def _earliest(*times_s: float | None) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping: open the session elsewhere")
