"""Opens sessions on the Microturn server for the gateway, each with a key of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microturn_client import (
    AsyncClient,
    AsyncSession,
    AsyncTurn,
    ConnectionLost,
    Expired,
    MicroturnError,
    ModelChanged,
    ModelInfo,
    NotFound,
    Resumed,
    SessionClosed,
    Tokens,
    ToolEvent,
    TurnEnd,
    TurnTimeout,
    Unavailable,
)
from microturn_gateway.conversation import new_id
from microturn_gateway.failures import from_client, no_such_model

# A gateway that dies leaves its sessions to their idle time; while it lives, the client library keeps them alive.
_IDLE_TIMEOUT_S = 60.0

# Seconds for a turn, a long answer on a busy server included, after which the session is given up.
TURN_TIMEOUT_S = 600.0

# After these the session's context is unknown, or the session is gone.
LOST = (NotFound, Expired, ModelChanged, SessionClosed, TurnTimeout, Unavailable)


@dataclass(frozen=True)
class Model:
    """What the server has.

    Attributes:
        name: as a client calls it.
        names: all that clients may call it, the server's own first.
        max_context: longest context in tokens; None where the server does not say.
    """

    name: str
    names: tuple[str, ...]
    max_context: int | None

    def as_json(self) -> dict[str, Any]:
        """The model in the shape of OpenAI's API; `max_context` is ours."""
        about = {"id": self.name, "object": "model", "created": 0, "owned_by": "microturn"}
        return {**about, "max_context": self.max_context}


class Sessions:
    """Where sessions come from.

    Args:
        client: of the server.
        aliases: what clients may call the model besides what the server calls it.
    """

    def __init__(self, client: AsyncClient, aliases: Sequence[str] = ()) -> None:
        self._client = client
        self._aliases = aliases

    async def are_possible(self) -> bool:
        """Whether the server is there and its model takes turns."""
        try:
            return await self._client.ready()
        except MicroturnError:
            return False

    async def model(self, asked_for: str | None = None) -> Model:
        """The server's model, under the name that it was asked for.

        Args:
            asked_for: a client's idea of its name.

        Raises:
            Refusal: the server is not there, or has another one.
        """
        models = await self.models()
        if not asked_for:
            return models[0]
        for model in models:
            if model.name == asked_for:
                return model
        raise no_such_model(asked_for, models[0].names)

    async def models(self) -> list[Model]:
        """The server's model under each of its names, the server's own first.

        Raises:
            Refusal: the server is not there.
        """
        try:
            info = await self._model_info()
        except MicroturnError as error:
            raise from_client(error) from error
        names = tuple(dict.fromkeys((info.model_name or "streaming_llm", *self._aliases)))
        return [Model(name, names, info.limits.max_context) for name in names]

    async def _model_info(self) -> ModelInfo:
        """Asks once more where the connection broke meanwhile: to ask changes nothing."""
        try:
            return await self._client.model_info()
        except ConnectionLost:
            return await self._client.model_info()

    def open(
        self, session_id: str | None = None, tools: Sequence[Mapping[str, Any]] = (), window: Mapping[str, Any] = {}
    ) -> AsyncSession:
        """A new session, with tools for the model; the server hears of it with its first turn."""
        return self._client.session(
            session_id=session_id or new_id("sess"),
            timeout_s=TURN_TIMEOUT_S,
            idle_timeout_s=_IDLE_TIMEOUT_S,
            session_key=secrets.token_urlsafe(24),
            tools=tools,
            **window,
        )


async def events_of(turn: AsyncTurn) -> AsyncIterator[Tokens | ToolEvent | TurnEnd]:
    """The events of a turn, without `Resumed`, as long as the session is still the same.

    Raises:
        MicroturnError: as iterating over the turn does; `ConnectionLost` also where the session is not the same.
    """
    async for event in turn:
        if not isinstance(event, Resumed):
            yield event
        elif not event.same_tokens:
            raise ConnectionLost(event.reason)
