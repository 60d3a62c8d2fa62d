"""Servers of a tiny model, as many as a test wants, whose logits are the same in any company; and the real Envoy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from microturn.serve.options import default_model_repository
from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.served import Served
from support.tiny_model_dir import write_tiny_model


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Starts a server; it is not yet ready."""
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    with ExitStack() as running:

        def begin(*arguments: str) -> Served:
            served = Served(
                tmp_path_factory.mktemp("run"),
                f"--model-repository={default_model_repository()}",
                f"--model={model}",
                *("--set", "weights=float32", "--set", "deterministic=true"),
                *("--set", "kv_tokens=16384", "--set", "max_context=8192"),
                *arguments,
            )
            return running.enter_context(closing(served))

        yield begin


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ours")


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> TokenIssuer:
    return TokenIssuer(tmp_path_factory.mktemp("issuer") / "tokens.key")


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory, authority: Authority, issuer: TokenIssuer) -> Iterator[Edge]:
    """Envoy, without servers yet."""
    directory: Path = tmp_path_factory.mktemp("edge")
    (directory / "secrets").mkdir()
    authority.issue("localhost", directory / "secrets")
    (directory / "secrets" / "jwks.json").write_text(issuer.jwks())
    with closing(Edge(directory)) as edge:
        yield edge
