"""Weights in 8-bit floats on the GPU's path, on a CPU: published checkpoints, and what is rounded at load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.model.batch import Batch, Row
from microturn.model.gpu import float8, float8_linear, loading
from microturn.model.loaded import Loaded
from microturn.settings import Settings
from microturn.zoo.model_files import SCALES_FILE
from microturn.zoo.store import resolve_model
from support import models
from support.families import pristine, write_family
from support.quantized_checkpoints import KINDS, write_quantized

FEW = {"kv_tokens": 256, "max_context": 128, "max_sessions": 4, "max_batch_tokens": 64, "attention": "torch"}
CPU = torch.device("cpu")
IDS = list(range(5, 45))

# How inputs of a checkpoint's products are rounded: in blocks as weights are, or each as a whole.
BLOCKS = {"fbgemm_fp8": None, "compressed-tensors float, tensor": None, "fp8, blocks of 32": 32}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen2", tmp_path_factory.mktemp("plain") / "qwen2", intermediate_size=96)


def published(plain: Path, tmp_path: Path, kind: str, dtype: torch.dtype = torch.bfloat16) -> tuple[str, Path]:
    """A converted FP8 checkpoint, and a plain one of what its weights stand for, in this type."""
    write_quantized(plain, tmp_path / "quantized", tmp_path / "intended", replace(KINDS[kind], dtype=dtype))
    return str(resolve_model(str(tmp_path / "quantized"), cache_dir=tmp_path / "cache")), tmp_path / "intended"


def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what is no 8-bit float in float32: then results are those of an oracle, but for sums in another order."""
    monkeypatch.setitem(loading.DTYPES, "auto", torch.float32)


def with_rounded_inputs(model: PreTrainedModel, block: int | None) -> PreTrainedModel:
    """Rounds what products of layers are given to 8-bit floats and back."""

    def round_input(_module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = given
        rows = x.flatten(0, -2)
        return (float8.decode(*float8.quantize(rows, block or x.shape[-1])).view(x.shape),)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            module.register_forward_pre_hook(round_input)
    return model


def logits_of(loaded: Loaded, ids: list[int]) -> Tensor:
    return loaded.runner.run(Batch([Row(ids, 0, list(range(-(-len(ids) // 16))), num_drafts=len(ids) - 1)]))


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_published_checkpoint_is_multiplied_as_it_is(
    plain: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_float32(monkeypatch)
    model_dir, intended = published(plain, tmp_path, kind, torch.float32)
    with caplog.at_level(logging.INFO):
        loaded = loading.load(Settings(model_dir=model_dir, **FEW), CPU)
    assert loaded.weights == "float8"
    assert "14 of 15 products have weights in float8, the others in float32" in caplog.text
    layers = [module for name, module in loaded.runner.model.named_modules() if name.endswith("_proj")]
    assert {module.weight.dtype for module in layers} == {torch.float8_e4m3fn}
    with torch.inference_mode():
        expected = with_rounded_inputs(pristine(intended), BLOCKS[kind])(torch.tensor([IDS])).logits[0]
        exact = pristine(intended)(torch.tensor([IDS])).logits[0]
    got = logits_of(loaded, IDS)
    # Sums in another order round an input to the number beside it, here and there.
    assert (got - expected).norm() < 0.02 * expected.norm()
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    assert 0.02 * exact.norm() < (got - exact).norm() < 0.3 * exact.norm()


def test_its_weights_may_be_plain(plain: Path, tmp_path: Path) -> None:
    model_dir, _ = published(plain, tmp_path, "fbgemm_fp8")
    loaded = loading.load(Settings(model_dir=model_dir, weights="bfloat16", **FEW), CPU)
    assert loaded.weights == "bfloat16"
    assert {parameter.dtype for parameter in loaded.runner.model.parameters()} == {torch.bfloat16}


def test_a_plain_checkpoint_is_rounded_if_that_is_set(plain: Path) -> None:
    of_auto, rounded = (
        loading.load(Settings(model_dir=str(plain), weights=weights, **FEW), CPU) for weights in ("auto", "float8")
    )
    assert (of_auto.weights, rounded.weights) == ("bfloat16", "float8")
    layers = [module for name, module in of_auto.runner.model.named_modules() if name.endswith("_proj")]
    assert of_auto.weight_bytes - rounded.weight_bytes == sum(module.weight.numel() for module in layers)
    got, expected = logits_of(rounded, IDS), logits_of(of_auto, IDS)
    assert 0 < (got - expected).norm() < 0.3 * expected.norm()


def test_layers_that_are_not_ours_are_not_rounded(
    tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidArgument, match=r"'weights' cannot be float8 here: .*; set weights=bfloat16"):
        loading.make_ready(models.layer_norms(), Settings(weights="float8", **FEW))
    model_dir, _ = published(plain, tmp_path, "fbgemm_fp8")
    monkeypatch.setattr(float8_linear, "unavailable_reason", lambda _: "it is too old")
    loaded = loading.load(Settings(model_dir=model_dir, **FEW), CPU)
    assert loaded.weights == "bfloat16"
    assert "the checkpoint's 8-bit floats are served in bfloat16: it is too old" in caplog.text
    with pytest.raises(InvalidArgument, match="'weights' cannot be float8 here: it is too old; set weights=bfloat16"):
        loading.load(Settings(model_dir=model_dir, weights="float8", **FEW), CPU)


def test_a_model_without_a_weight_that_can_be_multiplied_is_refused() -> None:
    with pytest.raises(
        InvalidArgument, match="cannot be float8 here: no weight of the layers has sides of whole vectors of 16"
    ):
        loading.make_ready(models.with_served_heads("llama", hidden_size=40), Settings(weights="float8", **FEW))


def test_what_is_wrong_with_the_products_is_found(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir, _ = published(plain, tmp_path, "fbgemm_fp8")
    monkeypatch.setattr(float8_linear.Float8Linear, "__call__", _of_other_rows(float8_linear.Float8Linear.__call__))
    with pytest.raises(InvalidArgument, match=r"first layers deviate by .*: set weights=bfloat16$"):
        loading.load(Settings(model_dir=model_dir, **FEW), CPU)


def test_damaged_scales_are_told(plain: Path, tmp_path: Path) -> None:
    model_dir, _ = published(plain, tmp_path, "fbgemm_fp8")
    (Path(model_dir) / SCALES_FILE).write_bytes(b"\0" * 50)
    with pytest.raises(InvalidArgument, match=f"the scales in .*{SCALES_FILE} cannot be read"):
        loading.load(Settings(model_dir=model_dir, **FEW), CPU)


def _of_other_rows(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda product, x, out: multiply(product, x.roll(1, 0), out)
