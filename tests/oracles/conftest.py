"""Fixtures of the oracles: what holds for the models holds with 8-bit weights too, against the 8-bit model."""

from __future__ import annotations

import os

import pytest
from transformers import PreTrainedModel

from microturn.model import runner
from support import models


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """All CPUs also beside pytest-xdist's other workers: what is shown here holds for kernels with several threads."""
    runner.set_num_threads(len(os.sched_getaffinity(0)))


@pytest.fixture(scope="session", params=["grouped_heads", "sliding_window", "llama", "biases", "own_fusion", "int8"])
def tiny_model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    """A tiny random model; the parameter is its shape, or `int8`."""
    model = getattr(models, request.param)()
    if device == "cpu":
        return model
    if request.param == "int8":
        pytest.skip("8-bit weights are for a CPU")
    return model.to(device)
