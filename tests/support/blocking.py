"""The client for asyncio with the methods of the one for threads, so that the same tests run against both."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from microturn_client import AsyncClient, AsyncSession, Client


class Blocking:
    """Whatever of the client is awaited, awaited on a loop that runs in another thread.

    Args:
        thing: an ``AsyncClient``, or what came of one.
        loop: see above.
    """

    def __init__(self, thing: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._thing = thing
        self._loop = loop
        self._events: AsyncIterator[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._thing, name)
        if not callable(value):
            return value
        return lambda *args, **options: self._call(value, *args, **options)

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        async def call() -> Any:
            made = method(*map(_asynchronous, args), **options)
            return await made if inspect.isawaitable(made) else made

        result = asyncio.run_coroutine_threadsafe(call(), self._loop).result()
        is_ours = isinstance(result, AsyncClient | AsyncSession | AsyncIterator) or hasattr(result, "cancel")
        return Blocking(result, self._loop) if is_ours else result

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._events = self._events or aiter(self._thing)
        try:
            return self._call(self._events.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Any:
        self._call(self._thing.__aenter__)
        return self

    def __exit__(self, *error: Any) -> None:
        self._call(self._thing.__aexit__, *error)


def _asynchronous(given: Any) -> Any:
    """An iterator of a test's, as one for asyncio."""
    if not isinstance(given, Iterator):
        return given

    async def each(items: Iterable[Any]) -> AsyncIterator[Any]:
        for item in items:
            yield item
            await asyncio.sleep(0)

    return each(given)


@contextmanager
def blocking(new_client: Callable[[], AsyncClient]) -> Iterator[Client]:
    """An ``AsyncClient`` that looks like a ``Client``; it is closed with the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    client: Any = Blocking(new_client(), loop)
    try:
        with client:
            yield client
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
