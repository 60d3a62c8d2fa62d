# Generated from _aio_beat.py by client/generate_sync.py: change that file, then run `make client-sync`.
"""Micro-turns out of an iterator: a thread of its own pulls the source, turns begin on the beat."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from microturn_client._beat import Beat, Coalescer
from microturn_client._events import Event
from microturn_client._inputs import TurnInput
from microturn_client._sync_source import Source
from microturn_client._sync_turn import Turn

# A turn runs, and one more is on its way to the server; what comes meanwhile is the input of the next.
_MAX_BEGUN = 2


def turns_on_the_beat(
    begin: Callable[[TurnInput], Turn], source: Iterator[TurnInput], every_s: float
) -> Iterator[Event | Beat]:
    """Begins a turn on each beat on which something has come, until the source ends, also while another one answers.

    Args:
        begin: begins a turn.
        source: chunks of input.
        every_s: seconds between two beats.

    Raises:
        MicroturnError: as turns do.
        Exception: what the source raises, once what came before it is done.
    """
    pulled = Source(source)
    waiting = Coalescer()
    turns: deque[Turn] = deque()
    beat_at = time.monotonic()
    try:
        while turns or len(waiting) or pulled.wait(waiting):
            if not turns:
                time.sleep(max(0.0, beat_at - time.monotonic()))
            elif (event := turns[0]._next(math.inf if len(turns) >= _MAX_BEGUN else beat_at)) is not None:
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
        pulled.check()
    finally:
        pulled.leave()
        for turn in turns:
            turn.close()
