"""The real server with SmolLM2, started once as a user starts it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from microturn_client import Client
from support.raw import RawStream
from support.served import Start, servers_of
from support.share import IN_FLOAT32, model_server
from support.tiny_model_dir import write_tiny_model


@pytest.fixture(scope="session")
def admin_socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's."""
    return tmp_path_factory.mktemp("server") / "admin.sock"


@pytest.fixture(scope="session")
def server(smollm2_dir: str, admin_socket: Path) -> Iterator[str]:
    """The gRPC address of a server that answers as plain transformers do."""
    with model_server(smollm2_dir, *IN_FLOAT32, arguments=(f"--admin-socket={admin_socket}",)) as server:
        yield server.address


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
def num_talkers(full: bool) -> int:
    """Sessions that talk on a beat while servers go and come."""
    return 60 if full else 32


@pytest.fixture(scope="module")
def start_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers of a tiny model, whose logits are the same in any company; they end with the module."""
    settings = {"weights": "float32", "kv_dtype": "float32", "kv_tokens": 16384, "max_context": 8192}
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with servers_of(model, partial(tmp_path_factory.mktemp, "run"), **settings) as start:
        yield start


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(smollm2_dir)
