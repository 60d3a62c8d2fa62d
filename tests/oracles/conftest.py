"""Fixtures of the oracles: what holds for the models holds with 8-bit weights too, against the 8-bit model."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from support import models

ATTENDING = ["grouped_heads", "sliding_window", "llama", "biases", "own_fusion", "experts", "int8", "int8_experts"]


@pytest.fixture(scope="session", params=[*ATTENDING, "recurrent"])
def tiny_model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    """A tiny random model; the parameter is its shape, of 8-bit weights or not."""
    return _on_device(request.param, device)


@pytest.fixture(scope="session", params=ATTENDING)
def attending_model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    """The same without recurrent layers, which have no windows, no drafts and no steps ahead."""
    return _on_device(request.param, device)


def _on_device(name: str, device: str) -> PreTrainedModel:
    model: PreTrainedModel = getattr(models, name)()
    if device == "cpu":
        return model
    if name.startswith("int8"):
        pytest.skip("8-bit weights are for a CPU")
    return model.to(device)
