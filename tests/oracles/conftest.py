"""Fixtures of the oracles: what holds for the models holds with 8-bit weights too, against the 8-bit model.

`make test-oracles` runs most of them in processes with few threads: the steps of tiny models are too short for several,
and on a busy machine, where a thread waits for another one that has no processor, take many times as long. What shall
hold for several threads too is marked with `all_processors` and runs alone: batch invariance to the bit, passes of many
tokens, and some sessions with real weights.
"""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from support import models

ATTENDING = ["grouped_heads", "sliding_window", "llama", "biases", "layer_norms", "int8"]


# Not 8-bit weights with experts: the last bit of a float decides on the integer that an input becomes, that now and
# then on an expert, and this on logits by more than a tolerance. To the bit they are in `test_batch_invariance`.
@pytest.fixture(scope="session", params=[*ATTENDING, "experts", "recurrent"])
def tiny_model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    """A tiny random model; the parameter is its shape, of 8-bit weights or not."""
    return _on_device(request.param, device)


@pytest.fixture(scope="session", params=ATTENDING)
def attending_model(request: pytest.FixtureRequest, device: str) -> PreTrainedModel:
    """The same without recurrent layers, which have no windows, no drafts and no steps ahead, and without experts."""
    return _on_device(request.param, device)


def _on_device(name: str, device: str) -> PreTrainedModel:
    model: PreTrainedModel = getattr(models, name)()
    if device == "cpu":
        return model
    if name == "int8":
        pytest.skip("8-bit weights are for a CPU")
    return model.to(device)
