"""Fixtures that several folders share: the models, loaded once."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import torch

# Kernels for GPUs are interpreted on a CPU. OpenAI's Triton reads this when it is imported, which transformers does.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from microturn.model.lean_imports import import_transformers

import_transformers()  # as a server does

import pytest
from hypothesis import settings
from transformers import PreTrainedModel

from microturn.model import runner
from microturn.zoo.store import resolve_model
from support import models, share

# Random runs and what they are of: how many there are by default, and with --full.
RANDOM_RUNS = {
    "engine_runs": (100, 500, "random runs of the engine in test_engine_random.py"),
    "histories": (2, 125, "random histories of each model in test_recurrent.py"),
    "loads": (2, 12, "random loads of the server in test_pressure_loads.py"),
    "seeds": (300, 300, "seeds of the simulator in test_simulation.py"),
}

# Files that take a minute and more, on a Zen 4.
LONGEST = (
    "cpu/test_other_cpus.py",
    "gpu/test_sampling.py",
    "parallel/test_followers.py",
    "simulation/test_simulation.py",
    "oracles/test_grammars.py",
    "oracles/test_incremental.py",
    "oracles/test_planted_mistakes.py",
    "oracles/test_rewind.py",
    "oracles/test_snapshots.py",
    "oracles/test_speculation.py",
    "oracles/test_tiers.py",
    "deploy/test_replicas.py",
    "deploy/test_dead_node.py",
    "dynamo/test_workers.py",
    "dynamo/test_etcd.py",
    "e2e/test_disconnect.py",
    "e2e/test_load.py",
    "frameworks/test_frameworks.py",
    "serve/test_client_survival.py",
    "serve/test_snapshots.py",
    "serve/test_stop.py",
    "serve/test_tensor_parallel.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="as much of everything random or long as `make test-all` has")
    for name, (few, many, what) in RANDOM_RUNS.items():
        help_text = f"{what} ({few}; with --full {many})"
        parser.addoption(f"--{name.replace('_', '-')}", type=int, default=None, help=help_text)
    parser.addoption("--device", default="cpu", help="where the models of the oracles compute: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    for name, (few, many, _) in RANDOM_RUNS.items():
        if getattr(config.option, name) is None:
            setattr(config.option, name, many if config.option.full else few)
    # What is drawn is the same in every run, so that a change is refused for what it does; --full looks further.
    settings.register_profile("same", derandomize=not config.option.full)
    settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest begin first: no worker has one left where the others have done."""
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))


def pytest_collection_finish() -> None:
    """Nothing of what is there now will be garbage: tests that look for some need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether long tests shall be as long as they can."""
    return request.config.getoption("--full")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """All CPUs, or this process's share of them beside pytest-xdist's other workers."""
    runner.set_num_threads(share.num_threads())


@pytest.fixture(autouse=True)
def _draws(full: bool) -> None:
    """What torch draws is the same in every run, as what Hypothesis does."""
    if not full:
        torch.manual_seed(0)


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
    return models.loaded(smollm2_dir, device)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What takes real weights takes all that are to be had."""
    if "real_model_dir" in metafunc.fixturenames:
        metafunc.parametrize("real_model_dir", models.real_names(metafunc.config), indirect=True, scope="session")


@pytest.fixture(scope="session")
def real_model_dir(request: pytest.FixtureRequest) -> str:
    return str(resolve_model(request.param))


@pytest.fixture(scope="session")
def real_model(real_model_dir: str, device: str) -> PreTrainedModel:
    return models.loaded(real_model_dir, device)


@pytest.fixture(scope="session", params=["grouped_heads", "sliding_window", "llama", "biases", "layer_norms"])
def tiny_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A tiny random model; the parameter is its shape."""
    return getattr(models, request.param)()
