"""The edge: takes clients' streams, and sends the turns of each to one worker. It has no state of its own.

    stream ──▶ the worker that the route names, else the emptiest one ──▶ each turn a request to its endpoint `turn`

A stream stays with its worker and ends with it; its client then comes back by START with `resume`, to this edge or
another one. A worker that has handed a session over says so with the route to the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Self

from microturn.errors import InternalError, InvalidArgument
from microturn.hosts.dynamo.workers import Worker, Workers
from microturn.hosts.kserve.service import StreamBrokenError

log = logging.getLogger(__name__)


class EdgeFront:
    """The workers as a `Front`.

    Args:
        workers: those that there are.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    @property
    def is_ready(self) -> bool:
        return self._workers.emptiest() is not None

    async def open(self, route: str | None, tenant: str | None) -> WorkerTurns:
        worker = self._workers.named(route)
        if worker is None:
            worker = self._workers.emptiest()
            if worker is None:
                raise StreamBrokenError("no worker takes sessions now")
            worker.num_placed += 1
        return WorkerTurns(self._workers, worker, tenant)

    async def model_config(self) -> bytes:
        for worker in self._workers.all():
            try:
                return bytes(await asyncio.wait_for(self._workers.ask(worker.instance_id, "config"), 1.0))
            except Exception as error:  # of no particular type; the next one may tell
                log.info("worker %s does not tell its config: %s", worker.name, error)
        raise StreamBrokenError("no worker answers now")


class WorkerTurns:
    """The turns of one stream, all of them on one worker."""

    def __init__(self, workers: Workers, worker: Worker, tenant: str | None) -> None:
        self.route: str | None = worker.name
        self._workers = workers
        self._worker = worker
        self._tenant = tenant

    async def begin(self, request: bytes, message: Any) -> WorkerResponses:
        from dynamo.runtime import Context

        said, context = {"request": request, "tenant": self._tenant}, Context()
        try:
            with _told(self._worker):
                answers = await self._workers.turns.direct(said, self._worker.instance_id, context=context)
            responses = WorkerResponses(self._worker, answers, context)
            await responses.placed()
        except BaseException:
            context.stop_generating()
            raise
        return responses

    async def watch(self) -> None:
        await self._worker.lost.wait()
        raise StreamBrokenError(f"worker {self._worker.name} is lost")


class WorkerResponses:
    """The responses to one turn, as they come from its worker."""

    def __init__(self, worker: Worker, answers: AsyncIterator[Any], context: Any) -> None:
        self._worker = worker
        self._answers = answers
        self._context = context
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def placed(self) -> None:
        """Waits for the worker's word that the turn has its place.

        Raises:
            StreamBrokenError: it gives none.
        """
        try:
            await self._next()
        except StopAsyncIteration:
            self._worker.lose("it ended a turn without an answer")
            raise StreamBrokenError(f"worker {self._worker.name} is lost") from None

    async def __anext__(self) -> bytes:
        while not (response := await self._next()):  # it is looking whether this edge is still there
            pass
        return response

    async def _next(self) -> bytes:
        with _told(self._worker):
            try:
                answer = await anext(self._answers)
            except StopAsyncIteration:
                self._has_ended = True
                raise
        return bytes(answer.data()["response"])

    async def aclose(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._context.stop_generating()


@contextmanager
def _told(worker: Worker) -> Iterator[None]:
    """What Dynamo raises, of no particular type, as an error of ours."""
    try:
        yield
    except StopAsyncIteration:
        raise
    except Exception as error:
        if str(error).startswith("InvalidRequest"):
            raise InvalidArgument(f"the turn cannot be sent to a worker: {error}") from error
        if str(error).startswith("Internal:"):  # what a worker raised in this turn; its others go on
            log.error("worker %s failed in a turn: %s", worker.name, error)
            raise InternalError(f"worker {worker.name} failed in this turn") from error
        worker.lose(str(error))
        raise StreamBrokenError(f"worker {worker.name} is lost: {error}") from error
