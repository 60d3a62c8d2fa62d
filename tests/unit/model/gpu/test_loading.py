"""From settings to a runner on the GPU's path, on a CPU; and what is refused where."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from microturn.engine import loading
from microturn.errors import InvalidArgument
from microturn.model import runner
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.gpu import flashinfer_attention
from microturn.model.gpu import loading as gpu_loading
from microturn.model.gpu.glue import Glue
from microturn.model.loaded import Loaded
from microturn.settings import Settings
from support import models, plain_flashinfer, recorded_graphs
from support.oracle import TOLERANCE, stock_logits
from support.recorded_graphs import RecordedGraph
from support.tiny_model_dir import write_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def _with_plain_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer and CUDA graphs as far as a CPU can stand for them."""
    plain_flashinfer.install(monkeypatch)
    recorded_graphs.install(monkeypatch)
    monkeypatch.setattr(flashinfer_attention, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "no GPU")


def served(model: PreTrainedModel, **settings: object) -> Loaded:
    """One with heads that FlashInfer serves, ready for a few short sessions."""
    few = {"kv_tokens": 256, "max_context": 64, "max_sessions": 4, "max_batch_tokens": 16}
    return gpu_loading.make_ready(model, Settings(**few, **settings))


@pytest.mark.parametrize(("weights", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_weights_are_loaded_in_the_type_that_serves(
    weights: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[torch.dtype] = []
    read_model = runner.read_model
    monkeypatch.setattr(runner, "read_model", lambda model_dir, of: read.append(of) or read_model(model_dir, of))
    model_dir = str(write_tiny_model(tmp_path / "tiny"))
    loaded = gpu_loading.load(Settings(model_dir=model_dir, kv_tokens=100, max_context=64, weights=weights), CPU)
    assert read == [dtype]
    assert {parameter.dtype for parameter in loaded.runner.model.parameters()} == {dtype}
    assert loaded.no_fused_reason is None
    assert loaded.runner.no_window_reason is None


def test_a_checked_model_is_converted_and_has_one_page_more_than_the_pool() -> None:
    exact, model = models.llama(), models.llama()
    loaded = gpu_loading.make_ready(model, Settings(kv_tokens=100, max_context=64))
    assert (loaded.weights, loaded.attention) == ("bfloat16", "torch")
    assert model.dtype == loaded.runner.kv.layers[0].elements.dtype == torch.bfloat16
    assert (loaded.pool.num_pages, loaded.runner.kv.num_pages) == (7, 8)
    assert loaded.max_context == 64
    got = loaded.runner.run(Batch([Row([5, 6, 7], 0, [3])]))
    expected = stock_logits(exact, [5, 6, 7])[-1:]
    assert 0 < (got - expected).abs().max() < 0.2 * expected.std()


def test_float32_stays_exact() -> None:
    model = models.sliding_window()
    loaded = gpu_loading.make_ready(model, Settings(kv_tokens=100, max_context=64, weights="float32"))
    assert loaded.runner.kv.layers[0].elements.dtype == torch.float32
    assert loaded.runner.kv.groups.num_groups == 3
    got = loaded.runner.run(Batch([Row([5, 6, 7], 0, [3], others=[RowPages([4, 5])])]))
    assert (got[0] - stock_logits(model, [5, 6, 7])[-1]).abs().max() <= TOLERANCE


def test_recurrent_states_are_of_the_type_that_the_model_is_converted_to() -> None:
    exact, model = models.recurrent(), models.recurrent()
    loaded = gpu_loading.make_ready(model, Settings(kv_tokens=200, max_context=128))
    kv = loaded.runner.kv
    unused = iter(range(kv.num_pages))
    pages, states = list(islice(unused, 8)), kv.new_state_pages(100, unused)
    ids = [(7 * at) % 300 for at in range(80)]
    assert states is not None
    for first, last in ((0, 50), (50, 79), (79, 80)):
        row = Row(ids[first:last], first, pages[: -(-last // 16)], states=states[max(0, first - 1) // 64 :])
        got = loaded.runner.run(Batch([row]))
    expected = stock_logits(exact, ids)[-1:]
    assert 0 < (got - expected).abs().max() < 0.3 * expected.std()


@pytest.mark.usefixtures("_with_plain_flashinfer")
def test_graphs_are_captured_unless_they_are_turned_off() -> None:
    for wanted in (True, False):
        loaded = served(models.with_served_heads("llama"), cuda_graphs=wanted)
        assert loaded.attention == "flashinfer"
        num_replays = RecordedGraph.num_replays
        loaded.runner.run(Batch([Row([5, 6, 7], 0, [3])]))
        assert RecordedGraph.num_replays == num_replays + wanted


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own modules
def test_glue_is_compiled_on_a_gpu_unless_that_is_turned_off() -> None:
    gpu = torch.device("cuda", 0)
    assert gpu_loading.new_glue(Settings(), gpu) != Glue()
    assert gpu_loading.new_glue(Settings(compiled_glue=False), gpu) == Glue()
    assert gpu_loading.new_glue(Settings(), CPU) == Glue()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weights": "int8"}, "'weights' is one of auto, bfloat16, float8, float32 on a GPU, not 'int8'"),
        ({"attention": "native"}, "'attention' cannot be native on a GPU"),
        ({"attention": "flashinfer"}, "'attention' cannot be flashinfer here: FlashInfer runs on a GPU"),
    ],
)
def test_a_gpu_refuses_what_is_for_a_cpu(settings: dict[str, object], reason: str, tmp_path: Path) -> None:
    model_dir = str(write_tiny_model(tmp_path / "tiny"))
    with pytest.raises(InvalidArgument, match=reason):
        gpu_loading.load(Settings(model_dir=model_dir, kv_tokens=100, max_context=64, **settings), CPU)


@pytest.mark.parametrize("setting", ["weights=bfloat16", "weights=float8", "kv_dtype=float8", "attention=flashinfer"])
def test_a_cpu_refuses_what_is_for_a_gpu(setting: str, tmp_path: Path) -> None:
    name, _, value = setting.partition("=")
    settings = Settings(model_dir=str(write_tiny_model(tmp_path / "tiny")), device="cpu", **{name: value})
    with pytest.raises(InvalidArgument, match=f"setting '{name}' cannot be {value} on a CPU"):
        loading.load_engine(settings)


def test_a_gpu_needs_no_numba() -> None:
    """It wants a NumPy of its own, often another than what is installed beside a GPU."""
    program = (
        "import sys; sys.modules.update(numba=None, llvmlite=None)\n"
        "import microturn.model.gpu.loading, microturn.engine.loading"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told(tmp_path: Path) -> None:
    settings = Settings(model_dir=str(write_tiny_model(tmp_path / "tiny")), device="cuda")
    with pytest.raises(InvalidArgument, match=r"'device' cannot be cuda here: torch .* (is built without|finds no)"):
        loading.load_engine(settings)
