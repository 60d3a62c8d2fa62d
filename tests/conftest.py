"""Fixtures that several folders share: the models, loaded once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from microturn import runner
from microturn.model_store import resolve_model
from support import models


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine-runs", type=int, default=500, help="random runs of the engine in test_engine_random.py")
    parser.addoption("--loads", type=int, default=12, help="random loads of the server in test_pressure_loads.py")
    parser.addoption("--seeds", type=int, default=300, help="seeds of the simulator in test_simulation.py")
    parser.addoption("--device", default="cpu", help="where the models of the oracles compute: cpu or cuda")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    runner.set_num_threads(len(os.sched_getaffinity(0)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny models: several threads gain them nothing, and wait for each other where the machine is busy."""
    num_threads = torch.get_num_threads()
    runner.set_num_threads(1)
    yield
    runner.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def smollm2_dir() -> str:
    return str(resolve_model("smollm2-135m"))


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: str, device: str) -> PreTrainedModel:
    return runner.load_model(smollm2_dir, device=device)


@pytest.fixture(scope="session", params=["grouped_heads", "sliding_window", "llama", "biases", "own_fusion"])
def tiny_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny random model; the parameter is its shape."""
    return getattr(models, request.param)()
