"""Tests of `StoredWeights`: the results of a float32 model, with one layer in float32 at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from microturn.model import runner
from microturn.model.batch import Batch, Row
from microturn.model.cpu import loading
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.stored_weights import StoredWeights
from microturn.model.stock import stock_logits
from microturn.settings import Settings
from support.families import write_family

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(200, (60,), generator=torch.Generator().manual_seed(1)).tolist()
NUM_LAYERS = 2


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return model.model.layers


def num_wide(model: PreTrainedModel) -> int:
    """Layers all of whose weights are float32."""
    return sum({weight.dtype for weight in layer.parameters()} == {torch.float32} for layer in layers_of(model))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "qwen3_5_text", "deepseek_v3"])
def test_a_model_as_stored_computes_what_it_does_in_float32(family: str, tmp_path: Path) -> None:
    directory = write_family(family, tmp_path / family)
    wide = runner.load_model(directory)
    stored = StoredWeights(directory)
    assert num_wide(stored.model) == 0
    assert runner.trace_layers(stored.model) == runner.trace_layers(wide)
    expected = stock_logits(wide, IDS)
    assert torch.equal(stock_logits(stored.model, IDS), expected)
    assert num_wide(stored.model) == 0
    stored.widen()
    assert {weight.dtype for weight in stored.model.parameters()} == {torch.float32}
    assert torch.equal(stock_logits(stored.model, IDS), expected)
    for (name, ours), (_, theirs) in zip(stored.model.named_buffers(), wide.named_buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


def test_one_layer_at_a_time_is_wide(tmp_path: Path) -> None:
    model = StoredWeights(write_family("llama", tmp_path / "llama")).model
    seen: list[tuple[int, int]] = []

    def look(layer: nn.Module, *_: Any) -> None:
        seen.append((list(layers_of(model)).index(layer), num_wide(model)))

    for layer in layers_of(model):
        layer.register_forward_pre_hook(look)
    stock_logits(model, IDS)
    assert seen == [(index, 1) for index in range(NUM_LAYERS)]


def test_a_pass_that_fails_leaves_its_layer_as_stored(tmp_path: Path) -> None:
    model = StoredWeights(write_family("llama", tmp_path / "llama")).model
    expected = stock_logits(model, IDS)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    hook = layers_of(model)[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        stock_logits(model, IDS)
    hook.remove()
    assert num_wide(model) == 0
    assert torch.equal(stock_logits(model, IDS), expected)


def test_a_file_in_float32_stays_as_it_is(tmp_path: Path) -> None:
    """Nothing is copied out of it but what serves it by itself."""
    directory = write_family("llama", tmp_path / "llama")
    wide = runner.load_model(directory)
    wide.save_pretrained(tmp_path / "wide")
    stored = StoredWeights(tmp_path / "wide")
    assert num_wide(stored.model) == NUM_LAYERS
    assert torch.equal(stock_logits(stored.model, IDS), stock_logits(wide, IDS))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["int8", "float32"])
def test_what_serves_is_made_of_the_same_numbers(family: str, weights: str, tmp_path: Path) -> None:
    directory = write_family(family, tmp_path / family)
    loaded = loading.load(Settings(model_dir=str(directory), weights=weights, kv_tokens=256, max_context=256))
    wide = runner.load_model(directory)
    shapes = runner.trace_layers(wide)
    decoder = FusedLayers(wide, shapes, Int8Linear) if weights == "int8" else FusedLayers.of(wide, shapes)
    expected = runner.ModelRunner(wide, loaded.runner.kv, decoder=decoder).run(Batch([Row(IDS, 0, range(4))])).clone()
    assert torch.equal(loaded.runner.run(Batch([Row(IDS, 0, range(4))])), expected)
