# Generated from _aio_beat.py by client/generate_sync.py: change that file, then run `make client-sync`.
"""Micro-turns out of an iterator: a thread of its own pulls the source, turns begin on the beat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from microturn_client._beat import Beat, Coalescer
from microturn_client._events import Event
from microturn_client._inputs import TurnInput
from microturn_client._sync_runtime import Source


def turns_on_the_beat(
    begin: Callable[[TurnInput], Iterator[Event]], source: Iterator[TurnInput], every_s: float
) -> Iterator[Event | Beat]:
    """Takes a turn on each beat on which something has come, until the source ends.

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
    beat_at = time.monotonic()
    try:
        while len(waiting) or pulled.wait(waiting):
            time.sleep(max(0.0, beat_at - time.monotonic()))
            is_held_up = pulled.drain(waiting)
            given, num_chunks = waiting.take()
            late_s = max(0.0, time.monotonic() - beat_at)
            yield Beat(num_chunks, is_held_up, late_s * 1e3)
            yield from begin(given)
            beat_at = max(beat_at + every_s, time.monotonic())
        pulled.check()
    finally:
        pulled.leave()
