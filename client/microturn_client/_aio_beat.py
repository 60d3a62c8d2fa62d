"""Micro-turns out of an async iterator: a task of its own pulls the source, turns begin on the beat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from microturn_client._aio_runtime import AsyncSource
from microturn_client._beat import Beat, Coalescer
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
    pulled = AsyncSource(source)
    waiting = Coalescer()
    beat_at = time.monotonic()
    try:
        while len(waiting) or await pulled.wait(waiting):
            await asyncio.sleep(max(0.0, beat_at - time.monotonic()))
            is_held_up = pulled.drain(waiting)
            given, num_chunks = waiting.take()
            late_s = max(0.0, time.monotonic() - beat_at)
            yield Beat(num_chunks, is_held_up, late_s * 1e3)
            async for event in begin(given):
                yield event
            beat_at = max(beat_at + every_s, time.monotonic())
        await pulled.check()
    finally:
        pulled.leave()
