"""Micro-turns out of an async iterator: a task of its own pulls the source, turns begin on the beat."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from microturn_client._aio_source import AsyncSource
from microturn_client._aio_turn import AsyncTurn
from microturn_client._beat import Beat, Coalescer
from microturn_client._events import Event
from microturn_client._inputs import TurnInput

# A turn runs, and one more is on its way to the server; what comes meanwhile is the input of the next.
_MAX_BEGUN = 2


async def turns_on_the_beat(
    begin: Callable[[TurnInput], AsyncTurn], source: AsyncIterator[TurnInput], every_s: float
) -> AsyncIterator[Event | Beat]:
    """Begins a turn on each beat on which something has come, until the source ends, also while another one answers.

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
    turns: deque[AsyncTurn] = deque()
    beat_at = time.monotonic()
    try:
        while turns or len(waiting) or await pulled.wait(waiting):
            if not turns:
                await asyncio.sleep(max(0.0, beat_at - time.monotonic()))
            elif (event := await turns[0]._next(math.inf if len(turns) >= _MAX_BEGUN else beat_at)) is not None:
                yield event
                continue
            elif turns[0].is_over:
                turns.popleft()
                continue
            is_held_up = pulled.drain(waiting)
            late_s = max(0.0, time.monotonic() - beat_at)
            beat_at = max(beat_at + every_s, time.monotonic())
            if len(waiting):
                given, num_chunks = waiting.take()
                yield Beat(num_chunks, is_held_up, late_s * 1e3)
                turns.append(begin(given))
            elif pulled.has_ended:
                beat_at = math.inf
        await pulled.check()
    finally:
        pulled.leave()
        for turn in turns:
            turn.close()
