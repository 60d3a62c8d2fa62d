"""The reference of all checks is the model as transformers loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from microturn.model import runner, tracing
from microturn.model.rotary import Rotary
from microturn.model.stock import stock_logits, untouched
from support.families import pristine, pristine_logits, write_family

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(200, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("family", ["llama", "cohere", "gemma3_text", "glm"])
def test_logits_are_to_the_bit_those_of_a_model_that_was_never_ours(family: str, tmp_path: Path) -> None:
    directory = write_family(family, tmp_path / family)
    model, alone = runner.load_model(directory), pristine(directory)
    layers = tracing.trace_layers(model)
    assert torch.equal(stock_logits(model, IDS), pristine_logits(alone, IDS))
    with untouched(model):
        assert [type(module) for module in model.modules()] == [type(module) for module in alone.modules()]
        assert model.config._attn_implementation == alone.config._attn_implementation
    assert any(isinstance(module, Rotary) for module in model.modules())
    assert tracing.trace_layers(model) == layers


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_far_out_angles_are_exact_where_the_model_s_own_are_not(family: str, tmp_path: Path) -> None:
    """Only distances matter to these models, so that a million positions further on nothing may change."""
    model = runner.load_model(write_family(family, tmp_path / family))
    near, far = stock_logits(model, IDS), stock_logits(model, IDS, 1_000_000)
    assert (far - near).abs().max() < 1e-4 * near.std()
    alone, at = pristine(tmp_path / family), torch.arange(len(IDS))[None] + 1_000_000
    with torch.inference_mode():
        inexact = alone(input_ids=torch.tensor([IDS]), position_ids=at, use_cache=False).logits[0]
    assert (inexact - near).abs().max() > 1e-3 * near.std()
