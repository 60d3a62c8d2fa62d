"""Scales of KV under the names that releases have given them, and what becomes of them in a conversion."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from microturn.zoo.kv_scales import kv_scales
from microturn.zoo.model_files import SCALES_FILE, stored_tensors
from microturn.zoo.store import resolve_model
from support import media_checkpoints
from support.families import write_family
from support.quantized_checkpoints import KINDS, write_quantized

_AT = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("k_scale", "v_scale"), ("k_scale", "v_scale")),  # compressed-tensors
        (("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.k_scale", "v_proj.v_scale")),  # Model Optimizer
        (("k_proj.output_scale", "v_proj.output_scale"), ("k_proj.output_scale", "v_proj.output_scale")),
        (("attn.k_scale", "attn.v_scale"), ("attn.k_scale", "attn.v_scale")),
        (("kv_scale",), ("kv_scale", "kv_scale")),  # AutoFP8
        (("q_scale", "k_proj.weight_scale", "v_proj.input_scale", "o_proj.output_scale"), None),
    ],
)
def test_each_name_is_known(names: tuple[str, ...], expected: tuple[str, str] | None, tmp_path: Path) -> None:
    save_file({f"{_AT}.{name}": torch.ones(1) for name in names}, tmp_path / "m.safetensors")
    with ExitStack() as files:
        found = kv_scales(stored_tensors(tmp_path, files))
    ours = (f"{_AT}.k_scale", f"{_AT}.v_scale")
    assert found == ({} if expected is None else {name: f"{_AT}.{of}" for name, of in zip(ours, expected, strict=True)})


def test_scales_of_heads_are_left_out(tmp_path: Path) -> None:
    save_file({f"{_AT}.k_scale": torch.ones(4, 1), f"{_AT}.v_scale": torch.ones(1, 1)}, tmp_path / "m.safetensors")
    with ExitStack() as files:
        assert kv_scales(stored_tensors(tmp_path, files)) == {f"{_AT}.v_scale": f"{_AT}.v_scale"}


def test_they_come_along(tmp_path: Path) -> None:
    plain = write_family("qwen2", tmp_path / "plain")
    write_quantized(plain, tmp_path / "quantized", tmp_path / "intended", KINDS["fbgemm_fp8"])
    _add(tmp_path / "quantized" / "a.safetensors", {f"{_AT}.k_scale": 0.5, f"{_AT}.v_scale": 0.25})
    model_dir = resolve_model(str(tmp_path / "quantized"), cache_dir=tmp_path / "cache")
    scales = load_file(model_dir / SCALES_FILE)
    assert {name: float(of) for name, of in scales.items() if "_scale" in name and of.dim() == 0} == {
        f"{_AT}.k_scale": 0.5,
        f"{_AT}.v_scale": 0.25,
    }
    assert not any("scale" in name for name in load_file(model_dir / "model.safetensors"))


def test_those_of_a_language_part_have_its_names(tmp_path: Path) -> None:
    whole = media_checkpoints.llava(tmp_path / "plain")
    write_quantized(whole, tmp_path / "quantized", tmp_path / "intended", KINDS["fbgemm_fp8"])
    _add(tmp_path / "quantized" / "a.safetensors", {"language_model.model.layers.0.self_attn.k_scale": 0.5})
    model_dir = resolve_model(str(tmp_path / "quantized"), cache_dir=tmp_path / "cache")
    scales = load_file(model_dir / SCALES_FILE)
    assert {f"{_AT}.k_scale", f"{_AT}.q_proj.weight_scale"} <= scales.keys()
    weights = load_file(model_dir / "model.safetensors")
    assert {name.removesuffix("_scale") for name in scales if name.endswith("weight_scale")} <= weights.keys()


def _add(file: Path, scales: dict[str, float]) -> None:
    more = {name: torch.tensor([of]) for name, of in scales.items()}
    save_file(load_file(file) | more, file, {"format": "pt"})
