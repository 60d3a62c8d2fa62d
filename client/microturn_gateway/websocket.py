"""One WebSocket as one session: three tasks around the protocol's state machine.

reader   client's events ─► protocol          worker   protocol's steps ─► turns of the session
writer   protocol's events ─► client          whichever ends first ends them all, and the session
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from starlette.websockets import WebSocket, WebSocketDisconnect

from microturn_client import AsyncSession, AsyncTurn, MicroturnError, TurnEnd
from microturn_gateway.context import HeldContext
from microturn_gateway.failures import Refusal, from_client
from microturn_gateway.measured import measure_event
from microturn_gateway.metrics import Metrics
from microturn_gateway.outbox import Outbox
from microturn_gateway.realtime import Realtime, Step
from microturn_gateway.sessions import LOST, events_of
from microturn_gateway.settings import GatewaySettings
from microturn_gateway.sockets import CLOSE_IDLE, CLOSE_LOST, CLOSE_REFUSED, Ending

_LAST_WORDS_S = 1.0


class RealtimeSocket:
    """Serves one accepted WebSocket.

    Args:
        websocket: accepted.
        realtime: the protocol, new.
        open_session: one on the server, with the tools of the protocol's context.
        settings: the gateway's.
        metrics: that count what it is told.
    """

    def __init__(
        self,
        websocket: WebSocket,
        realtime: Realtime,
        open_session: Callable[[], AsyncSession],
        settings: GatewaySettings,
        metrics: Metrics,
    ) -> None:
        self._websocket = websocket
        self._realtime = realtime
        self._open_session = open_session
        self._session: AsyncSession | None = None
        self._context: HeldContext | None = None
        self._settings = settings
        self._metrics = metrics
        self._outbox = Outbox()
        self._has_events = asyncio.Event()
        self._has_work = asyncio.Event()
        self._has_room = asyncio.Event()
        self._interrupting: AsyncTurn | None = None

    async def serve(self) -> None:
        """Returns when the client has left or had to, and the session has ended."""
        self._flush()
        tasks = [asyncio.create_task(work) for work in self._works()]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ending = next((error for task in done if isinstance(error := task.exception(), Ending)), None)
            errors = [error for task in done if (error := task.exception()) is not None]
        finally:
            if self._realtime.is_answering:
                self._interrupt()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._session is not None:
                await self._session.close()
        if ending is not None:
            await self._say_goodbye(ending)
        elif errors:
            raise errors[0]

    def _works(self) -> tuple[Coroutine[None, None, None], ...]:
        return self._read(), self._work(), self._write()

    async def _read(self) -> None:
        while True:
            while self._outbox.is_full or self._realtime.is_full:
                self._has_room.clear()
                await self._has_room.wait()
            try:
                async with asyncio.timeout(self._settings.idle_timeout_s):
                    message = await self._websocket.receive()
            except TimeoutError:
                refusal = Refusal("session_idle", f"nothing came for {self._settings.idle_timeout_s:g} s")
                raise Ending(CLOSE_IDLE, refusal) from None
            if message["type"] == "websocket.disconnect":
                return
            self._realtime.receive(message.get("text") or message.get("bytes") or "")
            self._has_work.set()
            self._flush()

    def _interrupt(self) -> None:
        if self._session is None:
            return
        with contextlib.suppress(MicroturnError):  # what befell the session the worker hears too
            self._interrupting = self._session.turn(None, max_tokens=0, on_overlap="interrupt")

    async def _work(self) -> None:
        now_s = asyncio.get_running_loop().time
        while True:
            self._has_work.clear()
            step = self._realtime.next_step(now_s())
            self._has_room.set()  # of the jobs that waited it has taken some
            self._flush()
            if step is not None:
                await self._run(step)
                continue
            wake_at = self._realtime.wake_at
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(wake_at):
                    await self._has_work.wait()

    async def _run(self, step: Step) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            session = await self._session_now()
            content = None if step.message is None else step.message.content
            async for event in events_of(session.turn(content, **step.options)):
                elapsed_ms = (loop.time() - begun_s) * 1e3
                if isinstance(event, TurnEnd):
                    self._realtime.ended(event.status, elapsed_ms)
                else:
                    self._realtime.tokens(event, elapsed_ms)
                self._flush()
        except MicroturnError as error:
            self._realtime.failed(from_client(error))
            self._flush()
            if isinstance(error, LOST):
                lost = Refusal("session_lost", "the session is gone from its server: connect again", http_status=500)
                raise Ending(CLOSE_LOST, lost) from error

    async def _session_now(self) -> AsyncSession:
        """The session of the protocol's context, a new one where the context has begun anew."""
        if self._session is None or self._context is not self._realtime.talk.context:
            if self._session is not None:
                await self._session.close()
            self._session, self._context = self._open_session(), self._realtime.talk.context
        return self._session

    def _flush(self) -> None:
        if self._realtime.take_interrupt():
            self._interrupt()
        for event in self._realtime.take_events():
            measure_event(self._metrics, event)
            self._outbox.put(event)
        self._has_events.set()

    async def _write(self) -> None:
        while True:
            await self._has_events.wait()
            self._has_events.clear()
            while (text := self._outbox.take()) is not None:
                try:
                    async with asyncio.timeout(self._settings.send_timeout_s):
                        await self._websocket.send_text(text)
                except TimeoutError:
                    raise Ending(CLOSE_REFUSED, Refusal("slow_reader", "events are not read")) from None
                except WebSocketDisconnect:
                    return
                self._has_room.set()

    async def _say_goodbye(self, ending: Ending) -> None:
        self._realtime.complain(ending.refusal)
        self._flush()
        with contextlib.suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(_LAST_WORDS_S):
                while ending.close_code != CLOSE_REFUSED and (text := self._outbox.take()) is not None:
                    await self._websocket.send_text(text)
                await self._websocket.close(ending.close_code, ending.refusal.code)
