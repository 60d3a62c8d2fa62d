"""Loading as for several GPUs, on a CPU: two processes, torch's attention, and no graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from microturn.engine import loading
from microturn.errors import InvalidArgument
from microturn.model import runner, tracing
from microturn.model.batch import Batch, Row
from microturn.model.parallel import gpu_loading
from microturn.model.parallel.followers import Followers
from microturn.settings import Settings
from support import models
from support.oracle import TOLERANCE, stock_logits
from support.tiny_model_dir import write_tiny_model

CPU = torch.device("cpu")
FEW = {"kv_tokens": 256, "max_context": 128, "max_batch_tokens": 64}


@pytest.fixture
def followers() -> Iterator[Followers]:
    followers = Followers(2)
    yield followers
    followers.close()


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    models.grouped_heads().save_pretrained(tmp_path)
    return str(tmp_path)


def require_no_followers() -> None:
    children = psutil.Process().children()
    assert not [of for of in children if "microturn.model.parallel.follower" in of.cmdline()]


@pytest.mark.parametrize(("weights", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_each_process_has_half_of_the_heads_and_both_the_logits_of_one(
    followers: Followers, model_dir: str, weights: str, dtype: torch.dtype
) -> None:
    loaded = gpu_loading.load(Settings(model_dir=model_dir, weights=weights, **FEW), CPU, followers)
    whole = runner.load_model(model_dir)
    shapes = tracing.trace_layers(whole)
    kv = loaded.runner.kv
    assert [layer.elements.shape[2] for layer in kv.layers] == [shape.num_kv_heads // 2 for shape in shapes]
    assert kv.layers[0].elements.dtype == dtype
    assert (loaded.pool.num_pages, kv.num_pages) == (16, 17)
    assert loaded.pool_bytes == sum(2 * 256 * of.num_kv_heads * of.head_dim * dtype.itemsize for of in shapes)
    assert loaded.session_bytes == loaded.pool_bytes // 2
    assert loaded.runner.vocab_size == models.VOCAB_SIZE
    got = loaded.runner.run(Batch([Row([5, 6, 7], 0, [3])]))
    expected = stock_logits(whole, [5, 6, 7])[-1:]
    assert (got - expected).abs().max() < (0.2 * expected.std() if weights == "auto" else TOLERANCE)


def test_a_pool_fits_the_fullest_gpu_wherever_that_is(
    followers: Followers, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passes take is measured at rank 0, here nothing, and not against another GPU's memory."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (70 << 30, 80 << 30))
    monkeypatch.setattr(gpu_loading.SharedServing, "least_free_bytes", lambda _serving: 3 << 30)
    loaded = gpu_loading.load(Settings(model_dir=model_dir, max_context=128, cuda_graphs=False), CPU, followers)
    assert 1 << 30 < loaded.kv_tokens * loaded.needs.token_bytes < 2 << 30, "two GPUs, and 2 of 3 GB are kept free"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weights": "float8"}, "setting 'weights' cannot be float8 with tensor_parallel=2"),
        ({"kv_dtype": "float8"}, "setting 'kv_dtype' cannot be float8 with tensor_parallel=2"),
        ({"weights": "int8"}, "'weights' is one of auto, bfloat16, float8, float32 on a GPU"),
    ],
)
def test_what_several_gpus_cannot_have_is_refused(
    followers: Followers, model_dir: str, settings: dict[str, str], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        gpu_loading.load(Settings(model_dir=model_dir, **settings, **FEW), CPU, followers)


def test_a_cpu_refuses_what_cannot_be_cut_and_no_process_stays(tmp_path: Path) -> None:
    models.experts().save_pretrained(tmp_path)
    settings = Settings(model_dir=str(tmp_path), device="cpu", tensor_parallel=2, bind_threads=False, **FEW)
    with pytest.raises(InvalidArgument, match="setting 'tensor_parallel' cannot be 2 for MixtralForCausalLM: it has"):
        loading.prepare(settings)
    require_no_followers()


def test_without_a_tokenizer_no_process_stays(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    (directory / "tokenizer.json").write_text("{")
    before = os.sched_getaffinity(0)
    with pytest.raises(InvalidArgument, match=r"the tokenizer in .* cannot be loaded"):
        loading.prepare(Settings(model_dir=str(directory), device="cpu", tensor_parallel=2, bind_threads=True, **FEW))
    require_no_followers()
    assert os.sched_getaffinity(0) == before


def test_settings_that_do_not_fit_leave_no_process_and_the_next_load_works(tmp_path: Path) -> None:
    shared = {
        "model_dir": str(write_tiny_model(tmp_path / "tiny")),
        "device": "cpu",
        "tensor_parallel": 2,
        "bind_threads": True,
    }
    before = os.sched_getaffinity(0)
    with pytest.raises(InvalidArgument, match="does not hold one context"):
        loading.prepare(Settings(kv_tokens=64, max_context=128, **shared))
    require_no_followers()
    assert os.sched_getaffinity(0) == before
    prepared = loading.prepare(Settings(kv_tokens=256, max_context=128, **shared))
    try:
        alone = loading.prepare(Settings(kv_tokens=256, max_context=128, **shared | {"tensor_parallel": 1}))
        assert prepared.loaded.weights == alone.loaded.weights == "int8"
        assert prepared.loaded.weight_bytes >= alone.loaded.weight_bytes
        with pytest.raises(InvalidArgument, match="this process shares a model with others already"):
            loading.prepare(Settings(kv_tokens=256, max_context=128, **shared))
    finally:
        prepared.loaded.runner.close()
    require_no_followers()
