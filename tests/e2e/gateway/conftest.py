"""A gateway before the real server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from support.gateway import running_gateway


@pytest.fixture(scope="session")
def token() -> str:
    return "a-token-for-these-tests"


@pytest.fixture(scope="session")
def gateway(server: str, token: str) -> Iterator[str]:
    """The address of a gateway that wants a token."""
    with running_gateway(server, token=token, allowed_origins=("https://app.example",)) as address:
        yield address


@pytest.fixture
async def openai(gateway: str, token: str) -> AsyncIterator[AsyncOpenAI]:
    """The unmodified SDK."""
    async with AsyncOpenAI(api_key=token, base_url=f"http://{gateway}/v1", max_retries=0, timeout=60) as client:
        yield client
