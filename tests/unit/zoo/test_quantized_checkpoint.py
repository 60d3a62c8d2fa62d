"""Quantized checkpoints, written here by their published layouts, against the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from microturn.engine.loading import load_engine
from microturn.errors import InvalidArgument
from microturn.model.gpu import float8
from microturn.settings import Settings
from microturn.zoo import float8_formats
from microturn.zoo.model_files import SCALES_FILE, stored_tensors
from microturn.zoo.quantized_checkpoint import QuantizedCheckpoint
from microturn.zoo.sources import QuantizedSource, _DirectorySource
from microturn.zoo.store import resolve_model
from support.driver import Driver
from support.families import pristine, write_family
from support.quantized_checkpoints import KINDS, Kind, gptq, modelopt, write_quantized

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
    written = [weight for path in (tmp_path / "converted").glob("*.safetensors") for weight in load_file(path).values()]
    assert checkpoint.converted_bytes == sum(weight.nbytes for weight in written)


_SERVED = ["gptq 4, asymmetric, act-order", "awq", "compressed-tensors packed 4"]
_FLOAT8 = [name for name in KINDS if "fp8" in name or "modelopt" in name or "float" in name]


@pytest.mark.parametrize("kind", [*_SERVED, *_FLOAT8])
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


@pytest.mark.parametrize("kind", _FLOAT8)
def test_plain_weights_are_the_published_numbers_of_the_scales_beside_them(
    plain: Path, tmp_path: Path, kind: str
) -> None:
    quantized, _ = _write(plain, tmp_path, KINDS[kind])
    QuantizedCheckpoint(quantized).convert(tmp_path / "converted", label="m")
    published = {name: of for shard in "ab" for name, of in load_file(quantized / f"{shard}.safetensors").items()}
    weights = load_file(tmp_path / "converted" / "model.safetensors")
    has_scales = (tmp_path / "converted" / SCALES_FILE).exists()
    scales = load_file(tmp_path / "converted" / SCALES_FILE) if has_scales else {}
    numbers = {name for name, of in published.items() if of.dtype == torch.float8_e4m3fn}
    # A block that is cut off has no place beside whole ones.
    block_len = {"fp8, blocks": 24, "compressed-tensors float, block": 40}.get(kind, 1)
    is_cut_off = {name for name in numbers if weights[name].shape[1] % block_len}
    assert {f"{name}_scale" for name in numbers - is_cut_off} == scales.keys()
    for name in numbers - is_cut_off:
        assert scales[f"{name}_scale"].dtype == torch.float32
        assert torch.equal(float8.encode(weights[name], scales[f"{name}_scale"]).float(), published[name].float()), name


def test_an_older_conversion_is_made_anew_since_it_lacks_scales(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, _ = _write(plain, tmp_path, KINDS["fbgemm_fp8"])
    with monkeypatch.context() as before:
        before.setattr(QuantizedSource, "facts", _DirectorySource.facts)
        model_dir = resolve_model(str(quantized), cache_dir=tmp_path / "cache")
    (model_dir / SCALES_FILE).unlink()
    assert resolve_model(str(quantized), cache_dir=tmp_path / "cache") == model_dir
    assert (model_dir / SCALES_FILE).is_file()


def test_model_optimizer_s_own_file_says_how_weights_are_quantized(plain: Path, tmp_path: Path) -> None:
    """Early releases write nothing to config.json: transformers would take the numbers for the weights."""
    quantized, intended = _write(plain, tmp_path, modelopt("FP8"))
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(said))
    model_dir = resolve_model(str(quantized), cache_dir=tmp_path / "cache")
    assert not (model_dir / "hf_quant_config.json").exists()
    expected = load_file(intended / "model.safetensors")
    assert all(torch.equal(expected[name], of) for name, of in load_file(model_dir / "model.safetensors").items())
    (quantized / "hf_quant_config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"hf_quant_config.json cannot be read as a quantization: KeyError"):
        resolve_model(str(quantized), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda scale: scale[:-1], r"scales of the shape \[\d+, 1\] do not fit a weight of the shape \[\d+, \d+\]"),
        (lambda scale: scale[..., None], r"scales of the shape \[\d+, 1, 1\] do not fit"),
        (lambda scale: scale[:0], r"scales of the shape \[0, 1\] do not fit"),
        (lambda scale: scale.to(torch.uint8), "scales are of the type U8, and nothing says what that means"),
        (lambda _: None, "is of the type F8_E4M3, and nothing says what that means"),
    ],
)
def test_scales_that_cannot_be_a_weight_s_are_refused(
    plain: Path, tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor | None], complaint: str
) -> None:
    quantized, _ = _write(plain, tmp_path, KINDS["compressed-tensors float, channel"])
    shard = load_file(quantized / "a.safetensors") | load_file(quantized / "b.safetensors")
    name = next(name for name in shard if name.endswith("weight_scale"))
    changed = shard | {name: change(shard[name])}
    save_file({name: of.contiguous() for name, of in changed.items() if of is not None}, quantized / "a.safetensors")
    (quantized / "b.safetensors").unlink()
    (quantized / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidArgument, match=complaint):
        resolve_model(str(quantized), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_file_that_breaks_off_is_refused(plain: Path, tmp_path: Path) -> None:
    quantized, _ = _write(plain, tmp_path, KINDS["fp8, blocks of 32"])
    content = (quantized / "a.safetensors").read_bytes()
    (quantized / "a.safetensors").write_bytes(content[:-100])
    with pytest.raises(InvalidArgument, match="cannot be read: SafetensorError"):
        resolve_model(str(quantized), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("shape", "scale", "block", "expected"),
    [
        ([300, 256], [3, 2], (128, 128), [300, 2]),
        ([300, 256], [3, 1, 2, 1], (128, 128), [300, 2]),
        ([100, 300], [1, 1, 3, 1], (128, 128), None),
        ([300, 256], [], None, [300, 1]),
        ([300, 256], [1], None, [300, 1]),
        ([300, 256], [300], None, [300, 1]),
        ([300, 256], [300, 8], None, [300, 8]),
    ],
)
def test_scales_are_told_for_each_row(
    shape: list[int], scale: list[int], block: tuple[int, int] | None, expected: list[int] | None, tmp_path: Path
) -> None:
    parts = {"weight": torch.zeros(shape).to(torch.float8_e4m3fn), "weight_scale": torch.ones(scale)}
    save_file(parts, tmp_path / "m.safetensors")
    with ExitStack() as files:
        assert float8_formats.row_scales_shape(stored_tensors(tmp_path, files), block) == expected
    if expected is not None:
        assert list(float8_formats.row_scales(parts, block).shape) == expected


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
        (
            {"quant_method": "bitsandbytes"},
            "with bitsandbytes are not supported, those of gptq, awq, fp8, fbgemm_fp8, m",
        ),
        ({"quant_method": "mxfp4"}, "with mxfp4 are not supported"),
        ({"bits": 4}, "with None are not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "as GPTQ's layout marlin are not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "as AWQ's gemv"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"as FP8 in blocks of \[128\] are not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "as Model Optimizer's NVFP4 are not supported"),
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
