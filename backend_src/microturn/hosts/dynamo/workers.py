"""The workers that there are, and what each said of itself last.

Discovery tells which ones there are. Each is asked several times a second, one of many less often, how much is on it;
one that gives no answer for a while is lost, though its connections may stand: it is frozen, or its machine is gone.
Its streams end then. When it answers again, it is taken for a new one. Discovery may name it for minutes after its
death, until its lease ends.

All have one model, since a session may go to any of them: one of another model than those before it is not used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from microturn.admin.peer_address import Address, read_address
from microturn.errors import InvalidArgument, Unavailable
from microturn.hosts.dynamo.runtime import COMPONENT, CONTROL, NOBODY, TURN

log = logging.getLogger(__name__)

_ASK_EVERY_S = 0.25
# One without an answer is asked less and less often.
_ASK_LOST_EVERY_S = 2.0
# All of them together are asked so often at most: more would take more than 4 % of a core, here and at each of them.
_MAX_QUESTIONS_PER_S = 80
# A worker that misses more of its deadlines than this gets new sessions only where there is no other.
_TOO_LATE = 0.05
_SAID = {"name", "peer", "model", "is_leaving", "num_sessions", "max_sessions", "late_share", "free_bytes"}


@dataclass(eq=False)
class Worker:
    """One worker.

    Attributes:
        instance_id: Dynamo's, new at each start.
        name: its own, which clients know as a route.
        said: what it answered last, see `WorkerHost.load`.
        num_placed: sessions that were sent there since.
        lost: whether it gives no answers.
    """

    instance_id: int
    name: str
    said: Mapping[str, Any]
    num_placed: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def takes_sessions(self) -> bool:
        """Whether a new session may go there."""
        return not self.lost.is_set() and not self.said["is_leaving"]

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        """Where a new session goes first: to one that is not full, keeps its deadlines, is emptiest, has most room."""
        num_sessions, max_sessions = self.said["num_sessions"] + self.num_placed, self.said["max_sessions"]
        is_late = self.said["late_share"] > _TOO_LATE
        return num_sessions >= max_sessions, is_late, num_sessions / max_sessions, -self.said["free_bytes"]

    def lose(self, why: str) -> None:
        """It gives no answers."""
        if not self.lost.is_set():
            log.warning("worker %s is lost: %s", self.name, why)
            self.lost.set()


class Workers:
    """Watches the workers of a namespace, on an event loop.

    Attributes:
        namespace: Dynamo's.
        turns: Dynamo's client of their endpoint `turn`.

    Args:
        runtime: Dynamo's.
        namespace: Dynamo's.
        lost_after_s: how long a worker may leave a question unanswered.
    """

    def __init__(self, runtime: Any, namespace: str, lost_after_s: float) -> None:
        self._runtime = runtime
        self.namespace = namespace
        self._lost_after_s = lost_after_s
        self._found: dict[int, Worker] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._model: str | None = None
        self._strangers: set[int] = set()
        self._control: Any = None
        self.turns: Any = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> asyncio.Task[None]:
        """Begins to watch.

        Returns:
            The task that does it. It ends by itself only if it fails, or by Unavailable when Dynamo's runtime ends.

        Raises:
            InvalidArgument: Dynamo takes no such namespace, or cannot look for workers.
        """
        try:
            self._control, self.turns, nobody = [
                await self._runtime.endpoint(f"{self.namespace}.{COMPONENT}.{endpoint}").client()
                for endpoint in (CONTROL, TURN, NOBODY)
            ]
        except Exception as error:  # of no particular type
            raise InvalidArgument(f"Dynamo does not look for workers of '{self.namespace}': {error}") from error
        self._watching = asyncio.create_task(self._watch(nobody))
        return self._watching

    def close(self) -> None:
        """Watches no more."""
        for task in (self._watching, *self._asking.values()):
            if task is not None:
                task.cancel()

    def keep_to(self, model: str) -> None:
        """From now on only workers of this model are used, by its fingerprint.

        Raises:
            InvalidArgument: there are workers of another one.
        """
        for worker in self.all():
            if worker.said["model"] != model:
                raise InvalidArgument(
                    f"namespace '{self.namespace}' has another model: worker {worker.name} has the fingerprint "
                    f"{worker.said['model']}, this one {model}. Name a --namespace of its own"
                )
        self._model = model

    def lists(self, instance_id: int) -> bool:
        """Whether discovery knows a worker, whether it answers or not."""
        return instance_id in self._control.instance_ids()

    def all(self) -> list[Worker]:
        """Those that answer. Callable in any thread."""
        return [worker for worker in list(self._found.values()) if not worker.lost.is_set()]

    def named(self, name: str | None) -> Worker | None:
        """The worker of a name, if it answers; the latest of several, since a name is its again after a restart."""
        return next((worker for worker in reversed(self.all()) if worker.name == name), None)

    async def wait_for(self, name: str) -> None:
        """Until a worker answers under a name."""
        while self.named(name) is None:
            await asyncio.sleep(_ASK_EVERY_S / 5)

    def emptiest(self) -> Worker | None:
        """Where a new session goes; None where there is no worker that takes any."""
        return min((worker for worker in self.all() if worker.takes_sessions), key=lambda one: one.rank, default=None)

    def peer_addresses(self) -> Iterable[Address]:
        """Where those that answer take sessions from each other. Callable in any thread."""
        return [read_address(worker.said["peer"]) for worker in self.all()]

    async def ask(self, instance_id: int, op: str) -> Any:
        """Asks a worker's endpoint `control`; waits for as long as it takes.

        Raises:
            Exception: it could not be reached, of no particular type.
        """
        async for answer in await self._control.direct({"op": op}, instance_id):
            return answer.data()
        raise ConnectionError("the worker ended without an answer")

    async def _watch(self, nobody: Any) -> None:
        # Dynamo tells the end of its runtime to those that wait for workers.
        has_ended = asyncio.ensure_future(nobody.wait_for_instances())
        try:
            while not has_ended.done():
                self._follow()
                await asyncio.wait([has_ended], timeout=_ASK_EVERY_S)
            raise Unavailable("Dynamo's runtime has ended, since it has lost its discovery") from has_ended.exception()
        finally:
            has_ended.cancel()

    def _follow(self) -> None:
        """Begins to ask workers that have come, and loses those that have left."""
        ids = set(self._control.instance_ids())
        for instance_id in ids - self._asking.keys():
            self._asking[instance_id] = asyncio.create_task(self._ask_on(instance_id))
        for instance_id in self._asking.keys() - ids:
            self._asking.pop(instance_id).cancel()
            self._strangers.discard(instance_id)
            if instance_id in self._found:
                self._found.pop(instance_id).lose("it has left")

    async def _ask_on(self, instance_id: int) -> None:
        lost_every_s = _ASK_EVERY_S
        while True:
            asked_s = time.monotonic()
            try:
                said = await asyncio.wait_for(self.ask(instance_id, "load"), self._lost_after_s)
                self._note(instance_id, _checked(said))
                lost_every_s = _ASK_EVERY_S
            except Exception as error:
                why = (
                    f"no answer for {self._lost_after_s:g} s"
                    if isinstance(error, TimeoutError)
                    else str(error) or repr(error)
                )
                worker = self._found.get(instance_id)
                if worker is not None:
                    worker.lose(why)
                lost_every_s = min(2 * lost_every_s, _ASK_LOST_EVERY_S)
            every_s = max(lost_every_s, len(self._asking) / _MAX_QUESTIONS_PER_S)
            await asyncio.sleep(max(0.0, asked_s + every_s - time.monotonic()))

    def _note(self, instance_id: int, said: Mapping[str, Any]) -> None:
        worker = self._found.get(instance_id)
        if worker is None or worker.lost.is_set():  # also one that answers again: its streams have ended
            if self._is_stranger(instance_id, said):
                return
            log.info("found worker %s", said["name"])
            self._found.pop(instance_id, None)
            self._found[instance_id] = Worker(instance_id, said["name"], said)
        else:
            worker.said, worker.num_placed = said, 0

    def _is_stranger(self, instance_id: int, said: Mapping[str, Any]) -> bool:
        """Whether a worker has another model than those that answer. It is reported once."""
        model = self._model or next((worker.said["model"] for worker in self.all()), said["model"])
        if said["model"] == model:
            self._strangers.discard(instance_id)
            return False
        if instance_id not in self._strangers:
            self._strangers.add(instance_id)
            log.error(
                "worker %s is not used: it has another model than the others here (fingerprint %s, not %s). "
                "Name a --namespace of its own",
                said["name"],
                said["model"],
                model,
            )
        return True


def _checked(said: Any) -> Mapping[str, Any]:
    """An answer with all that is read of it.

    Raises:
        ValueError: it is of another version, or of something else in the namespace.
    """
    if not isinstance(said, Mapping) or not said.keys() >= _SAID:
        raise ValueError(f"it does not tell {', '.join(sorted(_SAID))}")
    read_address(said["peer"])
    return said
