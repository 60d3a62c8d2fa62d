"""What serves is compared at load: a fault that only its types, its kernels or its graphs have is found and named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerGroups
from microturn.model.batch import Batch
from microturn.model.gpu import flashinfer_attention, loading
from microturn.model.gpu.few_layers import check_few_layers
from microturn.model.gpu.flashinfer_attention import FlashInferAttention
from microturn.model.gpu.glue import Glue, Projection, split_heads
from microturn.model.gpu.graphs import StepGraph
from microturn.model.gpu.layers import TorchLayers
from microturn.model.gpu.runner import GpuRunner
from microturn.model.gpu.served_probe import _steps, check_first_layers
from microturn.model.scores import Scores
from microturn.model.tracing import trace, trace_layers
from microturn.settings import Settings
from support import models, plain_flashinfer, recorded_graphs
from support.gpu_runner import gpu_runner

FEW = {"kv_tokens": 256, "max_context": 64, "max_sessions": 4, "max_batch_tokens": 32}


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_flashinfer.install(monkeypatch)
    recorded_graphs.install(monkeypatch)
    monkeypatch.setattr(flashinfer_attention, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "no GPU")


def served(family: str = "llama") -> PreTrainedModel:
    return models.with_served_heads(family, num_hidden_layers=6).to(torch.bfloat16)


def check(
    model: PreTrainedModel,
    glue: Glue | None = None,
    *,
    has_flashinfer: bool = False,
    plant: Callable[[TorchLayers], object] = lambda _: None,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Checks a model whose decoder has this glue and this fault."""
    layers, scores = trace(model)
    checked, few = check_few_layers(model, layers, scores, max_tokens=64)
    in_its_type = few.in_type_of(model)
    decoder = None if checked.decoder is None else TorchLayers.of(model, layers, glue)
    if decoder is not None:
        plant(decoder)
    check_first_layers(in_its_type, few, decoder, kv_dtype=kv_dtype, has_flashinfer=has_flashinfer)


class QueriesOneFurther:
    """As `split_heads`, but the positions of queries are off by one."""

    def __init__(self) -> None:
        self._step: Tensor | None = None

    def __call__(self, projection: Projection) -> tuple[Tensor, ...]:
        cos, sin, is_interleaved = projection.angles
        turned = torch.complex(cos, sin)
        if self._step is None:  # the first step begins with the first tokens of a session
            self._step = turned[1:2] / turned[:1]
        further = turned * self._step
        q, _, _ = split_heads(replace(projection, angles=(further.real, further.imag, is_interleaved)))
        return q, *split_heads(projection)[1:]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("has_flashinfer", [False, True])
def test_what_is_right_passes(family: str, has_flashinfer: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        check(served(family), has_flashinfer=has_flashinfer)
    assert "as served deviate by" in caplog.text


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_position_that_is_off_by_one_is_found_and_the_setting_named(family: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"first layers deviate by .* from those in float32 .*: set (.*)$"
    ) as found:
        check(served(family), replace(Glue(), split_heads=QueriesOneFurther()))
    assert found.value.args[0].endswith(": set compiled_glue=false")


def test_attention_that_is_off_is_found_and_the_setting_named(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = FlashInferAttention.attend

    def attend_by_others(self: Any, layer: int, q: Tensor, scores: Scores) -> Tensor:
        return attend(self, layer, q.roll(1, dims=0), scores)

    monkeypatch.setattr(FlashInferAttention, "attend", attend_by_others)
    with pytest.raises(InvalidArgument, match=r": set attention=torch$"):
        check(served(), has_flashinfer=True)
    both = replace(Glue(), gate=lambda gate_up, activation: activation(gate_up.chunk(2, dim=-1)[0]))
    with pytest.raises(InvalidArgument, match=r": set compiled_glue=false and attention=torch$"):
        check(served(), both, has_flashinfer=True)


def test_what_no_setting_mends_is_refused_too() -> None:
    for gain in (0.0, torch.nan):
        with pytest.raises(InvalidArgument, match=r": set weights=float32$"):
            check(served(), plant=lambda decoder, to=gain: decoder._layers[1].feed_forward_norm.gain.fill_(to))


@pytest.mark.parametrize("build", [models.experts, models.recurrent, models.layer_norms, models.llama])
def test_rounding_that_transformers_layers_have_too_is_no_fault(build: Callable[[], PreTrainedModel]) -> None:
    """Weights of these models are wide: rounding chooses other experts, and other keys."""
    loading.make_ready(build(), Settings(**FEW, attention="torch"))


def test_eight_bits_of_keys_may_deviate_by_more() -> None:
    check(served(), has_flashinfer=True, kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_replayed_steps_are_those_that_are_launched(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        loading.make_ready(served(family), Settings(**FEW))
    assert "logits of replayed steps deviate by 0.0e+00" in caplog.text


@pytest.mark.parametrize("forgotten", ["_positions", "_hidden", "_wanted"])
def test_a_graph_that_does_not_get_its_input_is_found(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = StepGraph.replay

    def stale(self: Any, *args: Any) -> Tensor:
        held = getattr(self, forgotten)
        setattr(self, forgotten, held.clone())
        try:
            return replay(self, *args)
        finally:
            setattr(self, forgotten, held)

    monkeypatch.setattr(StepGraph, "replay", stale)
    with pytest.raises(InvalidArgument, match=r"replayed from CUDA graphs deviate .*: set cuda_graphs=false$"):
        loading.make_ready(served(), Settings(**FEW))
    loading.make_ready(served(), Settings(**FEW, cuda_graphs=False))


@pytest.mark.parametrize("limits", [(1, 1, 64), (4, 2, 64), (2, 256, 8), (256, 256, 4096), (3, 7, 30)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_keep_all_limits_and_sessions_their_own_pages(family: str, limits: tuple[int, int, int]) -> None:
    max_rows, max_tokens, max_context = limits
    runner = gpu_runner(served(family), num_pages=12)
    steps = list(_steps(runner, *limits))
    assert steps or max_context < 21
    for step in steps:
        assert 1 <= len(step.rows) <= max_rows
        assert step.num_tokens <= max_tokens
        assert max(row.position + len(row.token_ids) for row in step.rows) <= max_context
        for kind, of in enumerate(runner.kv.groups.kinds):
            for row in step.rows:
                num_pages = -(-(row.position + len(row.token_ids)) // runner.kv.page_size)
                assert len(row.seen_by(kind).pages) == num_pages * of.num_groups
        pages = [
            page for row in step.rows for kind in range(len(runner.kv.groups.kinds)) for page in row.seen_by(kind).pages
        ]
        assert len(set(pages)) == len(pages)
        assert max(pages) < runner.kv.num_pages - 1, "the last one is for padding"


def test_a_pool_without_room_for_a_session_has_no_steps() -> None:
    runner = gpu_runner(served("gemma3"), num_pages=1)
    assert runner.kv.groups.num_groups == LayerGroups.of(trace_layers(runner.model)).num_groups
    assert list(_steps(runner, 4, 64, 64)) == []


def test_launched_steps_are_so_meanwhile_only() -> None:
    runner: GpuRunner = loading.make_ready(served(), Settings(**FEW)).runner
    assert runner.has_graphs
    with runner.without_graphs():
        assert not runner.has_graphs
        runner.run(Batch(next(_steps(runner, 1, 32, 64)).rows))
    assert runner.has_graphs
