"""Micro-turns out of an async iterator: one task pulls the source, turns begin on the beat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from microturn_client._beat import MAX_WAITING, Beat, Coalescer
from microturn_client._events import Event
from microturn_client._inputs import TurnInput


async def turns_on_the_beat(
    begin: Callable[[TurnInput], AsyncIterator[Event]], source: AsyncIterator[TurnInput], every_s: float
) -> AsyncIterator[Event | Beat]:
    """Takes a turn on each beat on which something has come, until the source ends.

    Args:
        begin: begins a turn.
        source: chunks of input.
        every_s: seconds between two beats.

    Raises:
        MicroturnError: as turns do.
        Exception: what the source raises, once what came before it is done.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[TurnInput] = asyncio.Queue(MAX_WAITING)
    pull = loop.create_task(_pull(source, arrived))
    waiting = Coalescer()
    beat_at = loop.time()
    try:
        while await _has_something(arrived, waiting, pull):
            await asyncio.sleep(max(0.0, beat_at - loop.time()))
            is_held_up = arrived.full()
            while not arrived.empty() and len(waiting) < MAX_WAITING:
                waiting.put(arrived.get_nowait())
            given, num_chunks = waiting.take()
            late_s = max(0.0, loop.time() - beat_at)
            yield Beat(num_chunks, is_held_up, late_s * 1e3)
            async for event in begin(given):
                yield event
            beat_at = max(beat_at + every_s, loop.time())
        await pull
    finally:
        pull.cancel()
        # Who leaves early has no use for what the source raised meanwhile.
        pull.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _pull(source: AsyncIterator[TurnInput], arrived: asyncio.Queue[TurnInput]) -> None:
    async for chunk in source:
        await arrived.put(chunk)


async def _has_something(arrived: asyncio.Queue[TurnInput], waiting: Coalescer, pull: asyncio.Task[None]) -> bool:
    """Waits for the next chunk; False when the source has ended and none is left."""
    if len(waiting) or not arrived.empty():
        return True
    get = asyncio.ensure_future(arrived.get())
    try:
        await asyncio.wait((get, pull), return_when=asyncio.FIRST_COMPLETED)
        if get.done():
            waiting.put(get.result())
            return True
    finally:
        get.cancel()
    return not arrived.empty()
