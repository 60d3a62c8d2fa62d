"""Tests of `stored_model`: the results of a float32 model, in the memory of its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from microturn.model import runner, tracing
from microturn.model.batch import Batch, Row
from microturn.model.cpu import attention as native
from microturn.model.cpu import loading, stored_model
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.stored_weight import StoredWeight, as_stored
from microturn.model.cpu.weights import release_linears
from microturn.model.stock import stock_logits
from microturn.settings import Settings
from support.families import write_family

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(200, (60,), generator=torch.Generator().manual_seed(1)).tolist()


def stored_bytes(model: PreTrainedModel) -> int:
    return sum(as_stored(weight).nbytes for weight in model.parameters())


def mapped(model: PreTrainedModel) -> set[nn.Parameter]:
    """Parameters in memory that is mapped from a file of weights."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    files = [line[0].split("-") for line in maps if line[-1].endswith(".safetensors")]
    spans = [range(int(first, 16), int(end, 16)) for first, end in files]
    return {weight for weight in model.parameters() if any(weight.data_ptr() in span for span in spans)}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "qwen3_5_text", "deepseek_v3"])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_model_as_stored_computes_what_it_does_in_float32(
    family: str, is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr(stored_model, "_MOST_IN_MEMORY", 0)
    directory = write_family(family, tmp_path / family)
    wide = runner.load_model(directory)
    model = stored_model.read_model(directory)
    assert 0.5 <= stored_bytes(model) / stored_bytes(wide) < 0.6
    assert tracing.trace_layers(model) == tracing.trace_layers(wide)
    expected = stock_logits(wide, IDS)
    assert torch.equal(stock_logits(model, IDS), expected)
    stored_model.make_resident(model)
    assert 0.5 <= stored_bytes(model) / stored_bytes(wide) < 0.6
    assert torch.equal(stock_logits(model, IDS), expected)
    for (name, ours), (_, theirs) in zip(model.named_buffers(), wide.named_buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name


def test_weights_are_mapped_from_the_file_until_they_are_made_resident(tmp_path: Path) -> None:
    model = stored_model.read_model(write_family("llama", tmp_path / "llama"))
    weights = {weight for weight in model.parameters() if weight.dim() > 1}
    assert all(isinstance(weight, StoredWeight) for weight in weights)
    assert mapped(model) == weights
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    stored_model.make_resident(model)
    assert not mapped(model)


def test_a_shared_weight_stays_one(tmp_path: Path) -> None:
    model = stored_model.read_model(write_family("gemma", tmp_path / "gemma"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stored_model.make_resident(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_file_in_float32_stays_as_it_is(tmp_path: Path) -> None:
    wide = runner.load_model(write_family("llama", tmp_path / "llama"))
    wide.save_pretrained(tmp_path / "wide")
    model = stored_model.read_model(tmp_path / "wide")
    assert stored_bytes(model) == stored_bytes(wide)
    assert mapped(model)
    assert torch.equal(stock_logits(model, IDS), stock_logits(wide, IDS))


def test_where_no_kernel_can_run_all_is_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda *_: "no OpenMP")
    model = stored_model.read_model(write_family("llama", tmp_path / "llama"))
    assert {(type(weight), weight.dtype) for weight in model.parameters()} == {(nn.Parameter, torch.float32)}


def test_weights_are_freed_as_they_are_stored(tmp_path: Path) -> None:
    """Widened first, each would be allocated once more, in pieces that the process keeps."""
    model = stored_model.read_model(write_family("qwen3_moe", tmp_path / "qwen3_moe"))
    release_linears(model)
    freed = [weight for weight in model.parameters() if weight.is_meta]
    assert len(freed) == 2 * 6 + 1, "four projections and two stacks of experts in each layer, and the head"
    assert {as_stored(weight).dtype for weight in freed} == {torch.bfloat16}


@pytest.mark.parametrize("weights", ["int8", "float32"])
def test_what_serves_is_resident(weights: str, tmp_path: Path) -> None:
    directory = write_family("llama", tmp_path / "llama")
    loaded = loading.load(Settings(model_dir=str(directory), weights=weights, kv_tokens=256, max_context=256))
    assert not mapped(loaded.runner.model)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("weights", ["int8", "float32"])
def test_what_serves_is_made_of_the_same_numbers(family: str, weights: str, tmp_path: Path) -> None:
    directory = write_family(family, tmp_path / family)
    loaded = loading.load(Settings(model_dir=str(directory), weights=weights, kv_tokens=256, max_context=256))
    wide = runner.load_model(directory)
    shapes = tracing.trace_layers(wide)
    decoder = FusedLayers(wide, shapes, Int8Linear) if weights == "int8" else FusedLayers.of(wide, shapes)
    expected = runner.ModelRunner(wide, loaded.runner.kv, decoder=decoder).run(Batch([Row(IDS, 0, range(4))])).clone()
    assert torch.equal(loaded.runner.run(Batch([Row(IDS, 0, range(4))])), expected)
