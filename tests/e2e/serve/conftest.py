"""``microturn serve`` as a process: with a model that is light enough to be killed often, and with the real one."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from support.served import Served, Start, servers_of


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Start]:
    """Starts ``microturn serve`` with free ports."""
    with contextlib.ExitStack() as running:

        def start(*arguments: str) -> Served:
            served = Served(tmp_path / f"run-{secrets.token_hex(4)}", *arguments)
            running.callback(served.close)
            return served

        yield start


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: str) -> Iterator[Served]:
    """The real model behind a supervisor, ready."""
    settings = {"weights": "float32", "kv_dtype": "float32"}
    with servers_of(smollm2_dir, partial(tmp_path_factory.mktemp, "run"), **settings) as start:
        served = start()
        served.wait_until_ready(60)
        yield served
