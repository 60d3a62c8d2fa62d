"""The model process: the product's adapter and engine, stepped under the virtual clock in the place of their threads.

The engine's loop is followed to the letter: it steps as long as there is something to do, and else waits for a post or
for the time that it says itself. A step's time passes within it, so what it answers leaves when it is over.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.engine.wiring import build_engine
from microturn.errors import Unavailable
from microturn.hosts.triton.adapter import TritonPythonModel
from microturn.hosts.triton.responses import Responses
from microturn.kv.pool import PagePool
from microturn.offload import disk_store
from microturn.sessions.turn import SessionId
from microturn.snapshots.directory import SnapshotDirectory
from simulation.containers import sizes_of
from simulation.files import Disk, VirtualBackground, VirtualFileThreads
from simulation.model import TimedRunner
from simulation.oracle import Oracle
from simulation.pb_utils import InferenceRequest
from simulation.settings import Drawn
from simulation.slots import SteppedSlotKeeper
from simulation.triton import Control
from simulation.world import Event, World
from support.driver import IdsOnly
from support.late_copies import LateCopier

# What an engine's step takes beside its pass.
_STEP_S = 5e-5
# A step of the thread that sends responses follows so much later; it asks for clients that have gone so often.
_SEND_S = 2e-4
_POLL_S = 0.1
MODEL = "the model"


class Backend:
    """One life of a model process.

    Attributes:
        engine: the real one.
        oracle: what it must do.
        is_frozen: nothing happens in it, though it lives.
        is_alive: whether it is still there.
        is_touched: whether anything has happened since somebody looked.
        num_steps: of the engine.
        sizes_at_start: of what holds things in it, before anybody came.

    Args:
        world: the clock.
        random: of what the process does.
        drawn: how it is set.
        disk: its files.
        directory: where they are.
        send_control: hands Triton a request of the model's own.
    """

    def __init__(
        self,
        world: World,
        random: Random,
        drawn: Drawn,
        disk: Disk,
        directory: Path,
        send_control: Callable[[Control, float], None],
    ) -> None:
        self.is_frozen = False
        self.is_alive = True
        self.is_touched = True
        self.num_steps = 0
        self._world = world
        self._ahead_s = 0.0
        self._busy_until_s = world.now_s
        self._next_step: Event | None = None
        self._next_send: Event | None = None
        self.disk = disk
        self.runner = TimedRunner(
            spend=self._spend,
            random=random,
            pass_s=drawn.pass_s,
            token_s=drawn.token_s,
            num_pages=drawn.num_pages,
            page_size=drawn.settings.page_size,
            window=drawn.layer_window,
            is_asynchronous=drawn.is_asynchronous,
            new_copier=partial(LateCopier, seed=random.randrange(1 << 30)) if drawn.copies_late else None,
        )
        self.engine = self._new_engine(drawn, directory)
        self.oracle = Oracle(self.engine, drawn.limits)
        self.responses = Responses(self.engine.cancel, lambda *_: None, self.clock)
        self.slots = SteppedSlotKeeper(world, drawn.num_slots, send_control)
        self._model = TritonPythonModel.__new__(TritonPythonModel)
        self.engine.watch_sessions(self.slots.slots)
        self.sizes_at_start = sizes_of(self.engine)
        self._model.serve(self.engine, self.responses, self.slots)
        self.wake()

    def _new_engine(self, drawn: Drawn, directory: Path) -> Engine:
        files = partial(VirtualFileThreads, self.disk, self.wake)
        snapshots = None
        if drawn.settings.snapshot_dir:
            path = directory / "snapshots"
            snapshots = SnapshotDirectory(path, ttl_s=drawn.settings.snapshot_ttl_s, now=self._world.wall_s)
        # The threads of what sessions bring along begin with the first such file: they are made here beforehand.
        with patch.object(disk_store, "FileThreads", files):
            engine = build_engine(
                drawn.settings_in(directory),
                self.runner,
                PagePool(self.runner.kv.groups.num_groups * drawn.num_pages, drawn.settings.page_size),
                max_context=drawn.max_context,
                new_codec=lambda _tools: IdsOnly(),
                eos_ids=drawn.limits.eos_ids,
                model_fingerprint=MODEL,
                snapshots=snapshots,
                new_background=partial(VirtualBackground, self.disk, self.wake),
                clock=self.clock,
            )
        storage = engine._tiers.storage
        threads: Any = files(engine._inbox.put)
        storage.incoming._started = threads
        return engine

    def clock(self) -> float:
        """The process's monotonic clock: within a step, as far as the step has come."""
        return self._world.now_s + self._ahead_s

    # ---- what others do with it ----------------------------------------------------------------------------------

    def execute(self, requests: list[InferenceRequest]) -> None:
        """Triton hands over what has come."""
        self._model.execute(requests)
        self._wake_sender()
        self.wake()

    def call(self, task: Callable[[Maintenance], Any]) -> Any:
        """What `Engine.call` does, for who does not run on a thread of his own: the world goes on meanwhile."""
        done: Future[Any] = Future()

        def do(maintenance: Maintenance) -> Any:
            result = task(maintenance)
            self.oracle.hear_task(task, result)
            return result

        self.engine._inbox.put(partial(self.engine._do, do, done))
        self.wake()
        while not done.done():
            if not self.is_alive:
                raise Unavailable("the process has died")
            self._world.run_until(self._world.now_s + 1e-3)
        return done.result()

    def freeze(self, for_s: float) -> None:
        """Nothing happens in it for a while."""
        self.is_frozen = True
        self._world.after(for_s, self._thaw)

    def die(self) -> None:
        """It is gone."""
        was_alive, self.is_alive = self.is_alive, False
        self.slots.stop()
        for event in (self._next_step, self._next_send):
            if event is not None:
                event.call_off()
        disk = self.engine._tiers.storage.disk
        if disk is not None and was_alive and not self.engine._is_stopping:
            os.close(disk._directory._lock)  # as a process does that ends

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has nothing to do before somebody comes, or the time has."""
        engine = self.engine
        return engine._can_wait and engine._inbox.is_empty and engine._in_flight is None

    def is_wanted(self, session_id: SessionId) -> bool:
        """Whether a sequence has a session here, or a turn that may make it one."""
        if self.engine._sessions.find(session_id) is not None:
            return True
        return any(turn.request.session_id == session_id for turn in self.responses._unanswered.values())

    def wake(self) -> None:
        """Something was posted to the engine."""
        self._step_at(self._world.now_s)

    # ---- the engine's loop ---------------------------------------------------------------------------------------

    def _step_at(self, time_s: float) -> None:
        if not self.is_alive or self.is_frozen:
            return
        time_s = max(time_s, self._busy_until_s)
        if self._next_step is not None and self._next_step.action is not None:
            if self._next_step.time_s <= time_s:
                return
            self._next_step.call_off()
        self._next_step = self._world.at(time_s, self._step)

    def _step(self) -> None:
        self._next_step = None
        self._ahead_s = _STEP_S
        self.engine.step()
        self._busy_until_s, self._ahead_s = self._world.now_s + self._ahead_s, 0.0
        self.is_touched = True
        self.num_steps += 1
        self._wake_sender(self._busy_until_s - self._world.now_s)
        if self.engine._is_stopping:
            return
        if not self.is_waiting:
            self._step_at(self._busy_until_s)
        elif (patience_s := self.engine._patience_s()) is not None:
            self._step_at(self._world.now_s + patience_s)

    def _spend(self, time_s: float) -> None:
        self._ahead_s += time_s

    def _thaw(self) -> None:
        self.is_frozen = False
        self.wake()
        self._wake_sender()

    # ---- the sending side ----------------------------------------------------------------------------------------

    def _wake_sender(self, delay_s: float = 0.0) -> None:
        if not self.is_alive or self.is_frozen:
            return
        time_s = self._world.now_s + delay_s + _SEND_S
        if self._next_send is not None and self._next_send.action is not None:
            if self._next_send.time_s <= time_s:
                return
            self._next_send.call_off()
        self._next_send = self._world.at(time_s, self._send)

    def _send(self) -> None:
        self._next_send = None
        if self.is_frozen:
            return
        self.responses.step()
        if self.responses._unanswered:
            self._wake_sender(_POLL_S)
        if not self.engine._inbox.is_empty:
            self.wake()
