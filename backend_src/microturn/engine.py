"""The engine: one thread that owns all sessions and turns them, step by step, through the model.

A step is schedule → run → commit; on an asynchronous runner the next one is run before this one is committed, where it
can be (see `flight`). Other threads post to the inbox and never touch a session. The engine knows token ids, not text
(its codec does), and sinks, not responses (the adapter does).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import repeat
from typing import TypeVar

from torch import Tensor

from microturn.accounts import ID_BYTES, ByteLimits
from microturn.background import BackgroundThreads, NewBackground
from microturn.batch import Batch
from microturn.codec import CodecFactory, PrepareText
from microturn.errors import InternalError, InvalidArgument, Unavailable
from microturn.flight import Flight
from microturn.generation import Generation
from microturn.housekeeping import Housekeeping
from microturn.kv_pool import PagePool
from microturn.lifecycle import Lifecycle
from microturn.pace import Pace
from microturn.prefix_cache import PrefixCache
from microturn.preparation import Preparation
from microturn.reception import Reception
from microturn.runner import Runner
from microturn.sampler import draw
from microturn.scheduler import ScheduledRow, Scheduler
from microturn.session_table import SessionTable, SessionWatcher
from microturn.settings import Settings
from microturn.snapshots.arrivals import Arrivals
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.session_state import Host
from microturn.telemetry.gauges import Gauges
from microturn.telemetry.recorder import Recorder
from microturn.tiers.copies import KVCopies
from microturn.tiers.opening import open_storage
from microturn.tiers.tiers import Tiers
from microturn.turn import Turn

log = logging.getLogger(__name__)

T = TypeVar("T")


class Engine:
    """Streaming sessions over one model.

    Args:
        settings: how to run.
        runner: the model.
        pool: who owns which of its pages.
        max_context: tokens that a session may hold at most; they fit the pool.
        new_codec: makes the codec of a new session.
        eos_ids: tokens that end a generation.
        model_fingerprint: says whose KV is kept in files, and whose sessions are.
        snapshots: where sessions are that were saved and that clients come back to; None is nowhere.
        pace: what is known of the model's forward passes; None is nothing yet.
        prepare_text: tokenizes long text before its turn; None where all text is left to the codecs.
        new_background: makes what works beside the engine's thread, on saved sessions and on text.
        clock: seconds, monotonic.

    Attributes:
        host: what a saved session finds here.
        copies: of KV, for files.
        recorder: counts what happens.
    """

    def __init__(
        self,
        settings: Settings,
        runner: Runner,
        pool: PagePool,
        *,
        max_context: int,
        new_codec: CodecFactory,
        eos_ids: frozenset[int] = frozenset(),
        model_fingerprint: str = "",
        snapshots: SnapshotDirectory | None = None,
        pace: Pace | None = None,
        prepare_text: PrepareText | None = None,
        new_background: NewBackground = BackgroundThreads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        groups = runner.kv.groups
        num_context_pages = groups.num_groups * pool.num_pages_for(max_context)
        if pool.num_pages < num_context_pages:
            raise InvalidArgument(
                f"a pool of {pool.num_pages} pages of {pool.page_size} tokens does not hold one context of "
                f"{max_context} tokens: raise kv_tokens or lower max_context"
            )
        self.settings = settings
        self.max_context = max_context
        self.runner = runner
        self.clock = clock
        self._pool = pool
        self.recorder = recorder = Recorder(settings)
        self._sessions = SessionTable(
            recorder,
            ByteLimits.of(
                of_session=settings.max_session_bytes,
                of_tenant=settings.max_tenant_bytes,
                page_bytes=groups.num_groups * runner.kv.bytes_per_page,
                page_size=pool.page_size,
                max_context=max_context,
                hidden_size=runner.hidden_size,
                more=settings.history_bytes + ID_BYTES * runner.vocab_size,
            ),
        )
        self._prefixes = PrefixCache(pool)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        storage = open_storage(
            settings,
            runner.kv,
            max_image_pages=num_context_pages,
            model_fingerprint=model_fingerprint,
            clock=clock,
            post=self._inbox.put,
        )
        self._tiers = Tiers(pool, runner.kv, self._sessions, storage, clock)
        self._pace = pace or Pace()
        self._scheduler = Scheduler(settings.max_batch_tokens, self._tiers, self._pace, clock)
        self._lifecycle = Lifecycle(
            self._sessions,
            self._prefixes,
            recorder,
            clock,
            step_len=settings.max_batch_tokens,
            model_fingerprint=model_fingerprint,
        )
        self._generation = Generation(self._lifecycle, eos_ids, clock)
        self.snapshots = snapshots
        num_results = settings.max_queued_turns + 1
        self.host = Host(
            model_fingerprint,
            max_context,
            num_results,
            runner.no_window_reason,
            pool,
            new_codec,
            clock,
            groups.kinds,
            settings.window_slack,
            settings.history_bytes,
        )
        self.copies = KVCopies(pool, runner.kv, storage)
        # Several files at once: one that hangs holds up who asks for it, and no other.
        files = new_background(self._inbox.put, name="microturn-snapshots", num_threads=4)
        texts = new_background(self._inbox.put, name="microturn-text", num_threads=1)
        self._backgrounds = (files, texts)
        self._arrivals = Arrivals(settings, self._sessions, self.host, snapshots, storage, runner.kv.page_parts, files)
        reception = Reception(settings, runner, self._sessions, self._lifecycle, self.host, self.recorder)
        self._preparation = Preparation(
            settings,
            self._sessions,
            reception,
            self._lifecycle,
            self._arrivals,
            new_codec,
            prepare_text,
            texts,
            max_context=max_context,
            clock=clock,
        )
        gauges = Gauges(
            recorder.metrics, self._sessions, self._lifecycle.running, pool, runner.kv.bytes_per_page, storage, clock
        )
        self._housekeeping = Housekeeping(
            self._sessions,
            self._lifecycle,
            reception,
            self._preparation,
            self._arrivals,
            self.host,
            self.copies,
            gauges,
            runner.kv.bytes_per_page,
            self._stop,
        )
        self._flight: Flight | None = None
        # Nothing is left to do before somebody comes, or the time has.
        self._can_wait = True
        # Whoever holds this may do what was posted: the thread of `run`; and after its end one thread at a time.
        self._owner = threading.RLock()
        self._is_stopping = False
        self._has_ended = False

    # ---- called from other threads -------------------------------------------------------------------------------

    def watch_sessions(self, watcher: SessionWatcher) -> None:
        """Tells a watcher which sessions live; to be called before the first turn comes."""
        self._sessions.watcher = watcher

    def submit(self, turn: Turn) -> None:
        """Posts a turn; its sinks are told how it goes."""
        self._inbox.put(partial(self._arrive, turn))
        if self._has_ended:
            self._refuse_posts()

    def cancel(self, turn: Turn) -> None:
        """Posts that nobody waits for a turn any more: see `Lifecycle.cancel`."""
        self._inbox.put(partial(self._preparation.cancel, turn))

    def call(self, task: Callable[[Housekeeping], T]) -> T:
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

        Who posts looks whether it has ended after posting; here that is said before looking for posts. So each is done.
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
                # A turn's fault is answered to its client; this is ours, and no session can be trusted any more. Who
                # watches the server sees that it answers nothing but UNAVAILABLE.
                log.critical("the engine stops", exc_info=True)
                self._stop(has_failed=True)
            finally:
                self._refuse_posts()

    def step(self, *, block: bool = False) -> bool:
        """Takes what was posted, then makes one forward pass.

        A pass that is under way since the last step is ended before that, since sessions change while none is. As long
        as nobody posts and nothing falls due, that is all, and the model has been given the next one (see `Flight`).

        Args:
            block: wait for a post when there is nothing to do.

        Returns:
            Whether anything is left to compute.
        """
        has_run = self._flight is not None
        if self._flight is not None:
            self._finish(self._flight)
        is_ahead = self._flight is not None
        if not is_ahead:
            self._take_posts(block=block and self._can_wait)
            if self._is_stopping:
                return False
            self._preparation.expire_turns()
            self._lifecycle.expire_turns()
            self._reap()
            self._arrivals.purge()
        self._tiers.begin_step()
        if not is_ahead:
            rows = self._scheduler.schedule(self._lifecycle.running, in_company=len(self._sessions) > 1)
            if rows:
                has_run = True
                self._finish(self._launch(rows))
            elif self._scheduler.is_stalled and not any(self.copies.owned()):
                self.recorder.step_stalled()
        self._can_wait = not self._tiers.end_step() and not has_run
        return bool(self._lifecycle.running) or self._flight is not None or self._preparation.is_busy

    def check_integrity(self) -> None:
        """Asserts that pages, sessions and turns agree."""
        tables = [session.table for session in self._sessions]
        self._pool.check_integrity([*(table.pages for table in tables), *self.copies.owned()], self._prefixes.pages)
        for session in self._sessions:
            session.check_integrity()
            assert (session.running is not None) == (session in self._lifecycle.running), "a turn that nobody runs"
        self._tiers.check_integrity()
        assert not self.recorder.metrics.stalled_steps.total(), "turns to compute, and a step without a row"
        self._sessions.accounts.check_integrity()

    def _take_posts(self, *, block: bool) -> None:
        try:
            if block:
                self._inbox.get(timeout=self._patience_s())()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _patience_s(self) -> float | None:
        """How long nothing happens though nobody comes; None is for ever."""
        next_s = _earliest(self._due_s(), self._tiers.next_s)
        return None if next_s is None else max(0.0, next_s - self.clock())

    def _due_s(self) -> float | None:
        """When a session expires or a turn's time has passed, by the engine's clock."""
        return _earliest(
            self._sessions.next_expiry_s(),
            self._lifecycle.next_deadline_s(),
            self._preparation.next_s,
            self._arrivals.next_s,
        )

    def _reap(self) -> None:
        for session in self._sessions.expired(self.clock()):
            self._sessions.end(session, "expired")

    def _arrive(self, turn: Turn) -> None:
        self.recorder.watch(turn)
        if self._is_stopping:
            turn.fail(_stopping())
        else:
            self._preparation.arrive(turn)

    def _do(self, task: Callable[[Housekeeping], T], done: Future[T]) -> None:
        try:
            if self._is_stopping:
                raise _stopping()
            done.set_result(task(self._housekeeping))
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

    # ---- a forward pass ------------------------------------------------------------------------------------------

    def _finish(self, flight: Flight) -> None:
        """Ends a pass under way; where the next one can follow from it, the model is given that before."""
        self._flight = self._launch_ahead(flight)
        self._land(flight)

    def _launch_ahead(self, flight: Flight) -> Flight | None:
        """Gives the model what follows a pass under way; None where that must be over before anything is decided."""
        if not self.runner.is_asynchronous or flight.error is not None or not self._inbox.empty():
            return None
        # What falls due until it is over comes before the next pass.
        over_s = max(self.clock(), flight.begun_s + self._pace.pass_s(flight.batch.num_tokens))
        due_s = self._due_s()
        if due_s is not None and due_s <= over_s:
            return None
        rows = self._scheduler.follow(flight.rows, self._lifecycle.running)
        return self._launch(rows, flight.ids_of(rows)) if rows else None

    def _launch(self, rows: Sequence[ScheduledRow], ids: Tensor | None = None) -> Flight:
        """Gives the model a pass; why that fails is told when it lands.

        Args:
            rows: whose tokens it computes.
            ids: these tokens, where they are still being chosen.
        """
        flight = Flight(rows, Batch([row.build() for row in rows], ids), self.clock())
        try:
            logits = self.runner.run(flight.batch)
            # Where the tokens are still being chosen, every row has one, and chooses the next.
            unknown = repeat(None, len(rows)) if ids is None else ids.unsqueeze(1).unbind()
            flight.drawn = draw(logits, [*map(self._generation.sampling_row, flight.choosing, unknown)])
        except Exception as error:
            flight.error = error
        return flight

    def _land(self, flight: Flight) -> None:
        """Waits for a pass, and commits what came of it for those turns that still run."""
        try:
            sampled = iter(flight.sampled())
        except Exception as error:
            # Whatever went wrong, the sessions of this step are the only ones it can have touched.
            log.exception("a forward pass of %d rows failed", len(flight.rows))
            self.recorder.step_failed()
            failure = InternalError(f"the forward pass failed, nothing was appended: {error}")
            for scheduled in flight.rows:
                if scheduled.is_wanted:
                    self._lifecycle.fail(scheduled.session, scheduled.turn, failure)
            return
        landed_s = self.clock()
        if self._flight is not None:
            self._flight.begun_s = landed_s
        step_s = landed_s - flight.begun_s
        self._pace.observe(flight.batch.num_tokens, step_s)
        self.recorder.stepped(len(flight.rows), flight.batch.num_tokens, step_s)
        for scheduled, row in zip(flight.rows, flight.batch.rows, strict=True):
            token = next(sampled) if row.wants_logits else None
            if not scheduled.is_wanted:
                continue  # it has ended with the token that this row computed
            try:
                self._generation.commit(scheduled, token)
            except Exception as error:
                self._lifecycle.fail(scheduled.session, scheduled.turn, error)


def _earliest(*times_s: float | None) -> float | None:
    return min((time_s for time_s in times_s if time_s is not None), default=None)


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping: open the session elsewhere")
