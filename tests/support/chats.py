"""Chats of the unmodified OpenAI SDK through a gateway, in one process with a fake server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI

from microturn_client.testing import FakeServer
from microturn_gateway import app
from microturn_gateway.settings import GatewaySettings

SYSTEM = {"role": "system", "content": "You know all about gardens."}

Messages = list[dict[str, str]]


@asynccontextmanager
async def gateway_before(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[AsyncOpenAI]:
    monkeypatch.setattr(app, "AsyncClient", lambda _address: server.async_client())
    gateway = app.build_app(GatewaySettings(**settings))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway))
    async with (
        gateway.router.lifespan_context(gateway),
        AsyncOpenAI(api_key="one", base_url="http://localhost/v1", max_retries=0, http_client=http) as client,
    ):
        yield client


def question(text: str) -> Messages:
    return [SYSTEM, {"role": "user", "content": text}]


def answered(messages: Messages, completion: Any, then: str) -> Messages:
    said = {"role": "assistant", "content": completion.choices[0].message.content}
    return [*messages, said, {"role": "user", "content": then}]


async def ask(openai: AsyncOpenAI, messages: Any, **options: Any) -> Any:
    return await openai.chat.completions.create(
        model=await named(openai), messages=messages, **{"max_tokens": 6, **options}
    )


async def named(openai: AsyncOpenAI) -> str:
    return (await openai.models.list()).data[0].id


def cached(completion: Any) -> int:
    return int(completion.usage.prompt_tokens_details.cached_tokens)
