"""The real server with SmolLM2, started once as a user starts it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from load_tests.bench.server import running_server
from microturn_client import Client
from support.raw import RawStream


@pytest.fixture(scope="session")
def server(smollm2_dir: str) -> Iterator[str]:
    """The gRPC address of a server that answers as plain transformers do."""
    with running_server(smollm2_dir, "weights=float32") as address:
        yield address


@pytest.fixture
def client(server: str) -> Iterator[Client]:
    with Client(server) as client:
        yield client


@pytest.fixture
def raw(server: str) -> Iterator[RawStream]:
    """A bare gRPC stream, for what the client library would not send."""
    with RawStream(server) as stream:
        yield stream


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(smollm2_dir)
