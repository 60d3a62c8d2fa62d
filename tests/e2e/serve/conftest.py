"""``microturn serve`` as a process: with a model that is light enough to be killed often, and with the real one."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from microturn.serve.options import default_model_repository
from support.served import Served


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
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
    run_dir = tmp_path_factory.mktemp("run")
    arguments = (f"--model-repository={default_model_repository()}", f"--model={smollm2_dir}")
    served = Served(run_dir, *arguments, "--set", "weights=float32")
    with contextlib.closing(served):
        served.wait_until_ready(60)
        yield served
