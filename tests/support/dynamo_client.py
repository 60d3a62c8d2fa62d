"""A stand-in for Dynamo's runtime on the side that asks: workers are functions, and errors are plain ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, Self

# Answers a request, with the context that came with it.
Handler = Callable[[Any, Any], AsyncIterator[Any]]


class Context:
    """`dynamo.runtime.Context`, as far as edges need it."""

    def __init__(self) -> None:
        self.is_stopped = False

    def stop_generating(self) -> None:
        self.is_stopped = True


class Client:
    """An endpoint's, of workers by their instance id.

    Attributes:
        handlers: those that there are.
        asked: the requests, with their instance id.
        has_ended: set it, as when Dynamo's runtime ends.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
        self.asked: list[tuple[Any, int]] = []
        self.has_ended = asyncio.Event()

    def instance_ids(self) -> list[int]:
        return list(self.handlers)

    async def wait_for_instances(self) -> list[int]:
        """Of an endpoint that nobody serves."""
        await self.has_ended.wait()
        raise Exception("channel closed")

    async def direct(self, request: Any, instance_id: int, context: Any = None) -> AsyncIterator[Any]:
        await asyncio.sleep(0)
        self.asked.append((request, instance_id))
        if instance_id not in self.handlers:
            raise Exception(f"Unavailable: instance_id={instance_id} not found for endpoint")
        return _answers(self.handlers[instance_id](request, context))


class Runtime:
    """`DistributedRuntime`, with one client for each endpoint, by the last part of its path."""

    def __init__(self) -> None:
        self.clients = {"turn": Client(), "control": Client(), "nobody": Client()}

    def endpoint(self, path: str) -> Self | SimpleNamespace:
        async def client() -> Client:
            if path.count(".") != 2:
                raise ValueError(f"Invalid endpoint path '{path}'")
            return self.clients[path.rpartition(".")[2]]

        return SimpleNamespace(client=client)


async def _answers(answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for answer in answers:
        yield SimpleNamespace(data=lambda answer=answer: answer)
