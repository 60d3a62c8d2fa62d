"""Scales of KV in 8-bit floats on the GPU's path, on a CPU: from a checkpoint, or measured."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.quantization import UNSCALED, LayerScales
from microturn.model.batch import Batch, Row
from microturn.model.gpu import flashinfer_attention, kv_scales, loading
from microturn.model.gpu.published_scales import PublishedScales
from microturn.model.loaded import Loaded
from microturn.model.tracing import trace_layers
from microturn.settings import Settings
from microturn.zoo.model_files import SCALES_FILE
from support import models, plain_flashinfer, recorded_graphs
from support.families import write_family

FEW = {"kv_tokens": 256, "max_context": 128, "max_sessions": 4, "max_batch_tokens": 64}
CPU = torch.device("cpu")
AT = "model.layers.{}.self_attn"


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_flashinfer.install(monkeypatch)
    recorded_graphs.install(monkeypatch)
    monkeypatch.setattr(flashinfer_attention, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "no GPU")


def with_keys_times(factor: float) -> PreTrainedModel:
    """One whose keys are so much larger, and whose values are so much smaller; it computes the same."""
    model = models.with_served_heads("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= factor
            layer.self_attn.q_proj.weight /= factor
            layer.self_attn.v_proj.weight /= factor
            layer.self_attn.o_proj.weight *= factor
    return model


def logits_of(loaded: Loaded, num_tokens: int = 20) -> Tensor:
    ids = list(range(5, 5 + num_tokens))
    return loaded.runner.run(Batch([Row(ids, 0, [3, 1], num_drafts=3)])).clone()


@pytest.mark.parametrize("attention", ["flashinfer", "torch"])
@pytest.mark.parametrize("factor", [1.0, 4096.0])
def test_keys_and_values_of_any_size_are_told_as_well(factor: float, attention: str) -> None:
    """Unscaled, keys beyond 448 would all be that, and values below a thousandth nothing."""
    exact = loading.make_ready(with_keys_times(factor), Settings(**FEW, attention=attention))
    loaded = loading.make_ready(with_keys_times(factor), Settings(**FEW, attention=attention, kv_dtype="float8"))
    expected = logits_of(exact)
    assert 0 < (logits_of(loaded) - expected).norm() < 0.08 * expected.norm()
    assert (exact.runner.kv.scales, len(loaded.runner.kv.scales)) == ("", 32)


def test_larger_keys_have_larger_scales() -> None:
    plain, larger = (
        kv_scales.measured_scales(model, trace_layers(model)) for model in map(with_keys_times, (1.0, 4096.0))
    )
    assert [LayerScales(of.keys * 4096, of.values / 4096) for of in plain] == larger
    assert kv_scales.measured_scales(with_keys_times(1.0), trace_layers(models.with_served_heads("llama"))) == plain


def test_a_measurement_leaves_room_and_none_of_nothing() -> None:
    assert [kv_scales._scale_of(largest) for largest in (112.0, 113.0, 448.0)] == [1.0, 2.0, 4.0]
    assert [kv_scales._scale_of(largest) for largest in (0.0, torch.nan, torch.inf)] == [1.0, 1.0, 1.0]


def published(model_dir: Path, scales: dict[str, float]) -> Settings:
    save_file({name: torch.tensor(of) for name, of in scales.items()}, model_dir / SCALES_FILE)
    return Settings(model_dir=str(model_dir), kv_dtype="float8", **FEW, attention="torch")


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({0: (0.3, 0.2), 1: (0.4, 0.1)}, [(0.3, 0.2), (0.4, 0.1)]),
        ({1: (0.4, 0.1)}, [None, (0.4, 0.1)]),
        ({0: (-1.0, torch.nan), 1: (0.4, 0.0)}, [None, (0.4, None)]),
    ],
)
def test_those_of_a_checkpoint_are_used_and_the_others_measured(
    scales: dict[int, tuple[float, float]],
    expected: list[tuple[float | None, float | None] | None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model_dir = write_family("qwen2", tmp_path / "m")
    told = {
        f"{AT.format(layer)}.{part}_scale": of
        for layer, both in scales.items()
        for part, of in zip("kv", both, strict=True)
    }
    with caplog.at_level(logging.INFO):
        loaded = loading.load(published(model_dir, told), CPU)
    model = loading.load(Settings(model_dir=str(model_dir), **FEW, attention="torch"), CPU).runner.model
    measured = kv_scales.measured_scales(model, trace_layers(model))
    got = [layer.float8 for layer in loaded.runner.kv.layers]
    for of, wanted, found in zip(got, expected, measured, strict=True):
        for scale, known, other in zip(of, wanted or (None, None), found, strict=True):
            assert scale == pytest.approx(other if known is None else known)
    num_known = sum(known is not None for both in expected for known in both or ())
    assert f"{num_known} of 4 scales of KV come from the checkpoint" in caplog.text


def test_wrong_scales_are_found(tmp_path: Path) -> None:
    """Too small ones, by which keys and values become the largest number."""
    model_dir = write_family("qwen2", tmp_path / "m")
    told = {f"{AT.format(layer)}.{part}_scale": 1e-5 for layer in range(2) for part in "kv"}
    with pytest.raises(InvalidArgument, match=r"deviate by .*: set kv_dtype=auto"):
        loading.load(published(model_dir, told), CPU)


@pytest.mark.parametrize("build", [models.sliding_window, models.recurrent, models.experts])
def test_layers_of_other_kinds_have_them_too(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    scales = kv_scales.kv_scales(model, trace_layers(model), PublishedScales())
    assert len(scales) == len(trace_layers(model))
    assert UNSCALED not in scales
