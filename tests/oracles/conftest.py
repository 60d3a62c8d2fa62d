"""Fixtures of the oracles: what holds for the models holds with 8-bit weights too, against the 8-bit model."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from support import models


@pytest.fixture(scope="session", params=["grouped_heads", "sliding_window", "llama", "biases", "own_fusion", "int8"])
def tiny_model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    """A tiny random model; the parameter is its shape, or `int8`."""
    model = getattr(models, request.param)()
    if device == "cpu":
        return model
    if request.param == "int8":
        pytest.skip("8-bit weights are for a CPU")
    return model.to(device)
