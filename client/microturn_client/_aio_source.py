"""What a program says to a session on the beat, as a task pulls it; ``_sync_source`` has the same for threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from microturn_client._beat import MAX_WAITING, Coalescer
from microturn_client._inputs import TurnInput


class AsyncSource:
    """Chunks of input that a task pulls from an iterator; it waits while ``MAX_WAITING`` of them do."""

    def __init__(self, source: AsyncIterator[TurnInput]) -> None:
        self._arrived: asyncio.Queue[TurnInput] = asyncio.Queue(MAX_WAITING)
        self._pulling = asyncio.ensure_future(self._pull(source))

    @property
    def has_ended(self) -> bool:
        """Whether the source has ended, and none of its chunks is left here."""
        return self._pulling.done() and self._arrived.empty()

    async def wait(self, waiting: Coalescer) -> bool:
        """Waits for the next chunk, which may be put there; False when the source has ended and none is left."""
        if not self._arrived.empty():
            return True
        get = asyncio.ensure_future(self._arrived.get())
        try:
            await asyncio.wait((get, self._pulling), return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                waiting.put(get.result())
                return True
        finally:
            get.cancel()
        return not self._arrived.empty()

    def drain(self, waiting: Coalescer) -> bool:
        """Puts there what has come, as far as it may wait; says whether the source was held up."""
        is_held_up = self._arrived.full()
        while not self._arrived.empty() and len(waiting) < MAX_WAITING:
            waiting.put(self._arrived.get_nowait())
        return is_held_up

    async def check(self) -> None:
        """Raises what the source raised; call it when the source has ended."""
        await self._pulling

    def leave(self) -> None:
        """Pulls no more."""
        self._pulling.cancel()
        # What the source raised meanwhile is of no use to a program that leaves early.
        self._pulling.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _pull(self, source: AsyncIterator[TurnInput]) -> None:
        async for chunk in source:
            await self._arrived.put(chunk)
