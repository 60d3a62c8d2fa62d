"""A gateway before the real server, which has default settings here, as its users have.

What a gateway answers is compared with a session of the same server, never with plain transformers, and with 8-bit
weights an answer takes a third of the time that it takes in float32.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from load_tests.bench.tool_model import write_tool_model
from support.gateway import running_gateway
from support.share import model_server


@pytest.fixture(scope="session")
def token() -> str:
    return "a-token-for-these-tests"


@pytest.fixture(scope="session")
def server(smollm2_dir: str) -> Iterator[str]:
    """The gRPC address."""
    with model_server(smollm2_dir) as server:
        yield server.address


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


@pytest.fixture(scope="session")
def unguarded(server: str) -> Iterator[str]:
    """The address of a gateway without a token, whose callers are told apart by whatever they come with."""
    with running_gateway(server) as address:
        yield address


@pytest.fixture(scope="session")
def tool_gateway(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway whose model has a chat template with tools; it wants no token."""
    model_dir = write_tool_model(Path(smollm2_dir), tmp_path_factory.mktemp("with-tools"))
    with model_server(str(model_dir)) as server, running_gateway(server.address) as address:
        yield address


@pytest.fixture
async def tool_openai(tool_gateway: str) -> AsyncIterator[AsyncOpenAI]:
    """The unmodified SDK, before that gateway."""
    async with AsyncOpenAI(api_key="any", base_url=f"http://{tool_gateway}/v1", max_retries=0, timeout=60) as client:
        yield client
