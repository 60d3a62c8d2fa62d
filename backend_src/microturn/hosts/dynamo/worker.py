"""The worker: an engine without Triton, as two endpoints on Dynamo's runtime.

| endpoint | request | answer |
| --- | --- | --- |
| `turn` | `{"request": …, "tenant": …}`, a `ModelInferRequest` | `{"response": …}`, `ModelStreamInferResponse`s |
| `control` | `{"op": "load"}` | how much is here: `engine.moving.Load`, `name`, `peer`, `model`, `late_share` |
| | `{"op": "config"}` | a `ModelConfigResponse` |

Messages are serialized, as in the wire contract (client/PROTOCOL.md). The first response is empty: it says that the
turn has its place behind those before it; so is one for each second without another. Interrupts are turns. Sessions
move by the port where peers take them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import Any

from tritonclient.grpc import service_pb2

from microturn.engine.engine import Engine
from microturn.engine.moving import Load
from microturn.errors import InternalError, MicroturnError, Unavailable
from microturn.hosts.dynamo.runtime import COMPONENT, CONTROL, TURN
from microturn.hosts.dynamo.workers import Workers
from microturn.hosts.kserve.engine_front import EngineFront
from microturn.hosts.kserve.envelope import refusal_of

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
# The context misses a client that has gone before it got the first response; what cannot be sent to it ends its turn.
_BEAT_S = 1.0
# Deadlines are counted over so long.
_ATTAINMENT_S = 10.0
# Behind a pause of so long, discovery may have dropped this worker: with files its lease is 10 s.
_PAUSED_S = 3.0
# A worker that discovery does not name for so long is registered anew, and one that it does not take ends.
_UNLISTED_S, _FORGOTTEN_S = 1.0, 5.0
# How long a call of discovery may take.
_DISCOVERY_S = 1.0


class EngineSilentError(Exception):
    """The engine has stopped by itself, or gives no answer."""


class WorkerHost:
    """Serves an engine's turns to edges.

    Attributes:
        load: how much is here, as `control` tells it.

    Args:
        runtime: Dynamo's.
        workers: of the namespace, as discovery names them.
        name: of this worker.
        peer: ``host:port`` where it takes sessions from others.
        engine: runs in its own thread.
        front: the engine's.
        silent_after_s: how long the engine may leave a question unanswered.
    """

    def __init__(
        self,
        runtime: Any,
        workers: Workers,
        name: str,
        peer: str,
        engine: Engine,
        front: EngineFront,
        silent_after_s: float,
    ) -> None:
        self._endpoints = {
            endpoint: runtime.endpoint(f"{workers.namespace}.{COMPONENT}.{endpoint}") for endpoint in (TURN, CONTROL)
        }
        self._runtime = runtime
        self._workers = workers
        self._about = {"name": name, "peer": peer, "model": engine.environment.model_fingerprint}
        self._engine = engine
        self._front = front
        self._silent_after_s = silent_after_s
        self._attainment = _Attainment()
        self._is_leaving = False
        self.load: Mapping[str, Any] = {}

    async def serve(self) -> None:
        """Until it is cancelled.

        Raises:
            EngineSilentError: the engine cannot be served any more.
            Unavailable: Dynamo serves an endpoint no more, for example because it has lost its discovery.
        """
        await self._look()
        serving = [
            self._look_on(),
            self._stay_registered(),
            self._serve_endpoint(TURN, self._turn),
            self._serve_endpoint(CONTROL, self._control),
        ]
        await asyncio.gather(*serving)

    def expose(self, metrics: Callable[[], str]) -> None:
        """Adds metrics, in Prometheus' text, to those of Dynamo's HTTP server."""
        self._endpoints[TURN].metrics.register_prometheus_expfmt_callback(metrics)

    def leave(self) -> None:
        """Has edges send no more new sessions here."""
        self._is_leaving, self._front.is_ready = True, False
        self.load = {**self.load, "is_leaving": True}

    async def unregister(self) -> None:
        """Has edges forget this worker. The runtime's own shutdown does that too, and logs that it has failed."""
        try:
            for endpoint in self._endpoints.values():
                await asyncio.wait_for(endpoint.unregister_endpoint_instance(), _DISCOVERY_S)
        except Exception as error:  # of no particular type; edges notice by themselves, and its lease ends
            log.warning("discovery is not told that this worker leaves: %s", str(error) or repr(error))
            self._runtime.shutdown()  # it would go on taking questions for an event loop that is closed

    async def _serve_endpoint(self, endpoint: str, answer: Callable[..., AsyncIterator[Any]]) -> None:
        await self._endpoints[endpoint].serve_endpoint(answer)
        if not self._is_leaving:
            raise Unavailable(f"Dynamo serves the endpoint '{endpoint}' no more")

    async def _turn(self, said: Mapping[str, Any], context: Any) -> AsyncIterator[dict[str, bytes]]:
        message = service_pb2.ModelInferRequest.FromString(said["request"])
        try:
            turns = await self._front.open(None, said["tenant"])
            responses = await turns.begin(said["request"], message)
        except Exception as error:
            if not isinstance(error, MicroturnError):
                log.exception("a request could not be read")
                error = InternalError(f"the request could not be read: {error}")
            yield {"response": b""}
            yield {"response": refusal_of(message.id, error)}
            return
        # A client that has gone is seen by the context; the loop below may be waiting for the engine.
        gone = asyncio.ensure_future(context.async_killed_or_stopped())

        def leave(done: asyncio.Future[bool]) -> None:
            if not done.cancelled():
                responses.leave()

        gone.add_done_callback(leave)
        try:
            yield {"response": b""}
            while True:
                try:
                    async with asyncio.timeout(_BEAT_S):
                        response = await anext(responses)
                except TimeoutError:
                    response = b""
                except StopAsyncIteration:
                    return
                yield {"response": response}
        finally:
            gone.cancel()
            await responses.aclose()

    async def _control(self, said: Mapping[str, Any], context: Any) -> AsyncIterator[Any]:
        yield self.load if said.get("op") == "load" else await self._front.model_config()

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        """Asks the engine how much is on it."""
        try:
            try:
                load = await self._ask_engine()
            except TimeoutError:  # also where this process has just gone on after a pause: both may answer now
                load = await self._ask_engine()
        except (TimeoutError, MicroturnError) as error:
            if self._is_leaving:
                return
            why = f"has stopped: {error}" if str(error) else f"gives no answer for {self._silent_after_s:g} s"
            raise EngineSilentError(f"the engine {why}") from error
        late_share = self._attainment.late_share(load)
        self.load = {**asdict(load), **self._about, "late_share": late_share}
        if self._is_leaving:
            self.leave()

    async def _ask_engine(self) -> Load:
        asking = asyncio.to_thread(self._engine.call, lambda sessions: sessions.load)
        return await asyncio.wait_for(asking, self._silent_after_s / 2)

    async def _stay_registered(self) -> None:
        """Registers anew behind a pause, in which the lease has ended, and where discovery has lost what it knew.

        Raises:
            Unavailable: it does not help. With etcd, whose lease is gone, only a new process can.
        """
        instance_id = self._endpoints[CONTROL].connection_id()
        while not self._workers.lists(instance_id):  # not yet
            await asyncio.sleep(_LOOK_EVERY_S)
        now_s = listed_s = time.monotonic()
        while True:
            begun_s = now_s
            await asyncio.sleep(_LOOK_EVERY_S)
            now_s = time.monotonic()
            has_paused = now_s - begun_s > _PAUSED_S
            if has_paused:
                log.warning("this process did not run for %.0f s", now_s - begun_s)
            if has_paused or self._is_leaving or self._workers.lists(instance_id):
                listed_s = now_s
            if now_s - listed_s > _FORGOTTEN_S:
                raise Unavailable("discovery has forgotten this worker, and does not take it again")
            if not self._is_leaving and (has_paused or now_s - listed_s > _UNLISTED_S):
                await self._register()

    async def _register(self) -> None:
        log.warning("registering this worker anew")
        try:
            for endpoint in self._endpoints.values():
                await asyncio.wait_for(endpoint.register_endpoint_instance(), _DISCOVERY_S)
        except Exception as error:  # of no particular type
            log.warning("discovery does not take this worker: %s", str(error) or repr(error))
        await asyncio.sleep(_UNLISTED_S)


class _Attainment:
    """The share of deadlines that were missed of late."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int, int]] = deque()

    def late_share(self, load: Load) -> float:
        """Of the deadlines within the last seconds; 0 where there were none."""
        now_s = time.monotonic()
        self._counts.append((now_s, load.deadlines_met, load.deadlines_missed))
        while self._counts[0][0] < now_s - _ATTAINMENT_S:
            self._counts.popleft()
        _, met, missed = self._counts[0]
        met, missed = load.deadlines_met - met, load.deadlines_missed - missed
        return missed / (met + missed) if missed else 0.0
