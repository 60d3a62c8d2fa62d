"""A way to a server that a test can cut: a plain forwarder of bytes, on an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CuttableWay:
    """Forwards connections to a server.

    Attributes:
        address: where to connect instead.
    """

    def __init__(self, server: str, loop: asyncio.AbstractEventLoop) -> None:
        self._host, _, port = server.rpartition(":")
        self._port = int(port)
        self._loop = loop
        self._ends: list[asyncio.StreamWriter] = []
        self._copies: set[asyncio.Task[None]] = set()
        opening = asyncio.start_server(self._forward, "127.0.0.1", 0)
        self._listener = asyncio.run_coroutine_threadsafe(opening, loop).result()
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def cut(self, *, for_good: bool = False) -> None:
        """Breaks what is connected; whoever comes back gets through, unless it is for good."""
        asyncio.run_coroutine_threadsafe(self._cut(for_good), self._loop).result()

    async def _cut(self, for_good: bool) -> None:
        if for_good:
            self._listener.close()
        for end in self._ends:
            end.transport.abort()
        self._ends.clear()
        await asyncio.gather(*self._copies)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._ends += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            copying = self._loop.create_task(_copy(source, target))
            self._copies.add(copying)
            copying.add_done_callback(self._copies.discard)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65_536):
            target.write(data)
            await target.drain()
    except OSError:
        pass  # that it breaks is what it is for
    finally:
        target.close()


@contextmanager
def cuttable_way(server: str) -> Iterator[CuttableWay]:
    """A way to a server until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        way = CuttableWay(server, loop)
        try:
            yield way
        finally:
            way.cut(for_good=True)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
