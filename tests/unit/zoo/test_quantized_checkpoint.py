"""Quantized checkpoints, written here by their published layouts, against the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from microturn.engine.loading import load_engine
from microturn.errors import InvalidArgument
from microturn.settings import Settings
from microturn.zoo.quantized_checkpoint import QuantizedCheckpoint
from microturn.zoo.store import resolve_model
from support.driver import Driver
from support.families import pristine, write_family
from support.quantized_checkpoints import KINDS, Kind, gptq, write_quantized

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen2", tmp_path_factory.mktemp("plain") / "qwen2", tie_word_embeddings=True)


def _write(plain: Path, tmp_path: Path, kind: Kind) -> tuple[Path, Path]:
    write_quantized(plain, tmp_path / "quantized", tmp_path / "intended", kind)
    return tmp_path / "quantized", tmp_path / "intended"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_weight_is_the_one_that_the_format_stands_for(plain: Path, tmp_path: Path, kind: Kind) -> None:
    quantized, intended = _write(plain, tmp_path, kind)
    checkpoint = QuantizedCheckpoint(quantized)
    checkpoint.convert(tmp_path / "converted", label="m")
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    expected = load_file(intended / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, weight in expected.items():
        assert converted[name].dtype == kind.dtype
        assert torch.equal(converted[name], weight), name
    assert checkpoint.converted_bytes == sum(weight.nbytes for weight in expected.values())


@pytest.mark.parametrize("kind", ["gptq 4, asymmetric, act-order", "awq", "fp8, blocks", "compressed-tensors packed 4"])
def test_a_quantized_directory_is_served_with_the_tokens_of_its_weights(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("MICROTURN_CACHE", str(tmp_path / "cache"))
    quantized, intended = _write(plain, tmp_path, KINDS[kind])
    exact = {"weights": "float32", "kv_dtype": "float32", "num_threads": 1, "device": "cpu"}
    settings = Settings(model_dir=str(resolve_model(str(quantized))), kv_tokens=2048, max_context=512, **exact)
    driver = Driver(load_engine(settings).runner, num_pages=128, max_batch_tokens=64)
    prompt = list(range(3, 40))
    recorder, _ = driver.post(1, prompt, start=True, max_tokens=12, ignore_eos=True)
    driver.run()
    stock = pristine(intended)
    generated = stock.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert recorder.token_ids == generated[0, len(prompt) :].tolist()


def test_everything_but_the_weights_comes_along(plain: Path, tmp_path: Path) -> None:
    quantized, _ = _write(plain, tmp_path, gptq(4))
    (quantized / "additional_chat_templates").mkdir()
    (quantized / "additional_chat_templates" / "tools.jinja").write_text("x")
    (quantized / "README.md").write_text("not needed")
    QuantizedCheckpoint(quantized).convert(tmp_path / "converted", label="m")
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float16"
    names = {path.relative_to(tmp_path / "converted").as_posix() for path in (tmp_path / "converted").rglob("*.*")}
    assert {"tokenizer.json", "model.safetensors", "additional_chat_templates/tools.jinja"} <= names
    assert not names & {"model.safetensors.index.json", "README.md", "a.safetensors"}


_PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {}}}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"quant_method": "bitsandbytes"}, "with bitsandbytes are not supported, those of gptq, awq, fp8, compressed-"),
        ({"quant_method": "mxfp4"}, "with mxfp4 are not supported"),
        ({"bits": 4}, "with None are not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "as GPTQ's layout marlin are not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "as AWQ's gemv"),
        (_PACKED | {"format": "nvfp4-pack-quantized"}, "as compressed-tensors' nvfp4-pack-quantized are not"),
        (_PACKED | {"config_groups": {"a": {"format": "marlin-24"}, "b": {}}}, "as compressed-tensors' marlin-24 are"),
        (_PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "as compressed-tensors' sparse weights"),
        (_PACKED | {"transform_config": {"config_groups": {"R1": {}}}}, "as compressed-tensors' transforms"),
    ],
)
def test_another_method_is_refused_by_name_before_anything_is_written(
    plain: Path, tmp_path: Path, config: dict[str, Any], complaint: str
) -> None:
    quantized, _ = _write(plain, tmp_path, Kind(config, gptq(4).quantize))
    with pytest.raises(InvalidArgument, match=complaint):
        resolve_model(str(quantized), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_tensors_that_do_not_fit_the_method_are_refused(plain: Path, tmp_path: Path) -> None:
    quantized, _ = _write(plain, tmp_path, gptq(4))
    with pytest.raises(InvalidArgument, match=r"qweight is of the type I32, and nothing says what that means"):
        _resolve_as(quantized, {"quant_method": "fp8"}, tmp_path)
    shard = load_file(quantized / "b.safetensors")
    lacking = next(name for name in shard if name.endswith("scales"))
    save_file({name: tensor for name, tensor in shard.items() if name != lacking}, quantized / "b.safetensors")
    with pytest.raises(InvalidArgument, match=r"cannot be read: KeyError\('scales'\)"):
        _resolve_as(quantized, {"quant_method": "gptq"}, tmp_path)
    (quantized / "b.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InvalidArgument, match="cannot be read: SafetensorError"):
        _resolve_as(quantized, {"quant_method": "gptq"}, tmp_path)
    assert not (tmp_path / "cache").exists()


def test_words_of_other_bits_are_refused(plain: Path, tmp_path: Path) -> None:
    quantized, _ = _write(plain, tmp_path, gptq(2))
    with pytest.raises(InvalidArgument, match="words of 2 bits"):
        resolve_model(str(quantized), cache_dir=tmp_path / "cache")


def _resolve_as(directory: Path, quantization: dict[str, Any], tmp_path: Path) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return resolve_model(str(directory), cache_dir=tmp_path / "cache")
